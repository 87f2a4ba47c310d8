"""Rendering of MuJoCo envs: OpenGL without a display, settings that are fast without a GPU, the camera, and videos."""

import ctypes
import functools
import importlib.util
import os
import sys
from pathlib import Path

NEEDS_GL = "needs OpenGL, on Debian and Ubuntu: apt-get install libegl1 libgl1"


def choose_gl():
    """Make MuJoCo and SDL render without a display: MuJoCo through EGL, SDL (gymnasium's classic envs) into memory.

    Call it before the first image, best before MuJoCo is imported.
    """
    load_triton()
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        # Processes that this one starts inherit the choice. Without EGL, importing mujoco with "egl" fails.
        os.environ.setdefault("MUJOCO_GL", "egl" if has_egl() else "disabled")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


@functools.cache
def has_egl():
    """Return whether EGL and OpenGL are installed."""
    return can_load("libEGL.so.1") and (can_load("libOpenGL.so.0") or can_load("libGL.so.1"))


def can_load(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@functools.cache
def load_triton():
    """Load the library of triton, which torch's CUDA build brings along. Call it before anything may render.

    torch imports triton when it compiles, and at the first step of an optimizer. Triton and Mesa's software renderer
    each contain an LLVM, and loading triton's after Mesa's is a segmentation fault. The library alone, without the
    package, takes 30 ms. If this process has rendered already, triton is hidden from torch, which needs it only on a
    GPU.
    """
    spec = importlib.util.find_spec("triton") if sys.platform == "linux" else None
    if spec is None or spec.submodule_search_locations is None:
        return
    libraries = [
        path
        for folder in spec.submodule_search_locations
        for path in Path(folder, "_C").glob("libtriton*.so")
    ]
    loaded = Path("/proc/self/maps").read_text(errors="replace")
    if "libtriton" in loaded or not libraries:
        return
    if "libLLVM" in loaded:
        sys.modules["triton"] = None
        print(
            "This process rendered before triton was loaded: torch compiles without triton, for the CPU only. "
            "Import envs and call envs.rendering.choose_gl() before the first image.",
            flush=True,
        )
        return
    try:
        ctypes.CDLL(str(libraries[0]))
    except OSError as error:  # torch would fail to import it too, and says so when it needs it
        print(f"The library of triton cannot be loaded: {error}", flush=True)


def disable_expensive_rendering(model):
    """Disable shadows, multisampling and reflections of a MuJoCo model. Call it before the first image.

    Without a GPU they take nearly all of the rendering time.
    """
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0
    model.mat_reflectance[:] = 0


def video_writer(path, fps, macro_block_size=1):
    """Return imageio's writer of a video. check_video() finds out whether the video is complete."""
    import imageio

    return imageio.get_writer(
        path, fps=fps, macro_block_size=macro_block_size, ffmpeg_log_level="quiet"
    )


def check_video(path):
    """Raise an OSError if a video is incomplete. ffmpeg writes it in a process of its own, and imageio does not report
    that the process has failed."""
    from imageio_ffmpeg import count_frames_and_secs

    try:
        num_frames, _ = count_frames_and_secs(str(path))
    except (OSError, RuntimeError):
        num_frames = 0
    if not num_frames:
        raise OSError("the video is incomplete")


def use_tracking_camera(env, env_kwargs):
    """Use the camera of a MuJoCo model that follows the robot, if it has one, and return the env.

    gymnasium's default camera stays at the start of a walk. It is left alone if the env chooses a camera itself or if
    `env_kwargs` names one. The floor, whose size only matters for rendering, is made larger.
    """
    base = env.unwrapped
    renderer = getattr(base, "mujoco_renderer", None)
    if getattr(renderer, "camera_id", None) != -1:  # -1 is gymnasium's default camera
        return env
    if {"camera_id", "camera_name", "default_camera_config"} & set(env_kwargs):
        return env

    from mujoco import mj_name2id, mjtGeom, mjtObj

    camera = mj_name2id(base.model, mjtObj.mjOBJ_CAMERA, "track")  # -1 if there is none
    renderer.camera_id = camera
    if camera != -1:
        planes = base.model.geom_type == mjtGeom.mjGEOM_PLANE
        base.model.geom_size[planes, :2] *= 100
        materials = base.model.geom_matid[planes]
        base.model.mat_texrepeat[materials[materials >= 0]] *= 100
    return env
