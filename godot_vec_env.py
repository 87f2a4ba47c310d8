"""Godot games with the plugin Godot RL Agents as one gymnasium vector env, with one slot per agent.

    python godot_vec_env.py --path GodotDiscs    random actions, and the decisions per second

    envs = GodotVecEnv("GodotDiscs")  # or an exported game, or a folder with project.godot
    obs, infos = envs.reset()
    for _ in range(200):
        obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
    envs.close()

The contract is that of UnityVecEnv, see unity_vec_env.py. All agents of a Godot game request
decisions at the same time, so `infos["ready"]` is always True, and `infos["closed"]` is True after
every step, except in the slots of a game that was restarted (`infos["restarted"]`).

The plugin's protocol has only `done` for the end of an episode, with the first observation of the
next episode. An agent's get_info() can return more:

    "terminal_observation": obs      the final observation; else `final_obs` is the one before it
    "TimeLimit.truncated": true      a time limit; without it, every end is a termination
    "is_success": true               `infos["is_success"]`, by slot, when an episode ends
    "action_mask": [1, 0, 1]         `infos["action_mask"]`: allowed options of all branches
    "stats": {"name": 0.5}           `infos["stats"]`: the means over the agents

Observations are concatenated into one Box. With images, the observation space is a Dict of "vector"
and the images by name, as uint8 (height, width, channels). Actions are a Box if they are
continuous, a MultiDiscrete if they are discrete, and a Dict of "continuous" and "discrete" if they
are both.

`as_sb3(envs)` is a VecEnv of Stable-Baselines3, and `as_pettingzoo(envs)` a ParallelEnv of
PettingZoo.
"""

import os
import sys

from onefile_rl.engines.godot import Game, GodotError, find_game
from onefile_rl.engines.vec_env import EngineVecEnv, demo
from onefile_rl.engines.views import as_pettingzoo, as_sb3

__all__ = ["GodotVecEnv", "as_pettingzoo", "as_sb3"]

TICKS = 60  # physics ticks per second of game time, as the plugin sets it


class GodotVecEnv(EngineVecEnv):
    """A vector env with one slot per agent of the Godot game at `path`.

    Args:
        path: the id of a bundled scene, an exported game, the folder of a project, or "editor" to
            wait for its Play button
        policy: the policy_name to train, needed if there are several; agents of the others act at
        random
        num_players: how many processes of the game to launch
        seed: game i gets the seed `seed + i` at its start
        base_port: game i connects to the port `base_port + i`; by default to a free port
        action_repeat: physics ticks per decision; by default that of the Sync node
        speedup: speed of the game's clock; without `real_time`, a game always runs as fast as
        possible
        real_time: whether to show the games in a window, at the speed of the clock
        player_args: additional command line arguments of the games
        headless: whether to run the games without a window; cameras need one
        timeout: seconds to wait for a game
        max_restarts: how often in a row a game that crashed or hangs is restarted
    """

    engine = "godot"  # the prefix of the statistics in TensorBoard
    Error = GodotError

    def __init__(
        self, path, *, policy=None, num_players=1, seed=0, base_port=None, action_repeat=None, speedup=1,
        real_time=False, player_args=(), headless=True, timeout=60, max_restarts=0,
    ):  # fmt: skip
        super().__init__(path, num_players, seed, timeout, max_restarts)
        if path != "editor":
            find_game(path)
        headless = headless and not real_time
        if not headless and path != "editor" and sys.platform == "linux":
            if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                raise GodotError(
                    f"{path}: a window or a camera needs a display: start this under xvfb-run"
                )
        self.behavior = policy
        self.base_port = base_port
        self.player_args = ["--headless"] if headless else ["--audio-driver", "Dummy"]
        if not real_time:  # a frame is one tick, and the next frame follows at once
            self.player_args += ["--fixed-fps", str(round(TICKS * speedup)), "--disable-vsync"]
        if not real_time or speedup != 1:  # otherwise the Sync node decides
            self.player_args.append(f"--speedup={speedup}")
        if action_repeat:
            self.player_args.append(f"--action_repeat={action_repeat}")
        self.player_args += player_args
        self._open_players(num_players)
        self.inputs = self.layout.inputs  # the names of the sensors
        # For each action in the order of get_action_space(), its kind and size
        self.action_order = [
            ["discrete" if is_discrete else "continuous", size]
            for size, is_discrete in self.layout.actions.values()
        ]

    def _launch(self, worker):
        return Game(
            self.path, worker, self.base_port, self.timeout, self.player_args, seed=self._seed(worker),
            announced=self.announced,
        )  # fmt: skip


def main(
    path: str = "GodotDiscs", policy: str | None = None, num_players: int = 1, action_repeat: int | None = None,
    real_time: bool = False, headless: bool = True, steps: int = 500, seed: int = 0, player_args: tuple[str, ...] = (),
):  # fmt: skip
    """Step a game with random actions and print the number of decisions per second.

    Args:
        path: the id of a bundled scene, an exported game, a folder with project.godot, or "editor"
        policy: the policy_name that acts, needed if the game has several
        num_players: how many processes of the game to launch
        action_repeat: physics ticks per decision; default: that of the Sync node
        real_time: show the games in a window, at the speed of the clock
        headless: run the games without a window; cameras need one
        steps: number of steps
        seed: seed of the games and of the random actions
        player_args: additional command line arguments of the games
    """
    try:
        make_envs = lambda: GodotVecEnv(
            path, policy=policy, num_players=num_players, action_repeat=action_repeat, real_time=real_time,
            headless=headless, seed=seed, player_args=player_args,
        )  # fmt: skip
        demo(make_envs, steps, seed)
    except (GodotError, ValueError) as error:
        # Messages name the options of the training scripts
        raise SystemExit(str(error).replace("--behavior", "--policy")) from None


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
