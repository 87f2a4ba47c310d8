"""Rendering beside torch's CUDA build, which brings triton along: in whatever order, the process must not crash.

Each test is a process of its own, because a crash is a segmentation fault.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT, needs_compiler, needs_gl, run_script

import ppo_pixel

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="this torch has no triton: torch's CUDA build for Linux brings it along",
)

MAKE_AND_RENDER = {
    "images of a MuJoCo env": """
from envs.pixels import PixelEnvs
envs = PixelEnvs("HalfCheetah-v5", 2, from_pixels=True, image_size=16)
envs.reset(1)
""",
    "images of a MuJoCo env, in workers": """
from envs.pixels import PixelEnvs
envs = PixelEnvs("Reacher2Dof-v0", 2, num_workers=2, from_pixels=True, image_size=16)
envs.reset(1)
envs.close()
""",
    "a video of a MuJoCo env": """
from envs.make import make_env
from envs.sync import RecordedEnvs
envs = RecordedEnvs(make_env("HalfCheetah-v5", render_mode="rgb_array"), "video.mp4")
envs.reset(1)
envs.close()
""",
    "a reacher, made with gymnasium alone": """
import gymnasium
env = gymnasium.make("envs:Reacher2Dof-v0", render_mode="rgb_array")
env.reset()
env.render()
""",
    "a renderer of MuJoCo after choose_gl": """
from envs.rendering import choose_gl
choose_gl()
import mujoco
mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 16, 16).render()
""",
    "a vector env that renders by itself": """
import os, envs
os.environ["MUJOCO_GL"] = "egl"
from envs.make import make_env
env = make_env("renders_at_import:Rendering-v0")
env.reset(seed=1)
""",
    "an env with images that renders by itself": """
import os, envs
os.environ["MUJOCO_GL"] = "egl"
from envs.pixels import PixelEnvs
envs = PixelEnvs("renders_at_import:RenderingPixels-v0", 1)
envs.reset(1)
""",
    "a renderer before everything of this repository": """
import os
os.environ["MUJOCO_GL"] = "egl"
import mujoco
mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 16, 16).render()
from envs.make import make_env
make_env("CartPole-v1").reset(seed=1)
""",
}

# An env of a user: its module renders when it is imported, and the env in every observation
RENDERS_AT_IMPORT = """
import gymnasium
import mujoco
import numpy as np

renderer = mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 16, 16)
renderer.render()

class Rendering(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, pixels=False):
        self.pixels = pixels
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        if pixels:
            self.observation_space = gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        image = renderer.render()
        return image if self.pixels else np.zeros(2, np.float32), {}

gymnasium.register("Rendering-v0", Rendering)
gymnasium.register("RenderingPixels-v0", Rendering, kwargs={"pixels": True})
"""

# An optimizer's step imports triton, and so does the compiler
TRAIN = """
import torch
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([parameter])
optimizer.zero_grad()
(2 * parameter).sum().backward()
optimizer.step()
print("trained")
"""


def run_in_process(code, folder, **more):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    for name in ("MUJOCO_GL", "DISPLAY"):
        environment.pop(name, None)
    environment |= more
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@needs_triton
@needs_gl
@pytest.mark.parametrize("name", MAKE_AND_RENDER)
def test_torch_can_import_triton_after_rendering(name, tmp_path):
    (tmp_path / "renders_at_import.py").write_text(RENDERS_AT_IMPORT)
    out = run_in_process(MAKE_AND_RENDER[name] + TRAIN, tmp_path)
    assert out.returncode == 0 and "trained" in out.stdout, (out.returncode, out.stderr)
    hidden = "torch compiles without triton" in out.stdout
    assert hidden == (name == "a renderer before everything of this repository"), out.stdout


@needs_triton
@needs_gl
@needs_compiler
def test_an_update_compiles_beside_a_renderer(tmp_path):
    code = MAKE_AND_RENDER["a renderer of MuJoCo after choose_gl"] + TRAIN
    code += "print(torch.compile(lambda x: (2 * x).sin())(torch.ones(3)))"
    out = run_in_process(code, tmp_path)
    assert out.returncode == 0 and "0.9093" in out.stdout, (out.returncode, out.stderr)


@needs_triton
@needs_gl
@needs_compiler
def test_an_update_compiles_without_triton_if_rendering_came_first(tmp_path):
    code = MAKE_AND_RENDER["a renderer before everything of this repository"] + TRAIN
    code += "print(torch.compile(lambda x: (2 * x).sin())(torch.ones(3)))"
    out = run_in_process(code, tmp_path)
    assert out.returncode == 0 and "0.9093" in out.stdout, (out.returncode, out.stderr)


@needs_triton
def test_triton_is_loaded_only_where_an_env_may_render(tmp_path):
    loaded = "print('libtriton' in open('/proc/self/maps').read())"
    out = run_in_process(f"import torch, envs.pixels, onefile_rl.runs\n{loaded}", tmp_path)
    assert out.stdout.split() == ["False"], out.stderr
    out = run_in_process(f"import envs\n{loaded}", tmp_path, MUJOCO_GL="egl")
    assert out.stdout.split() == ["True"], out.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux triton comes with torch")
def test_a_library_of_triton_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "triton/_C").mkdir(parents=True)
    (tmp_path / "triton/__init__.py").touch()
    (tmp_path / "triton/_C/libtriton.so").write_text("no library")
    code = "from envs.rendering import choose_gl\nchoose_gl()\nprint('alive')"
    out = run_in_process(code, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    line, alive = out.stdout.splitlines()
    assert line.startswith("The library of triton cannot be loaded: ") and alive == "alive"


@needs_triton
@needs_gl
@needs_compiler
def test_a_run_from_pixels_trains_with_a_compiled_update(tmp_path):
    line = "--env-id Reacher2Dof-v0 --from-pixels --image-size 36 --num-envs 2 --num-steps 16 --num-minibatches 2"
    line += " --update-epochs 1 --features 8 --total-timesteps 64 --compile"
    out = run_script(ppo_pixel, line, tmp_path, PATH=os.environ["PATH"])
    assert out.returncode == 0 and "Compiled the update in" in out.stdout, (
        out.returncode,
        out.stderr,
    )


NO_EGL = """
import ctypes
load = ctypes.CDLL.__init__
def init(self, name, *args, **kwargs):
    if "EGL" in str(name):
        raise OSError("no such library")
    load(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = init
from envs.rendering import choose_gl
choose_gl()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux MuJoCo renders with EGL")
def test_without_egl_other_processes_still_import_mujoco(tmp_path):
    """They inherit the environment of a process that was about to render."""
    code = NO_EGL + "import subprocess, sys\n"
    code += f"sys.exit(subprocess.call([sys.executable, '-c', {NO_EGL + 'import mujoco'!r}]))"
    out = run_in_process(code, tmp_path)
    assert out.returncode == 0, out.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux MuJoCo renders with EGL")
def test_without_egl_pixels_are_refused_in_one_line(tmp_path):
    code = NO_EGL + "from envs.pixels import PixelEnvs\n"
    code += "try:\n    PixelEnvs('HalfCheetah-v5', 1, from_pixels=True)\n"
    code += "except ValueError as error:\n    print(error)"
    out = run_in_process(code, tmp_path)
    assert out.stdout.startswith("--from-pixels needs OpenGL"), (out.stdout, out.stderr)
    assert len(out.stdout.splitlines()) == 1
