"""Changes that once went wrong in silence. In a changed copy each of them is right, compiled or not and after a resume,
or it is refused with one line that says where."""

import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import call, curve, needs_compiler
from copies import (
    ENV,
    PPO,
    assert_equal_states,
    copy_of,
    saved,
    state_of,
    torchrun,
    train,
    train_in_two_parts,
    weights,
)

from onefile_rl import fast

pytestmark = pytest.mark.usefixtures("empty_folder")
NAME = "ppo_continuous_multiagent.py"
SPEC = {"obs_dim": 3, "action_dim": 2, "sensors": [3], "low": -9.0, "high": 9.0}
FIRST = "REACHER = dict("  # a line of the module, to put globals before it
ANNEALING = "            # Annealing: SB3 differs (4)\n"
ACTING = "                obs = next_obs[ready]\n"
COLLECT = "            # Collect a rollout. One thread"
STEP = "    optimizer.step()\n"
LOSS = "    entropy_loss = entropy.mean()\n"
KEEP = 'keep={"optimizer": optimizer, "return_rms": return_rms},'
LOG = "            run.log(scalars)\n"


# State of the script that the compiled update reads

ACCUMULATED = [
    (FIRST, f"ACC = []\n{FIRST}"),
    (
        STEP,
        "    ACC.append([p.grad.clone() for p in agent.parameters()])\n"
        "    if len(ACC) == 2:\n"
        "        for p, one, two in zip(agent.parameters(), *ACC, strict=True):\n"
        "            p.grad = (one + two) / 2\n"
        "        optimizer.step()\n"
        "        ACC.clear()\n",
    ),
]
WARM_UP = [
    (FIRST, f"HIST = []\n{FIRST}"),
    (LOSS, LOSS + "    HIST.append(1)\n    if len(HIST) < 5:\n        pg_loss = 0.1 * pg_loss\n"),
]


@needs_compiler
@pytest.mark.parametrize("changes", [ACCUMULATED, WARM_UP])
def test_a_list_of_the_script_in_a_compiled_update_is_noticed(changes, monkeypatch, capsys):
    script = copy_of(NAME, *changes)
    eager = weights(script, train(script, compile=False))
    with pytest.raises(
        ValueError, match=r"compiled into the update and different now: .*\(my_script.py:\d+\)"
    ):
        script = copy_of(NAME, *changes)
        train(script, compile=True)
    # A long run compiles by itself: it goes on without, and learns what it should
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1)
    script = copy_of(NAME, *changes)
    fallen_back = weights(script, train(script))
    assert "The update is not compiled any more: " in capsys.readouterr().out
    for key, value in eager.items():
        np.testing.assert_allclose(fallen_back[key], value, atol=1e-5, err_msg=key)


@needs_compiler
def test_an_update_that_cannot_be_compiled_says_where(capsys, monkeypatch):
    script = copy_of(NAME, (LOSS, LOSS + "    open('/dev/null').close()\n"))
    with pytest.raises(
        ValueError, match=r"--compile: torch can't compile this update: .*\(my_script.py:\d+: open"
    ):
        train(script, compile=True)
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1)
    train(script)
    assert "The update is not compiled: " in capsys.readouterr().out


@needs_compiler
def test_shapes_that_do_not_fit_say_where():
    script = copy_of(NAME, (LOSS, LOSS + "    pg_loss = pg_loss + (mb.obs @ mb.actions).mean()\n"))
    with pytest.raises(
        ValueError, match=r"my_script.py:\d+: pg_loss = pg_loss \+ \(mb.obs @ mb.actions\)"
    ):
        train(script, compile=True)


# Values that act() reads


def act_with(noise, before):
    """Return changes: act() reads agent.noise, and the loop sets it before each step."""
    return [
        (
            "        self.bounds = runs.Bounds(spec)\n",
            f"        self.bounds = runs.Bounds(spec)\n        {noise}\n",
        ),
        ("torch.randn_like(action_mean)", "self.noise * torch.randn_like(action_mean)"),
        (ACTING, before + ACTING),
    ]


