"""Godot games with the Godot RL Agents plugin as one gymnasium VectorEnv: one slot per agent, over any number of games.

    python godot_vec_env.py --path GodotDiscs                random actions in a bundled scene, and how fast that is
    envs = GodotVecEnv("./game.x86_64", num_players=2)       an exported game, a folder with project.godot, or "editor"
    obs, infos = envs.reset()
    obs, rewards, terminated, truncated, infos = envs.step(actions)

The contract is UnityVecEnv's. In a Godot game all agents decide at the same time: `infos["ready"]` is always True for
everybody, and `infos["closed"]` after every step, but for the agents of a game that was started anew
(`infos["restarted"]`). Ended agents start again by themselves (SAME_STEP): `infos["final_obs"]` is the last
observation, `infos["final_info"]["episode"]` the return "r" and the length in decisions "l". `step_async` and
`step_wait` are the two halves of `step`: games simulate in between.

The protocol has one `done`, and the observation beside it is the next episode's. An agent's get_info() can say more:

    "terminal_observation": obs      the last observation; without it `final_obs` is the one before it
    "TimeLimit.truncated": true      this end is a time limit; without it every end is a termination
    "is_success": true               infos["is_success"], by slot, when an episode ends
    "action_mask": [1, 0, 1]         infos["action_mask"]: which discrete choices are allowed now, all actions in a row
    "stats": {"name": 0.5}           infos["stats"]: means over the agents

Observations are concatenated into one Box; with images the space is a Dict of "vector" and uint8 images (height, width,
channel). Discrete actions make a MultiDiscrete, both kinds a Dict of "continuous" and "discrete".
"""

import math
import os
import sys

import numpy as np

import players
from godot_player import Game, GodotError, find_game
from processes import LARGEST_MESSAGE, one_line

TICKS = 60  # physics ticks in a second of game time, as the plugin sets it
MOST = 100_000  # agents of a game, numbers of an observation, actions of an agent
NONSENSE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)  # what reading it can raise
LISTS = {"reset": ("obs", "info"), "step": ("obs", "info", "reward", "done")}  # an entry for each agent


