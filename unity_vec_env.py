"""Unity ML-Agents builds as one gymnasium vector env, with one slot per agent.

    python unity_vec_env.py --path 3DBall        random actions, and the decisions per second
    python unity_vec_env.py --check policy.onnx --path 3DBall       whether a model fits its agents

    import numpy as np
    from unity_vec_env import UnityVecEnv

    envs = UnityVecEnv("3DBall")  # or a Unity build: "./Builds/MyScene"
    obs, infos = envs.reset()
    returns = []
    for _ in range(200):
        actions = envs.action_space.sample()
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for slot in np.flatnonzero(terminated | truncated):
            returns.append(infos["final_info"]["episode"]["r"][slot])
    envs.close()
    print(f"{envs.num_envs} agents, {len(returns)} episodes, mean return {np.mean(returns):.2f}")

Decisions: Unity's agents request decisions at their own pace. After `reset` and after every `step`,
`infos["ready"]` is True for the slots whose agents request a decision now, and their rows of `obs`
are new. `step` sends the actions of these slots and ignores the other rows. It returns as soon as
every player (a process of the build) has at least one agent that requests a decision.

Rewards: a decision is pending until its reward arrives, which is when the agent requests its next
decision or its episode ends. `infos["closed"]` is True for the slots whose pending decision got its
reward in this step. The other rows have a reward of 0 and belong to no transition.

Ends: agents start their next episode by themselves (autoreset mode SAME_STEP). `terminated` is True
where an episode ended, `truncated` where Unity interrupted it (Max Step). `infos["final_obs"]` has
the final observations, and `infos["final_info"]["episode"]` the return "r" and the length "l" in
decisions, by slot. A slot whose agent has not requested a decision in its new episode is not ready,
and its row of `obs` is not new.

Spaces: vector sensors are concatenated into one Box. With image sensors or BufferSensors, the
observation space is a Dict of "vector", the BufferSensors by name, as float32 (rows, size), and the
images by name, as uint8 (height, width, channels). Rows of a BufferSensor that are not used are
zeros, and Unity does not say how many are used: a row of zeros is an unused one. Actions are a Box if
they are continuous, a MultiDiscrete if they are discrete, and a Dict of "continuous" and "discrete"
if they are both. With discrete actions, `infos["action_mask"]` is True where an action is allowed,
with one column per option of every branch.

Parameters: `parameters=` sets Unity's environment parameters, and `envs.set_parameters` changes them
while the players run. A sampler draws in the player: in the bundled scenes for each agent and
episode.

Statistics: `infos["stats"]` has the values that the game gave to Unity's StatsRecorder, by name.
`envs.sums` has the names of those that the game adds up.

Waiting: `step_async` sends the actions and `step_wait` waits for the answers; together they are
`step`. The players simulate in between.

Crashes: a player that crashes or hangs is restarted up to `max_restarts` times in a row.
`infos["restarted"]` is then True for its slots: their agents are new, and their pending decisions
never get a reward.

Other libraries: `as_sb3(envs)` is a VecEnv of Stable-Baselines3, and `as_pettingzoo(envs)` a
ParallelEnv or an AECEnv of PettingZoo.
"""

from contextlib import closing
from typing import Literal

from onefile_rl.engines.onnx_policy import parse_others
from onefile_rl.engines.samplers import parse
from onefile_rl.engines.scenes import EngineError
from onefile_rl.engines.unity import IMAGE_ORDERS, Player, UnityPlayerError, lists_of_channels
from onefile_rl.engines.vec_env import EngineVecEnv, demo
from onefile_rl.engines.views import as_pettingzoo, as_sb3

# After onefile_rl.engines.unity: mlagents_envs can't be imported before it with a current protobuf.
# isort: split
from mlagents_envs.side_channel import OutgoingMessage, SideChannel

__all__ = ["OutgoingMessage", "SideChannel", "UnityVecEnv", "as_pettingzoo", "as_sb3"]