NOISES = {
    "a float": ("self.noise = 1.0", "                agent.noise = 0.5 * agent.noise\n"),
    "a buffer that is assigned": (
        "self.register_buffer('noise', torch.ones(1))",
        "                agent.noise = 0.5 * agent.noise\n",
    ),
    "a buffer that changes in place": (
        "self.register_buffer('noise', torch.ones(1))",
        "                agent.noise.mul_(0.5)\n",
    ),
    "a global": ("pass", "                global NOISE\n                NOISE = 0.5 * NOISE\n"),
}


@pytest.mark.parametrize("kind", NOISES)
def test_a_value_that_the_loop_changes_before_each_act_takes_effect(kind):
    changes = act_with(*NOISES[kind])
    if kind == "a global":
        changes[1] = (changes[1][0], "NOISE * torch.randn_like(action_mean)")
        changes.append((FIRST, f"NOISE = 1.0\n{FIRST}"))
    script = copy_of(NAME, *changes)
    settings = dict(
        num_steps=16, num_minibatches=1, total_timesteps=16, norm_obs=False, norm_reward=False
    )
    quick = state_of(script, train(script, **settings))
    if kind == "a global":
        script.NOISE = 1.0
    plain = state_of(script, train(script, **settings, fast=False))
    for key, value in plain["kept"]["agent"].items():
        np.testing.assert_allclose(quick["kept"]["agent"][key], value, atol=1e-5, err_msg=key)


def test_a_value_that_changes_at_every_step_for_long_lets_torch_act(capsys, monkeypatch):
    monkeypatch.setattr(fast.Acting, "told", set())
    script = copy_of(NAME, *act_with(*NOISES["a float"]))
    agent = script.Agent(SPEC, script.Args(**PPO))
    act = fast.Acting(agent)
    for i in range(40):
        agent.noise = 1 / (i + 1)
        act(np.ones((2, 3), np.float32))
    assert (
        not act.enabled
        and "does not support values that change every few steps" in capsys.readouterr().out
    )


def test_an_act_that_assigns_is_left_to_torch(capsys, monkeypatch):
    """A process of noise inside act(): its state moves on at every call, and no tracer's object stays behind."""
    monkeypatch.setattr(fast.Acting, "told", set())
    changes = [
        (
            "        self.bounds = runs.Bounds(spec)\n",
            "        self.bounds = runs.Bounds(spec)\n        self.x = 0.0\n",
        ),
        (
            "        return action, action.clamp(",
            "        self.x = 0.9 * self.x + 1.0\n        return action, (action + self.x).clamp(",
        ),
    ]
    agent = copy_of(NAME, *changes).Agent(SPEC, copy_of(NAME).Args(**PPO))
    act = fast.Acting(agent, deterministic=True)
    obs = np.zeros((1, 3), np.float32)
    outs = [act(obs)[1][0, 0] for _ in range(3)]
    assert not act.enabled and isinstance(agent.x, float) and "assigns x" in capsys.readouterr().out
    assert np.diff(outs).min() > 0.5, "the noise goes on"


def test_what_acts_and_what_learns_cannot_part():
    """Half the noise in act() alone."""
    old = "action, _, _, _ = self.get_action_and_value(obs, deterministic=deterministic)"
    half = f"{old}\n        action = 0.5 * action"
    with pytest.raises(
        ValueError, match=r"act\(\) and get_action_and_value\(\) return different actions"
    ):
        train(copy_of(NAME, (old, half)))


# What a checkpoint has

RND = [
    (FIRST, f"PREDICTORS = []\n{FIRST}"),
    (
        "        return_rms = Normalizer()\n",
        "        return_rms = Normalizer()\n"
        '        predictor = mlp((spec["obs_dim"], 8), "tanh", 4, 1.0)\n'
        "        predictor_optimizer = torch.optim.Adam(predictor.parameters(), lr=1e-3)\n",
    ),
    (
        "            # Log\n",
        "            novelty = (predictor(batch.obs) ** 2).mean()\n"
        "            predictor_optimizer.zero_grad()\n"
        "            novelty.backward()\n"
        "            predictor_optimizer.step()\n"
        "            # Log\n",
    ),
]


