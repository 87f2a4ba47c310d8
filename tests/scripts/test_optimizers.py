"""Any optimizer of torch works in a changed copy: compiled or not, saved, resumed to the byte, and under torchrun."""

import numpy as np
import parity_env  # noqa: F401
import pytest
import torch
from conftest import needs_compiler
from copies import (
    assert_equal_states,
    copy_of,
    state_of,
    torchrun,
    train,
    train_in_process,
    train_in_two_parts,
    weights,
)

from onefile_rl import fast

pytestmark = pytest.mark.usefixtures("empty_folder")
NAME = "ppo_continuous_multiagent.py"
MADE = "        optimizer = fast.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)  # or torch.optim\n"
LOGGED = "            # Log\n"
STEPPED = "    optimizer.step()\n"


def instead(lines):
    return (MADE, "".join(f"        {line}\n" for line in lines))


OPTIMIZERS = {
    "AdamW": [
        instead(
            [
                "optimizer = torch.optim.AdamW(agent.parameters(), lr=args.learning_rate, weight_decay=0.1)"
            ]
        )
    ],
    "RMSprop": [
        instead(["optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate)"])
    ],
    "SGD": [
        instead(
            ["optimizer = torch.optim.SGD(agent.parameters(), lr=args.learning_rate, momentum=0.9)"]
        )
    ],
    "groups": [
        instead(
            [
                "critic = {'params': agent.critic.parameters(), 'lr': 1e-2}",
                "actor = {'params': [agent.actor_logstd, *agent.actor_mean.parameters()]}",
                "optimizer = fast.Adam([actor, critic], lr=args.learning_rate, eps=1e-5)",
            ]
        )
    ],
    "scheduler": [
        instead(
            [
                "optimizer = fast.Adam(agent.parameters(), lr=1e-2)",
                "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)",
            ]
        ),
        ("            if args.anneal_lr:\n", "            if False:\n"),
        (LOGGED, "            scheduler.step()\n" + LOGGED),
    ],
    "two": [
        instead(
            [
                "actor_parameters = [agent.actor_logstd, *agent.actor_mean.parameters()]",
                "optimizer = fast.Adam(actor_parameters, lr=args.learning_rate)",
                "critic_optimizer = torch.optim.AdamW(agent.critic.parameters(), lr=1e-2)",
            ]
        ),
        (
            "def update(agent, optimizer, batch,",
            "def update(agent, optimizer, critic_optimizer, batch,",
        ),
        (
            "    optimizer.zero_grad()\n",
            "    optimizer.zero_grad()\n    critic_optimizer.zero_grad()\n",
        ),
        (STEPPED, STEPPED + "    critic_optimizer.step()\n"),
        (
            "agent, optimizer, batch, mb_inds, float(",
            "agent, optimizer, critic_optimizer, batch, mb_inds, float(",
        ),
    ],
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_is_saved_and_resumed_to_the_byte(kind, monkeypatch):
    script = copy_of(NAME, *OPTIMIZERS[kind])
    whole = state_of(script, train(script))
    parts = state_of(script, train_in_two_parts(script, monkeypatch))
    assert_equal_states(whole, parts)
    optimizers = {"two": {"optimizer", "critic_optimizer"}, "scheduler": {"optimizer", "scheduler"}}
    assert optimizers.get(kind, {"optimizer"}) <= whole["kept"].keys()
    assert len(whole["kept"]["optimizer"]["state"]) > 0


def test_annealing_scales_the_rate_of_each_parameter_group(monkeypatch):
    """Three iterations, the last of them at a third of the rates. A resumed run anneals the same rates."""
    script = copy_of(NAME, *OPTIMIZERS["groups"])
    for folder in (train(script), train_in_two_parts(script, monkeypatch)):
        groups = state_of(script, folder)["kept"]["optimizer"]["param_groups"]
        rates = [float(group["lr"]) for group in groups]
        assert rates == pytest.approx([script.Args.learning_rate / 3, 1e-2 / 3])


@needs_compiler
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_trains_the_same_compiled_or_not(kind, capsys):
    script = copy_of(NAME, *OPTIMIZERS[kind])
    eager = weights(script, train(script))
    capsys.readouterr()
    if kind == "two":
        # In a process of its own: torch confuses the variables of an update that is compiled in
        # parts with those of updates that were compiled as a whole before, in the same process
        folder, out = train_in_process(script, "--compile")
    else:
        folder = train(script, compile=True)
        out = capsys.readouterr().out
    compiled = weights(script, folder)
    foreign = {"AdamW": "AdamW", "RMSprop": "RMSprop", "SGD": "SGD", "two": "AdamW"}.get(kind)
    assert ("The update is compiled but for the steps of" in out) == (foreign is not None)
    assert "not compiled" not in out and (foreign is None or f"steps of {foreign}:" in out)
    for key, value in eager.items():
        np.testing.assert_allclose(compiled[key], value, atol=1e-5, err_msg=key)
    plain = copy_of(NAME)
    assert not torch.equal(
        eager["critic.0.weight"], weights(plain, train(plain))["critic.0.weight"]
    ), "it matters"


@pytest.mark.parametrize("kind", ["AdamW", "groups", "two"])
def test_ranks_of_torchrun_keep_the_same_weights_with_any_optimizer(kind):
    copy_of(NAME, *OPTIMIZERS[kind])
    line = "--env-id parity_env:Parity-v0 --num-steps 32 --num-minibatches 2 --update-epochs 2 --total-timesteps 192"
    out, code = torchrun(*line.split())
    assert code == 0 and "Saved runs/" in out, out


def test_ranks_that_drift_apart_are_refused():
    """A second optimizer whose gradients are not averaged."""
    forgotten = ("    distributed.average_gradients(agent.parameters(), grad_weight)\n", "")
    copy_of(NAME, *OPTIMIZERS["two"], forgotten)
    line = "--env-id parity_env:Parity-v0 --num-steps 32 --num-minibatches 2 --update-epochs 2 --total-timesteps 192"
    out, code = torchrun(*line.split())
    assert code != 0
    assert (
        "the ranks have different weights: call distributed.average_gradients(parameters) between backward()"
        in out
    )


# fast.Adam


@pytest.mark.parametrize("groups", [False, True])
def test_fast_adam_has_the_numbers_of_torchs_adam(groups):
    torch.manual_seed(0)
    networks = [torch.nn.Linear(4, 3) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    optimizers = []
    for network, Adam in zip(networks, (torch.optim.Adam, fast.Adam), strict=True):
        params = (
            [{"params": [network.weight]}, {"params": [network.bias], "lr": 1e-3}]
            if groups
            else network.parameters()
        )
        optimizers.append(Adam(params, lr=1e-2, eps=1e-5))
    x = torch.randn(8, 4)
    for step in range(30):
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.zero_grad()
            (network(x) ** 2).mean().backward()
            optimizer.step()
    for name, value in networks[0].state_dict().items():
        np.testing.assert_allclose(networks[1].state_dict()[name], value, atol=1e-6)


def test_fast_adam_loads_the_state_of_torchs_adam():
    network = torch.nn.Linear(4, 3)
    stock, ours = torch.optim.Adam(network.parameters(), lr=0.1), fast.Adam(network.parameters())
    (network(torch.ones(1, 4)) ** 2).sum().backward()
    stock.step()
    tensors = ours.state[network.weight]["exp_avg"]
    ours.load_state_dict(stock.state_dict())
    assert torch.equal(tensors, stock.state[network.weight]["exp_avg"]), (
        "in place: a compiled update reads it"
    )
    assert ours.state[network.weight]["step"] == 1 and ours.groups[0][1] == 0.1


def test_fast_adam_skips_parameters_without_gradients():
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = fast.Adam([a, b], lr=0.1)
    a.sum().backward()
    optimizer.step()
    assert (a < 1).all() and (b == 1).all()
