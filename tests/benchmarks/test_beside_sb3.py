"""benchmarks/beside_sb3.py: the scripts agree with SB3, and a changed copy differs where it was
changed."""

import html
import importlib.util
import os
import re
import subprocess
import sys

import parity_env  # noqa: F401
import pytest
import torch
from conftest import ROOT

pytest.importorskip("stable_baselines3")
TOOL = ROOT / "benchmarks" / "beside_sb3.py"
PPO = "--env-id parity_env:Parity-v0 --num-envs 2 --num-steps 64 --num-minibatches 4 --update-epochs 4"
PPO += " --hidden-sizes 16 16"
SAC = "--env-id parity_env:Parity-v0 --batch-size 16 --hidden-sizes 16 16"
PIXEL = "--env-id parity_env:ParityPixels{}-v0 --num-envs 2 --num-steps 32 --num-minibatches 4 --update-epochs 2"
PIXEL += " --features 16"


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Return a function that runs the comparison and returns its text and its page.

    `old` and `new` replace a part of the script's source in a copy.
    """
    spec = importlib.util.spec_from_file_location("beside_sb3", TOOL)
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool.fast, "THREADS", tool.fast.THREADS)
    threads = torch.get_num_threads()

    def run(script, line, iterations=3, old=None, new=None, tolerance=1e-4):
        path = ROOT / script
        if old:
            source = path.read_text()
            assert old in source
            path = tmp_path / "copy" / script
            path.parent.mkdir(exist_ok=True)
            path.write_text(source.replace(old, new))
        return tool.beside(path, iterations, tolerance, line.split())

    run.tool = tool
    yield run
    torch.set_num_threads(threads)


def columns(text):
    """Return the cells of the first iteration in the table."""
    return re.search(r"^ +1  .*$", text, re.MULTILINE)[0].split()[1:]


def plain(page):
    """Return the text of a page."""
    return html.unescape(re.sub("<.*?>", "", page))


# The scripts


@pytest.mark.parametrize(
    "more", ["", "--no-anneal-lr --no-norm-obs --no-norm-reward --ent-coef 0.1 --activation silu"]
)
def test_ppo_agrees(beside, more):
    text, _ = beside("ppo_continuous_multiagent.py", f"{PPO} {more}")
    assert "All quantities agree to 0.0001, in all 3 iteration(s)." in text and "*" not in text
    assert len(columns(text)) == 12 and "-" not in columns(text)


def test_ppo_for_discrete_actions_agrees(beside):
    text, _ = beside("ppo_discrete_multiagent.py", PPO.replace("Parity-v0", "Branches-v0"))
    assert "All quantities agree to 0.0001, in all 3 iteration(s)." in text and "*" not in text
    assert len(columns(text)) == 12 and "-" not in columns(text)


def test_a_recurrent_policy_is_refused(beside):
    with pytest.raises(ValueError, match="has a recurrent policy, and SB3's PPO has none"):
        beside("ppo_lstm_multiagent.py", PPO)


def test_target_kl_stops_both(beside):
    text, _ = beside(
        "ppo_continuous_multiagent.py", f"{PPO} --target-kl 0.003 --learning-rate 3e-3"
    )
    assert "All quantities agree" in text


def test_sac_agrees(beside):
    text, page = beside("sac_continuous.py", SAC)
    assert "All quantities agree" in text and len(columns(text)) == 7
    assert "def update_critics" in plain(page) and "def polyak_update" in plain(page)


@pytest.mark.parametrize(("kind", "more"), [("", ""), ("Discrete", "--frame-stack 3")])
def test_pixels_agree(beside, kind, more):
    text, page = beside("ppo_pixel.py", f"{PIXEL.format(kind)} {more}", iterations=2)
    assert "All quantities agree" in text and "-" not in columns(text)
    assert "class Frames" in plain(page) and "NatureCNN" in plain(page)


# Changed copies


@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        ("1 + args.clip_coef", "1 + 2 * args.clip_coef", "policy loss, in iteration 1, update"),
        (
            "gamma * gae_lambda * lastgaelam",
            "gae_lambda * lastgaelam",
            "advantages, in iteration 1:",
        ),
        (
            "action_std = self.actor_logstd.exp()",
            "action_std = 1.1 * self.actor_logstd.exp()",
            "actions, in iteration 1, step 1:",
        ),
        (
            "np.clip(rewards * reward_scale",
            "np.clip(2 * rewards * reward_scale",
            "rewards, in iteration 1, step 1:",
        ),
        (
            "+ args.vf_coef * v_loss",
            "+ 2 * args.vf_coef * v_loss",
            "gradient norm, in iteration 1, update 1:",
        ),
        (
            "= initial_lr * remaining",
            "= 2 * initial_lr * remaining",
            "policy loss, in iteration 1, update 2:",
        ),
        (
            "agent.obs_rms.update(torch.as_tensor(rollout.obs[:num_rows], device=args.device))",
            "pass",
            "observations, in iteration 2, step 1:",
        ),
    ],
)
def test_a_changed_copy_differs_where_it_was_changed(beside, old, new, first):
    text, _ = beside("ppo_continuous_multiagent.py", f"{PPO} --learning-rate 1e-2", 2, old, new)
    assert f"First difference: {first}" in text


def test_a_network_with_an_additional_layer(beside):
    """With a LayerNorm in front, SB3's weights are still copied to the other layers."""
    old = "nn.Sequential(*layers)"
    new = "nn.Sequential(nn.LayerNorm(sizes[0]), *layers)"
    text, _ = beside("ppo_continuous_multiagent.py", PPO, 1, old, new)
    names = "actor_mean.0.weight, actor_mean.0.bias, critic.0.weight, critic.0.bias"
    assert f"Not or only partly initialized with SB3's weights: {names}\n" in text
    assert "First difference: actions, in iteration 1, step 1:" in text