def test_modules_and_optimizers_that_are_not_named_are_kept(monkeypatch, capsys):
    """Random network distillation without a word in `keep`."""
    script = copy_of(NAME, *RND)
    whole = state_of(script, train(script))
    out = capsys.readouterr().out
    assert (
        "Also kept in checkpoints: predictor\n" in out
        and "Also kept in checkpoints: predictor_optimizer\n" in out
    )
    assert_equal_states(whole, state_of(script, train_in_two_parts(script, monkeypatch)))


CURIOSITY = """class Curiosity:
    def __init__(self, obs_dim):
        self.predictor = mlp((obs_dim, 8), "tanh", 4, 1.0)
        self.optimizer = torch.optim.Adam(self.predictor[0].parameters(), lr=1e-3)
        self.scale = 1.0


"""


def test_modules_inside_of_an_object_are_kept_and_its_numbers_are_named(monkeypatch, capsys):
    """Random network distillation as a class that is not a module. Half of it is in no optimizer."""
    make = RND[1][0] + '        curiosity = Curiosity(spec["obs_dim"])\n'
    learn = RND[2][1].replace("predictor_optimizer", "curiosity.optimizer")
    learn = learn.replace("(predictor(", "(curiosity.predictor(")
    changes = [(FIRST, CURIOSITY + FIRST), (RND[1][0], make), (RND[2][0], learn)]
    script = copy_of(NAME, *changes)
    whole = state_of(script, train(script))
    out = capsys.readouterr().out
    assert "Also kept in checkpoints: curiosity.predictor\n" in out
    assert "Also kept in checkpoints: curiosity.optimizer\n" in out
    assert "Not kept in checkpoints: curiosity.scale; put numbers" in out
    assert "curiosity.predictor: no optimizer updates 2 of its parameters" in out
    assert_equal_states(whole, state_of(script, train_in_two_parts(script, monkeypatch)))


def test_a_module_that_is_made_too_late_is_named(capsys):
    late = "            if iteration == 0:\n                late = nn.Linear(2, 2)\n"
    train(copy_of(NAME, (ANNEALING, late + ANNEALING)))
    assert (
        capsys.readouterr().out.count("late is not kept in checkpoints: make it before run.start()")
        == 1
    )


@pytest.mark.parametrize("what", ["optimizer.state_dict()", "optimizer.state"])
def test_a_copy_of_an_optimizers_state_is_refused(what):
    script = copy_of(NAME, (KEEP, f'keep={{"mine": {what}}},'))
    with pytest.raises(
        ValueError, match="keep: 'mine' is the state of an optimizer: give the optimizer itself"
    ):
        train(script)


def test_something_that_cannot_be_restored_is_refused():
    with pytest.raises(ValueError, match="keep: 'x' is a float, which can't be restored"):
        train(copy_of(NAME, (KEEP, 'keep={"x": 0.5},')))


def test_arguments_that_the_loop_changes_are_resumed(monkeypatch, capsys):
    """An adaptive coefficient: args.vf_coef *= 1.5 at every iteration."""
    script = copy_of(NAME, (ANNEALING, "            args.vf_coef *= 1.5\n" + ANNEALING))
    whole = state_of(script, train(script))
    parts = state_of(script, train_in_two_parts(script, monkeypatch))
    assert_equal_states(whole, parts)
    assert parts["args"]["vf_coef"] == 0.5 and parts["changed_args"] == {"vf_coef": 0.5 * 1.5**3}
    assert (
        "Arguments as the training loop had changed them: vf_coef 1.125" in capsys.readouterr().out
    )


def test_a_parameter_in_no_optimizer_is_refused():
    made = "optimizer = fast.Adam(agent.parameters(),"
    script = copy_of(NAME, (made, "optimizer = fast.Adam(agent.critic.parameters(),"))
    with pytest.raises(
        ValueError,
        match="parameter actor_logstd is not in any optimizer and would never be updated",
    ):
        train(script)


# Logging