class UnityVecEnv(EngineVecEnv):
    """A vector env with one slot per agent of the Unity build at `path`.

    Args:
        path: the id of a bundled scene, the path of a Unity build, or "editor" to wait for the
        editor's Play button
        behavior: the behavior to train, needed if there are several: "Name" for all its teams,
        "Name?team=0" for one of them
        num_players: how many processes of the build to launch
        max_agents: the number of slots per player; by default the number of agents at the first
        decision
        seed: player i gets the seed `seed + i`; Unity takes its seed only at the start
        base_port: player i connects to the port `base_port + i`; by default to a free port
        time_scale: game time per wall-clock time; the bundled scenes always run as fast as possible
        parameters: Unity's environment parameters, a dict from name to a number or to a sampler,
        "uniform(0.5, 10)", "gaussian(1, 0.2)" or "multirangeuniform(0, 1, 4, 6)"
        player_args: additional command line arguments of the players
        no_graphics: whether to run the players without a window and without graphics
        flatten_entities: whether the rows of BufferSensors are part of the vector, side by side, in
        the order of the sensors
        timeout: seconds to wait for a player
        max_restarts: how often in a row a player that crashed or hangs is restarted
        others: from the name of a behavior that is not trained, with or without its team, to the
        policy that plays it: an ONNX file, or the folder of a run that was exported; by default,
        agents of other behaviors act at random
        side_channels: your own side channels, a list of mlagents_envs' SideChannel objects; with
        several players, a function that takes the number of a player and returns a new list
        image_order: how to read the floats of uncompressed images that are declared as (channels,
        height, width): "channels-first", "channels-last", or "auto" to decide by the version of
        ML-Agents' package
    """

    Error = UnityPlayerError

    def __init__(
        self, path, *, behavior=None, num_players=1, max_agents=None, seed=0, base_port=None,
        time_scale=20.0, parameters=None, player_args=(), no_graphics=True, timeout=60, max_restarts=0,
        flatten_entities=False, others=None, side_channels=(), image_order="auto",
    ):  # fmt: skip
        super().__init__(path, num_players, seed, timeout, max_restarts)
        if max_agents is not None and max_agents < 1:
            raise ValueError(f"--max-agents {max_agents}: at least one slot is needed")
        if image_order not in IMAGE_ORDERS:
            raise ValueError(
                f"--image-order {image_order}: choose one of {', '.join(IMAGE_ORDERS)}"
            )
        self.behavior = behavior
        self.others = others
        self.side_channels = lists_of_channels(side_channels, num_players)  # of each player
        self.image_order = image_order
        self.max_agents = max_agents
        self.base_port = base_port
        self.time_scale = time_scale
        self.parameters = {name: parse(value) for name, value in (parameters or {}).items()}
        self.flatten_entities = flatten_entities
        self.player_args = [*player_args]
        if no_graphics:
            self.player_args = ["-nographics", "-batchmode", *self.player_args]
        self._open_players(num_players)

    def _launch(self, worker):
        return Player(
            self.path, worker, self.base_port, self.timeout, self.player_args, seed=self._seed(worker),
            time_scale=self.time_scale, parameters=self.parameters, announced=self.announced, others=self.others,
            side_channels=self.side_channels[worker], image_order=self.image_order,
        )  # fmt: skip

    def set_parameters(self, parameters):
        """Send environment parameters to all players with the next step. A player that is started
        again gets them too. Most games read them when an episode starts."""
        changed = {name: parse(value) for name, value in parameters.items()}
        self.parameters |= changed
        for player in self.players:
            player.set_parameters(changed)


def main(
    path: str = "Crawler", behavior: str | None = None, num_players: int = 1, max_agents: int | None = None,
    time_scale: float = 20.0, steps: int = 500, seed: int = 0, player_args: tuple[str, ...] = (),
    compare: str | None = None, check: str | None = None, run: str | None = None, others: tuple[str, ...] = (),
    image_order: Literal["auto", "channels-first", "channels-last"] = "auto", save_images: str | None = None,
):  # fmt: skip
    """Step a bundled scene or a Unity build with random actions and print the number of decisions per
    second. Or check whether Unity would accept a model for its agents.

    Args:
        path: the id of a bundled scene, the path of a Unity build, or "editor"
        behavior: the behavior that acts, needed if the build has several
        num_players: how many processes of the build to launch
        max_agents: slots per player; default: the number of agents at the first decision
        time_scale: game time per wall-clock time
        steps: number of steps
        seed: seed of the players and of the random actions
        player_args: additional command line arguments of the players
        compare: folder of a run: list the inputs of its policy whose values here are far from those
            in training
        check: an .onnx file: apply the checks that Unity applies when the file is assigned to the
            agents' Behavior Parameters, against the build at --path or the run at --run
        run: folder of a run, for --check
        others: NAME=FILE.onnx or NAME=runs/NAME: policies that play behaviors that do not act here
        image_order: how to read uncompressed images that are declared with their channels first:
            channels-first, channels-last, or auto to decide by the version of ML-Agents' package;
            look at an image with --save-images, and choose another order if it is scrambled
        save_images: folder to write an image of each camera to, as it is read
    """
    try:
        if run is not None and check is None:
            raise ValueError(f"--run {run}: it is for --check; give --check policy.onnx as well")
        trained = None
        if compare is not None:
            from onefile_rl.engines.compare import Trained
            from onefile_rl.engines.printing import accept_any_encoding

            accept_any_encoding()
            trained = Trained(compare)
        make_envs = lambda: UnityVecEnv(
            path, behavior=behavior, num_players=num_players, max_agents=max_agents, time_scale=time_scale, seed=seed,
            player_args=player_args, flatten_entities=trained is not None, others=parse_others(others),
            image_order=image_order, no_graphics=not save_images,
        )  # fmt: skip
        if check is not None:
            check_file(check, run, make_envs)
            return
        demo(make_envs, steps, seed, trained, save_images)
    except (EngineError, ValueError) as error:
        raise SystemExit(str(error)) from None


def check_file(path, run, make_envs):
    """Print whether Unity would accept the model at `path` for the agents of a run or of an env.

    The exit code is 1 if it would not.
    """
    from onefile_rl.engines import unity_model

    unity_model.Model(path)  # an error before anything is launched
    if run is not None:
        behavior = unity_model.behavior_of_run(run)
    else:
        with closing(make_envs()) as envs:
            behavior = unity_model.behavior_of_layout(envs.behavior, envs.layout)
    fits, text = unity_model.verdict(path, behavior)
    print(text)
    if not fits:
        raise SystemExit(1)


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