class GodotVecEnv(players.PlayersEnv):
    engine, player, seeded, Error = "godot", "game", "a game", GodotError

    def __init__(
        self, path, *, policy=None, num_players=1, seed=0, base_port=None, action_repeat=None, speedup=1,
        real_time=False, player_args=(), headless=True, timeout=60, max_restarts=0,
    ):  # fmt: skip
        """
        path: a bundled scene's id, an exported game, a project's folder, or "editor"
        policy: which policy_name to train, where there are several; agents of the others act at random
        seed: game i gets seed + i, at its start
        base_port: game i connects to base_port + i; if None, to a free port
        action_repeat: physics ticks per decision; if None, the Sync node's
        speedup: of the game's clock; without real_time every game runs as fast as it can whatever this says
        real_time: in a window, and no faster than the clock
        player_args: more command line arguments for the games
        headless: without a window; cameras need one
        timeout: seconds to wait for a game
        max_restarts: how often in a row a game that crashes or hangs is started anew
        """
        super().__init__(path, num_players, seed, timeout, max_restarts)
        if path != "editor":
            find_game(path)
        headless = headless and not real_time
        if not headless and path != "editor" and sys.platform == "linux":
            if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                raise GodotError(f"{path}: a window or a camera needs a display: start this under xvfb-run")
        args = ["--headless"] if headless else ["--audio-driver", "Dummy"]
        if not real_time:  # a frame is a tick, and the next one follows at once
            args += ["--fixed-fps", str(round(TICKS * speedup)), "--disable-vsync"]
        if not real_time or speedup != 1:  # else the Sync node's
            args.append(f"--speedup={speedup}")
        if action_repeat:
            args.append(f"--action_repeat={action_repeat}")
        self.behavior, self._spaces, self._stats = policy, None, {}
        self._settings = path, base_port, [*args, *player_args]
        self._open_players(num_players)

    def _launch(self, worker):
        path, base_port, args = self._settings
        return Game(path, worker, base_port, self.timeout, [*args, f"--env_seed={self._seed(worker)}"])

    def _greet(self, game):
        game.connect()

    # The exchange

    def _begin(self, game):
        self._restart_episodes(game)
        self._hear(game)

    def _restart_episodes(self, game):
        game.awaited = "reset"
        game.send({"type": "reset"})

    def _send(self, game, continuous, discrete):
        """A dict for each agent of the game; nobody trains those of other policies, and they act at random."""
        columns = [(discrete if chosen else continuous)[game.rows, at].tolist() for chosen, at in self._columns]
        if len(columns) == 1:  # as most have it
            actions = [{self._does[0]: value} for value in columns[0]]
        else:
            actions = [dict(zip(self._does, row, strict=True)) for row in zip(*columns, strict=True)]
        if game.others:
            actions = dict(zip(game.mine, actions, strict=True))
            for agent, spaces in game.others:
                actions[agent] = {
                    name: int(game.rng.integers(size)) if chosen else game.rng.uniform(-1, 1, size).tolist()
                    for name, (size, chosen) in spaces.items()
                }
            actions = [actions[agent] for agent in range(game.size)]
        game.awaited = "step"
        game.send({"type": "action", "action": actions})

    def _hear(self, game):
        """What came of the actions, first; then what is seen now."""
        message = game.receive(game.awaited)
        message["info"] = message.get("info") or [{}] * game.size
        for name in LISTS[game.awaited]:
            given = message.get(name)
            if not isinstance(given, list) or len(given) != game.size:
                what = f"{len(given)} entries" if isinstance(given, list) else "no list"
                raise GodotError(f"{game.name}: its {name!r} has {what}, and there are {game.size} agents")
        told = own(game, message["info"])
        told = [info if isinstance(info, dict) else {} for info in told] if any(told) else None
        seen = self._observe(game, game.mine, own(game, message["obs"]))
        if game.awaited == "step":
            self._rewards[game.rows] = self._numbers(game, game.mine, "reward", own(game, message["reward"]))
            self._closed[game.rows] = True  # everybody's decision was open
            if any(message["done"]):
                self._ends(game, own(game, message["done"]), told or [{}] * game.count)
        for slot, agent, info in zip(range(self.num_envs)[game.rows], game.mine, told, strict=True) if told else ():
            self._note(game, slot, agent, info)
        self._see(game.rows, seen)
        return True

    def _ends(self, game, done, told):
        for slot, agent, ended, info in zip(range(self.num_envs)[game.rows], game.mine, done, told, strict=True):
            if ended:
                final = {key: value[slot].copy() for key, value in self._obs.items()}
                if info.get("terminal_observation") is not None:
                    seen = self._observe(game, [agent], [info["terminal_observation"]])
                    final = {key: value[0] for key, value in seen.items()}
                self._end(slot, bool(info.get("TimeLimit.truncated")), final)
                if "is_success" in info:
                    self._success[slot] = bool(info["is_success"])

    def _note(self, game, slot, agent, info):
        """What else an agent's get_info() says."""
        if self._branches and info.get("action_mask") is not None:
            mask = info["action_mask"]
            if not isinstance(mask, list) or len(mask) != self._mask.shape[1]:
                what = f"its action_mask must have {self._mask.shape[1]} entries, one for each choice"
                raise GodotError(f"{game.name}, agent {agent}: {what}")
            self._mask[slot] = [bool(x) for x in mask]
        if isinstance(info.get("stats"), dict):
            for name, value in info["stats"].items():
                (value,) = self._numbers(game, [agent], f"stats {name}", [value])
                self._stats.setdefault(one_line(name), []).append(value)

    def _numbers(self, game, agents, what, values):
        """Godot writes what is not a number as null."""
        try:
            numbers = np.array(values, np.float64)
            if numbers.shape != (len(values),):
                raise ValueError
        except NONSENSE:
            raise GodotError(f"{game.name}: its {what} is not a list of numbers") from None
        if not np.isfinite(numbers).all():
            row = np.flatnonzero(~np.isfinite(numbers))[0]
            raise GodotError(f"{game.name}, agent {agents[row]}: its {what} is {numbers[row]}")
        return numbers

    def _statistics(self):
        """Means over the agents."""
        stats, self._stats = self._stats, {}
        return {name: float(np.mean(values)) for name, values in stats.items()}

    # What the agents see and do

    def _meet(self, game):
        """Who is in a game, and what they see and do: all games must be alike."""
        info = game.receive("env_info")
        try:
            size = int(info["n_agents"])
            if not 0 < size <= MOST:
                raise ValueError(f"{size} agents")
            names = [str(name) for name in info.get("agent_policy_names") or ["shared_policy"] * size]
            sees, does = (
                value if isinstance(value, list) else [value] * size  # before 0.7 one for all
                for value in (info["observation_space"], info["action_space"])
            )
            if not len(names) == len(sees) == len(does) == size:
                raise ValueError(f"{size} agents, {len(names)} names")
            sees, does = [*map(read_seen, sees)], [*map(read_actions, does)]
        except NONSENSE as error:
            raise GodotError(f"{game.name}: who its agents are, and their spaces, makes no sense ({error})") from None
        wanted = sorted(set(names) if self.behavior is None else {self.behavior} & set(names))
        if len(wanted) != 1:
            has = "several policies, choose one by --behavior" if wanted else f"no policy {self.behavior}"
            raise GodotError(f"{game.name} has {has}: {', '.join(sorted(set(names)))}")
        (self.behavior,) = wanted
        game.size, game.rng = size, np.random.default_rng(self.seed + game.worker)  # for the others
        game.mine = [agent for agent, name in enumerate(names) if name == self.behavior]
        game.others = [(agent, does[agent]) for agent, name in enumerate(names) if name != self.behavior]
        self._spaces = self._spaces or (sees[game.mine[0]], does[game.mine[0]])
        for agent in game.mine:
            if (sees[agent], does[agent]) != self._spaces:
                why = "agents of one policy, and all games, must be alike"
                raise GodotError(f"{game.name}, agent {agent} has other observations or actions than the first: {why}")
        game.count = len(game.mine)
        if game.rows and game.rows.stop - game.rows.start != game.count:
            raise GodotError(f"{game.name} has {game.count} agents, and had {game.rows.stop - game.rows.start}")
        if game.others and game.worker == 0 and not self.restarts:
            others = ", ".join(sorted(set(names) - {self.behavior}))
            print(one_line(f"Training {self.behavior}; agents of {others} act at random"), flush=True)

    def _make_spaces(self):
        sees, does = self._spaces
        self._vectors = {name: math.prod(shape) for name, (shape, image) in sees.items() if not image}
        self._images = {name: shape for name, (shape, image) in sees.items() if image}
        self.sensors = [name if name in self._images else self._vectors[name] for name in sees]  # as UnityVecEnv has it
        self.inputs = list(sees)  # their names
        continuous, branches, self._does, self._columns = 0, [], list(does), []
        for size, chosen in does.values():  # where in the arrays of actions each of them is
            self._columns.append((chosen, len(branches) if chosen else slice(continuous, continuous + size)))
            if chosen:
                branches.append(size)
            else:
                continuous += size
        self._set_spaces(sum(self._vectors.values()), self._images, continuous, branches)

    def _observe(self, game, agents, seen):
        """What get_obs() of these agents has sent, one row each."""
        out, vectors = {}, []
        try:
            for name, size in self._vectors.items():
                vectors.append(np.array([each[name] for each in seen], np.float32).reshape(len(seen), size))
            for name, shape in self._images.items():
                pixels = b"".join(bytes.fromhex(each[name]) for each in seen)
                out[name] = np.frombuffer(pixels, np.uint8).reshape(len(seen), *shape)
        except NONSENSE:
            size = shape if name in self._images else f"{size} numbers"
            empty = "; without a display a camera sees nothing" if name in self._images else ""
            what = f"{name!r} of get_obs() is not the {size} that get_obs_space() says{empty}"
            raise GodotError(f"{game.name}, agent {', '.join(map(str, agents[:4]))}: {what}") from None
        if vectors:
            rows = out["vector"] = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
            if not np.isfinite(rows).all():
                row, column = np.argwhere(~np.isfinite(rows))[0]
                where = f"{game.name}, agent {agents[row]}"
                raise GodotError(f"{where}: observation {column} is {rows[row, column]}")
        return out