def test_a_tensor_with_several_elements_is_a_histogram_and_loses_nothing():
    first = 'scalars = {"losses/histogram": batch.advantages, "losses/array": np.arange(5)} | fast.means(metrics)'
    script = copy_of(NAME, ("scalars = fast.means(metrics)", first))
    folder, plain = train(script), copy_of(NAME)
    assert curve(folder).keys() == curve(train(plain)).keys()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert {"losses/histogram", "losses/array"} <= set(events.Tags()["histograms"])


def test_what_cannot_be_logged_is_named():
    script = copy_of(NAME, (LOG, '            scalars["charts/x"] = "high"\n' + LOG))
    with pytest.raises(
        ValueError, match="run.log: charts/x is a str: give a number, a tensor or an array"
    ):
        train(script)


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_a_float_and_an_array_are_metrics_too(compile):
    new = '        "losses/entropy": entropy_loss,\n'
    more = '        "losses/float": 7.0,\n        "losses/ratios": ratio,\n'
    folder = train(copy_of(NAME, (new, more + new)), compile=compile)
    assert [value for _, value in curve(folder)["losses/float"]] == [7, 7, 7]


def test_an_enum_is_an_option(monkeypatch):
    option = '    kind: Kind = Kind.ONE\n    """which one"""\n'
    fields = "    logstd_init: float = 0.0\n"
    changes = [
        (
            "@dataclass\nclass Args",
            "class Kind(Enum):\n    ONE = 1\n    TWO = 2\n\n\n@dataclass\nclass Args",
        ),
        (fields, option + fields),
        ("import os\n\nos.environ", "import os\nfrom enum import Enum\n\nos.environ"),
    ]
    script = copy_of(NAME, *changes)
    folder = train(script, kind=script.Kind.TWO)
    seen = []
    monkeypatch.setattr(script, "train", lambda args, *_: seen.append(args.kind))
    call(script, monkeypatch, "--resume", folder, "--total-timesteps", 256)
    assert seen == [script.Kind.TWO]


# Changes that always worked, and must go on to

TRUNK = [
    (
        "        self.critic = mlp(sizes, args.activation, 1, output_std=1.0)\n",
        '        self.trunk = mlp((spec["obs_dim"], 16), args.activation, spec["obs_dim"], 1.0)\n'
        "        self.critic = mlp(sizes, args.activation, 1, output_std=1.0)\n",
    ),
    (
        "        return self.critic(self.obs_rms(obs)).flatten()\n",
        "        return self.critic(self.trunk(self.obs_rms(obs))).flatten()\n",
    ),
    ("        x = self.obs_rms(obs)\n", "        x = self.trunk(self.obs_rms(obs))\n"),
]
STATE_DEPENDENT = [
    (
        '        self.actor_logstd = nn.Parameter(torch.full((spec["action_dim"],), args.logstd_init))\n',
        '        self.actor_logstd = mlp(sizes, args.activation, spec["action_dim"], output_std=0.01)\n',
    ),
    (
        "        action_std = self.actor_logstd.exp()\n",
        "        action_logstd = self.actor_logstd(x).clamp(-5.0, 2.0)\n        action_std = action_logstd.exp()\n",
    ),
    ("(-0.5 * z**2 - self.actor_logstd - ", "(-0.5 * z**2 - action_logstd - "),
    (
        "entropy = (self.actor_logstd + 0.5 *",
        "entropy = (action_logstd + 0.5 *",
    ),
]
SQUASHED = [
    (
        "        return action, logprob, entropy.expand_as(logprob), self.critic(x).flatten()\n",
        "        logprob = logprob - torch.log(1 - torch.tanh(action) ** 2 + 1e-6).sum(1)\n"
        "        return action, logprob, entropy.expand_as(logprob), self.critic(x).flatten()\n",
    ),
    (
        "        return action, action.clamp(self.bounds.low, self.bounds.high)\n",
        "        return action, torch.tanh(action)\n",
    ),
]