def test_a_third_q_network(beside):
    text, _ = beside("sac_continuous.py", SAC, 2, "num_critics=2", "num_critics=3")
    assert "First difference: critic loss, in iteration 2, step 1:" in text
    assert "SB3's weights: qf.weights.0, qf.weights.1" in text


def test_sac_with_the_whole_squared_error(beside):
    text, _ = beside("sac_continuous.py", SAC, 2, "qf_loss = 0.5 * (", "qf_loss = (")
    assert "First difference: critic loss, in iteration 2, step 1:" in text


def test_rounding_is_not_taken_for_a_change(beside):
    """The script does not differ from SB3 earlier than two runs of SB3 differ from each other."""
    early, late = ({"actions": (0.1, (time, "1", "2", ""))} for time in (3, 7))
    say = lambda ours, rounding: beside.tool.verdict(
        [{}, ours], rounding, beside.tool.PPO, 10, 1e-4
    )
    rounded = "until rounding errors grow: actions differ in iteration 2, step 8"
    assert rounded in say(late, [{}, early])
    assert "until rounding errors grow" in say(early, [late, {}])
    assert "First difference: actions, in iteration 2, step 4: ours 1, SB3's 2." in say(
        early, [{}, late]
    )
    assert "First difference" in say(early, [{}, {}])


# The command


def test_the_page_has_both_sources_and_the_command_writes_nothing_else(tmp_path):
    line = f"ppo_continuous_multiagent.py {PPO} --iterations 1 --html page.html"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, TOOL, *line.split()]
    out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert out.returncode == 0 and "All quantities agree" in out.stdout, out.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    page = plain((tmp_path / "page.html").read_text())
    for text in (
        "def gae(rewards",
        "def compute_returns_and_advantage",
        "policy_loss_2 = advantages",
        "differs (2)",
    ):
        assert text in page
    assert "All quantities agree" in page and "SB3's value loss is vf_coef * mse" in page


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("nowhere.py", "there is no such script"),
        ("unity_vec_env.py", "has no Args: give a PPO or SAC script"),
        (
            "ppo_continuous_multiagent.py --env-id Crawler",
            "Crawler is a Unity scene, which SB3 can't run",
        ),
        (
            "ppo_continuous_multiagent.py --env-id Pendulum-v1 --num-minibatches 31",
            "SB3 needs minibatches of equal size",
        ),
        (
            "ppo_continuous_multiagent.py --env-id Pendulum-v1 --total-timesteps 9",
            "give --iterations instead",
        ),
        (
            "sac_continuous.py --env-id Pendulum-v1 --num-envs 2",
            "SB3's SAC can be compared with --num-envs 1",
        ),
        (
            "crossq_continuous.py --env-id Pendulum-v1",
            "has no target networks, and SB3's SAC has them",
        ),
    ],
)
def test_bad_input_is_one_line(beside, line, match):
    script, _, options = line.partition(" ")
    with pytest.raises(ValueError, match=re.escape(match)) as error:
        beside(script, options)
    assert "\n" not in str(error.value)