def own(game, values):
    """Of a list with an entry for each agent: those that are trained."""
    return [values[agent] for agent in game.mine] if game.others else values


def read_seen(spaces):
    """Name to shape, and whether it is an image. The plugin's cameras call themselves (channel, height, width), and
    send rows of pixels."""
    out = {}
    for name, space in spaces.items():
        shape = [space["size"]] if isinstance(space["size"], (int, float)) else space["size"]
        shape, image = tuple(map(int, shape)), "2d" in name
        if space.get("space", "box") != "box":
            raise ValueError(f"{name!r} is {space['space']!r}: send it as numbers, one-hot")
        if (name == "vector" and image) or not 0 < math.prod(shape) <= (LARGEST_MESSAGE if image else MOST):
            raise ValueError(f"{name!r} has the size {list(shape)}")
        if image:
            channels = shape[0] if len(shape) == 3 else 5
            shape = (*shape[1:], channels) if channels <= 4 else shape
            if len(shape) != 3:
                raise ValueError(f"{name!r}, an image, has the size {list(shape)}")
        out[name] = shape, image
    if not out:
        raise ValueError("agents observe nothing: give get_obs_space() something")
    return out


def read_actions(spaces):
    """Name to size, and whether it is discrete."""
    out = {name: (int(space["size"]), space["action_type"] == "discrete") for name, space in spaces.items()}
    if not out or min(size for size, _ in out.values()) < 1 or sum(size for size, _ in out.values()) > MOST:
        raise ValueError(f"actions of the sizes {[size for size, _ in out.values()]}")
    return out


def demo(
    path: str = "GodotDiscs", policy: str | None = None, num_players: int = 1, action_repeat: int | None = None,
    real_time: bool = False, headless: bool = True, steps: int = 500, seed: int = 0, player_args: tuple[str, ...] = (),
):  # fmt: skip
    """Step a game with random actions, and say how fast that is.

    Args:
        path: a bundled scene's id, an exported game, a folder with project.godot, or "editor"
        policy: which of the game's policies acts, if it has several
        num_players: how many games to launch
        action_repeat: physics ticks per decision; default: the Sync node's
        real_time: in a window, and no faster than the clock
        headless: without a window; cameras need one
        steps: how often to step
        seed: of the games and of the actions
        player_args: more for the games' command line
    """
    settings = dict(policy=policy, num_players=num_players, action_repeat=action_repeat, real_time=real_time)
    try:
        make = lambda: GodotVecEnv(path, headless=headless, seed=seed, player_args=player_args, **settings)
        players.demo(make, steps, seed)
    except (GodotError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import tyro

    tyro.cli(demo)