@needs_compiler
@pytest.mark.parametrize(
    "changes", [TRUNK, STATE_DEPENDENT, SQUASHED], ids=["trunk", "std", "squashed"]
)
def test_another_network_or_distribution_acts_learns_and_resumes(changes, monkeypatch, capsys):
    monkeypatch.setattr(fast.Acting, "told", set())
    script = copy_of(NAME, *changes)
    whole = state_of(script, train(script))
    assert "Acting with PyTorch" not in capsys.readouterr().out, "numpy acts"
    assert_equal_states(whole, state_of(script, train_in_two_parts(script, monkeypatch)))
    for settings in (dict(fast=False), dict(compile=True)):
        other = weights(script, train(script, **settings))
        for key, value in whole["kept"]["agent"].items():
            np.testing.assert_allclose(other[key], value, atol=1e-5, err_msg=key)
    agent, _ = saved(script, next(folder for folder in [train(script)]))
    obs = torch.randn(20, 3)
    action, logprob, _, _ = agent.get_action_and_value(obs)
    np.testing.assert_allclose(
        agent.get_action_and_value(obs, action)[1].detach(), logprob.detach(), atol=1e-6
    )


def test_changed_arguments_and_found_modules_work_under_torchrun():
    copy_of(NAME, (ANNEALING, "            args.vf_coef *= 1.5\n" + ANNEALING), *RND)
    line = (
        f"--env-id {ENV} --num-steps 32 --num-minibatches 2 --update-epochs 2 --total-timesteps 192"
    )
    out, code = torchrun(*line.split())
    # The predictor's gradients are not averaged: the ranks would drift apart
    assert code != 0 and "the ranks have different weights" in out


# What a student found


CHANGED_BUFFERS = {
    "another dtype": "agent.vscale = torch.full((1,), 2.0, dtype=torch.float64)",
    "another size, in place": "agent.vscale.data = torch.full((8, 1), 2.0)",
}


