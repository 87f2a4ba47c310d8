"""Run the mlagents-envs client against the bundled player, scene by scene, and compare what it
receives with UnityVecEnv.

    python benchmarks/stock_client.py                            installs the client, two minutes
    python benchmarks/stock_client.py --python stock/bin/python  a client that is installed there
    python benchmarks/stock_client.py --scenes GridWorld Sorter

The default client is mlagents-envs 0.28.0 in a temporary virtual environment of this Python. 1.1.0
needs Python 3.10: install it in an environment of its own with
`pip install --ignore-requires-python mlagents-envs==1.1.0`, and give that Python with --python.

The client sets environment parameters, among them samplers, and the engine's configuration by side
channels, and reads the player's statistics. Both clients act with the same actions. All transitions
of all agents, images and ends included, must be equal. The exit code is 1 if a scene fails.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
from unity_wire import install_stock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onefile_rl.engines.scenes import SCENES, EngineError  # noqa: E402
from unity_vec_env import UnityVecEnv  # noqa: E402

SEED = 5
# Parameters that the scenes read. The client sends the samplers with the seeds of UnityVecEnv.
PARAMETERS = {
    "3DBall": {"mass": "uniform(0.5, 10)", "scale": "multirangeuniform(0.75, 1, 2, 3)"},
    "FoodCollector": {"laser_length": 0.5},
    "GridWorld": {"gridSize": 4.0},
    "Sorter": {"num_tiles": 4.0},
}
CLIENT = '''
import hashlib, json, sys
import numpy as np
import mlagents_envs
from mlagents_envs.base_env import ActionTuple
from mlagents_envs.environment import UnityEnvironment
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

player, given = sys.argv[1], json.loads(sys.argv[2])
channels_first = not mlagents_envs.__version__.startswith("0.")
engine, parameters, stats = (
    EngineConfigurationChannel(), EnvironmentParametersChannel(), StatsSideChannel()
)
engine.set_configuration_parameters(time_scale=20.0)
for name, kind, numbers, seed in given["parameters"]:
    if kind == "number":
        parameters.set_float_parameter(name, *numbers)
    elif kind == "uniform":
        parameters.set_uniform_sampler_parameters(name, *numbers, seed)
    elif kind == "gaussian":
        parameters.set_gaussian_sampler_parameters(name, *numbers, seed)
    else:
        parameters.set_multirangeuniform_sampler_parameters(name, numbers, seed)
env = UnityEnvironment(
    player, seed=given["seed"], no_graphics=True, worker_id=given["worker"],
    side_channels=[engine, parameters, stats], additional_args=given["args"], timeout_wait=60,
)


def plain(part):
    """An image as uint8 (height, width, channels)."""
    if part.ndim < 3:
        return part
    image = np.rint(part * 255).astype(np.uint8)
    return np.ascontiguousarray(image.transpose(1, 2, 0)) if channels_first else image


pending, count, digests, names, ends = {}, {}, {}, set(), 0
try:
    env.reset()
    (behavior,) = env.behavior_specs
    spec = env.behavior_specs[behavior].action_spec
    for _ in range(given["steps"]):
        decisions, terminals = env.get_steps(behavior)
        chosen = []
        for batch, done in ((terminals, True), (decisions, False)):
            for row, agent in enumerate(batch.agent_id.tolist()):
                obs = b"".join(plain(part[row]).tobytes() for part in batch.obs)
                if agent in pending:
                    cut = bool(done and batch.interrupted[row])
                    line = f"{float(batch.reward[row])} {done and not cut} {cut}".encode()
                    digest = hashlib.sha256(pending.pop(agent) + line + obs).hexdigest()
                    digests.setdefault(agent, []).append(digest)
                    ends += done
                if not done:
                    count[agent] = count.get(agent, -1) + 1
                    rng = np.random.default_rng((agent, count[agent]))
                    floats = rng.uniform(-1, 1, spec.continuous_size).astype(np.float32)
                    options = rng.integers(0, np.array(spec.discrete_branches, int))
                    chosen.append((floats, options.astype(np.int32)))
                    pending[agent] = obs
        if chosen:
            env.set_actions(behavior, ActionTuple(*map(np.stack, zip(*chosen))))
        env.step()
        names.update(stats.get_and_reset_stats())
finally:
    env.close()
version = mlagents_envs.__version__
print(json.dumps(dict(version=version, digests=digests, ends=ends, stats=sorted(names))))
'''


def player_args(scene):
    """Return options of the player with which episodes end soon."""
    return [] if scene.startswith("Mixed") else ["--max-step", "40"]


def serialized(parameters):
    """Return the parameters for the stock client: name, kind, numbers and seed."""
    from onefile_rl.engines.samplers import parse, sampler_seed

    rows = []
    samplers = 0
    for name, value in parameters.items():
        value = parse(value)
        if isinstance(value, float):
            rows.append((name, "number", [value], None))
            continue
        numbers = value.numbers if value.kind in ("uniform", "gaussian") else value.ranges
        rows.append((name, value.kind, list(numbers), sampler_seed(SEED, name, samplers)))
        samplers += 1
    return rows


def by_stock_client(python, scene, steps, worker):
    """Return what the stock client prints: its version, digests by agent, ends and statistics."""
    given = dict(
        parameters=serialized(PARAMETERS.get(scene, {})),
        seed=SEED,
        worker=worker,
        args=["--scene", scene, *player_args(scene)],
        steps=steps,
    )
    # The player needs this Python
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    player = ROOT / "envs" / "unity_scenes" / "player.py"
    command = [python, "-c", CLIENT, player, json.dumps(given)]
    environment = os.environ | {"PATH": path}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])


def by_vec_env(scene, steps):
    """Return the digests of the transitions of UnityVecEnv, by agent."""
    more = dict(max_agents=64) if scene.startswith("Mixed") else {}
    pending, count, digests = {}, {}, {}
    with closing(
        UnityVecEnv(
            scene,
            seed=SEED,
            parameters=PARAMETERS.get(scene, {}),
            player_args=player_args(scene),
            flatten_entities=True,
            **more,
        )
    ) as envs:
        (player,) = envs.players
        owners = dict(player.slots.owner)  # an agent's last transition is that of its old slot
        continuous = np.zeros((envs.num_envs, envs.layout.continuous), np.float32)
        discrete = np.zeros((envs.num_envs, len(envs.layout.branches)), int)
        obs, infos = envs.reset()
        for _ in range(steps):
            for slot in np.flatnonzero(infos["ready"]).tolist():
                agent = owners[slot] = player.slots.owner[slot]
                count[agent] = count.get(agent, -1) + 1
                rng = np.random.default_rng((agent, count[agent]))
                continuous[slot] = rng.uniform(-1, 1, envs.layout.continuous)
                discrete[slot] = rng.integers(0, np.array(envs.layout.branches, int))
                pending[slot] = bytes_of(obs, slot)
            actions = {"continuous": continuous, "discrete": discrete}
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for slot in np.flatnonzero(infos["closed"]).tolist():
                ended = terminated[slot] or truncated[slot]
                after = bytes_of(infos["final_obs"] if ended else obs, slot)
                line = f"{float(rewards[slot])} {bool(terminated[slot])} {bool(truncated[slot])}"
                digest = hashlib.sha256(pending.pop(slot) + line.encode() + after).hexdigest()
                digests.setdefault(owners[slot], []).append(digest)
    return digests


def bytes_of(obs, slot):
    """Return the bytes of one slot. In the bundled scenes images come without vectors."""
    if isinstance(obs, dict):
        return b"".join(array[slot].tobytes() for array in obs.values())
    row = obs[slot]
    return b"".join(x.tobytes() for x in row.values()) if isinstance(row, dict) else row.tobytes()


def compare(python, scene, steps, worker):
    """Return a line about a scene, and whether both clients have received the same."""
    try:
        stock = by_stock_client(python, scene, steps, worker)
        ours = by_vec_env(scene, steps)
    except (RuntimeError, EngineError, subprocess.TimeoutExpired) as error:
        return f"{scene:15} FAILED: {error}", False
    equal = 0
    compared = 0
    for agent, digests in stock["digests"].items():
        # UnityVecEnv has more transitions: its step includes messages that contain ends only
        expected = ours.get(int(agent), [])
        equal += sum(a == b for a, b in zip(digests, expected, strict=False))
        compared += len(digests)
    what = f"{len(stock['digests'])} agents, {stock['ends']} ends"
    if stock["stats"]:
        what += f", statistics {', '.join(stock['stats'])}"
    if PARAMETERS.get(scene):
        what += f", parameters {', '.join(PARAMETERS[scene])}"
    fits = equal == compared > 0
    verdict = f"{equal} of {compared} transitions are {'equal' if fits else 'equal: FAILED'}"
    return f"{scene:15} mlagents-envs {stock['version']}: {verdict}; {what}", fits


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES, metavar="SCENE")
    parser.add_argument("--steps", type=int, default=200, help="steps of each client and scene")
    parser.add_argument(
        "--python", nargs="+", metavar="PATH", help="Pythons that have mlagents-envs installed"
    )
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        pythons = args.python or [install_stock(Path(folder))]
        for python in pythons:
            for number, scene in enumerate(args.scenes):
                # The stock client listens on port 5005 plus this number
                worker = os.getpid() % 5000 + number
                line, fits = compare(python, scene, args.steps, worker)
                failed += not fits
                print(line, flush=True)
    total = len(pythons) * len(args.scenes)
    print(f"{total - failed} of {total} scenes agree with UnityVecEnv")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