@needs_compiler
@pytest.mark.parametrize("change", CHANGED_BUFFERS)
def test_a_buffer_of_another_kind_is_noticed_by_a_compiled_update(change, capsys, monkeypatch):
    made = "        self.bounds = runs.Bounds(spec)\n"
    changes = [
        (made, made + "        self.register_buffer('vscale', torch.ones(1))\n"),
        (
            "    v_loss = 0.5 * v_loss.mean()\n",
            "    v_loss = 0.5 * (v_loss * agent.vscale).mean()\n",
        ),
        (
            ANNEALING,
            f"            if iteration:\n                {CHANGED_BUFFERS[change]}\n" + ANNEALING,
        ),
    ]
    script = copy_of(NAME, *changes)
    eager = curve(train(script))["losses/value_loss"]
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1)
    compiled = curve(train(script))["losses/value_loss"]
    assert "the kind of tensor of vscale has changed" in capsys.readouterr().out
    np.testing.assert_allclose(compiled, eager, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("what", ["args", "gradients"])
def test_an_update_that_leaves_something_behind_is_right_or_refused(what, capsys, monkeypatch):
    """It assigns to args; or it lets gradients add up, and the loop makes every second step."""
    changes = {
        "args": [
            (
                "    return fast.detach(metrics)\n",
                "    args.vf_coef = args.vf_coef * 0.9\n    return fast.detach(metrics)\n",
            )
        ],
        "gradients": [
            ("    optimizer.zero_grad()\n", ""),
            (STEP, ""),
            (
                "                    metrics.append(mb_metrics)\n",
                "                    metrics.append(mb_metrics)\n"
                "                    if len(metrics) % 2 == 0:\n"
                "                        optimizer.step()\n"
                "                        optimizer.zero_grad()\n",
            ),
        ],
    }[what]
    script = copy_of(NAME, *changes)
    eager = weights(script, train(script))
    monkeypatch.setattr("onefile_rl.runs.WORTH", 1)
    fallen_back = weights(script, train(script))
    assert "not compiled" in capsys.readouterr().out
    for key, value in eager.items():
        np.testing.assert_allclose(fallen_back[key], value, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("kind", ["private", "class", "settings"])
def test_any_value_that_act_reads_is_watched(kind):
    reads = {"private": "self._noise", "class": "self.NOISE", "settings": "CFG.noise"}[kind]
    change = {"private": "agent._noise", "class": "Agent.NOISE", "settings": "CFG.noise"}[kind]
    made = "        self.bounds = runs.Bounds(spec)\n"
    changes = [
        (made, made + "        self._noise = 1.0\n"),
        ("torch.randn_like(action_mean)", f"{reads} * torch.randn_like(action_mean)"),
        (ACTING, f"                {change} *= 0.5\n" + ACTING),
        ("class Agent(nn.Module):\n", "class CFG:\n    noise = 1.0\n\n\nclass Agent(nn.Module):\n"),
        (
            "        super().__init__()\n        sizes",
            "        super().__init__()\n        Agent.NOISE = CFG.noise = 1.0\n        sizes",
        ),
    ]
    script = copy_of(NAME, *changes)
    settings = dict(num_steps=16, num_minibatches=1, total_timesteps=16, norm_obs=False)
    quick, plain = (weights(script, train(script, **settings, fast=way)) for way in (True, False))
    for key, value in plain.items():
        np.testing.assert_allclose(quick[key], value, atol=1e-5, err_msg=key)


def test_attributes_numbers_and_parameters_of_the_script_are_resumed(monkeypatch):
    """A gain of the agent and a global that the loop changes, and a learned coefficient outside of the agent."""
    made = "        self.bounds = runs.Bounds(spec)\n"
    changes = [
        (made, made + "        self.gain = 1.0\n"),
        (
            "            action = action_mean + action_std",
            "            action = self.gain * action_mean + action_std",
        ),
        (FIRST, f"COUNT = 1.0\n{FIRST}"),
        (
            ANNEALING,
            "            global COUNT\n            COUNT += 0.5\n            agent.gain *= 0.9\n"
            + ANNEALING,
        ),
        (
            "        return_rms = Normalizer()\n",
            "        return_rms = Normalizer()\n"
            "        log_coef = nn.Parameter(torch.zeros(1))\n"
            "        coef_optimizer = fast.Adam([log_coef], lr=0.1)\n",
        ),
        (
            "            # Log\n",
            "            coef_optimizer.zero_grad()\n"
            "            (log_coef * COUNT).sum().backward()\n"
            "            coef_optimizer.step()\n"
            "            # Log\n",
        ),
    ]
    script = copy_of(NAME, *changes)
    folder = train(script)
    whole = state_of(script, folder)
    script.COUNT = 1.0
    assert_equal_states(whole, state_of(script, train_in_two_parts(script, monkeypatch)))
    assert whole["agent_attributes"] == {":gain": 0.9**3} and whole["script_numbers"] == {
        "COUNT": 2.5
    }
    assert whole["kept"]["parameters of coef_optimizer"]["0"] < -0.2
    seen = []
    monkeypatch.setattr(
        "onefile_rl.evaluate.evaluate", lambda *_: seen.append(1) or np.ones((3, 2))
    )
    play = lambda agent, spec, num_envs: seen.append(agent.gain)
    monkeypatch.setattr("onefile_rl.evaluate.play_vectors", play)
    from onefile_rl.evaluate import load_agent

    path = folder / "checkpoint.pt"
    agent = load_agent(script.Args(**PPO), path, whole, script.__file__, script.Agent)
    assert (agent[0] if isinstance(agent, tuple) else agent).gain == 0.9**3, (
        "evaluation and export use it"
    )


def test_fast_adam_refuses_what_it_has_not():
    with pytest.raises(
        ValueError, match="fast.Adam has no weight_decay: use an optimizer of torch.optim"
    ):
        fast.Adam([{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.1}])


def test_fast_adam_counts_the_steps_of_each_parameter():
    parameters = [[torch.nn.Parameter(torch.ones(1)) for _ in range(2)] for _ in range(2)]
    for (a, b), Adam in zip(parameters, (torch.optim.Adam, fast.Adam), strict=True):
        optimizer = Adam([a, b], lr=0.1)
        for step in range(30):
            optimizer.zero_grad()
            (a + b if step > 20 else a).sum().backward()
            optimizer.step()
    np.testing.assert_allclose(parameters[0][1].detach(), parameters[1][1].detach(), atol=1e-6)
