"""Unity ML-Agents builds as one gymnasium vector env, with one slot per agent.

    python unity_vec_env.py --path 3DBall        random actions, and the decisions per second

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

Spaces: vector sensors are concatenated into one Box. With image sensors, the observation space is a
Dict of "vector" and the images by name, as uint8 (height, width, channels). Actions are a Box if
they are continuous, a MultiDiscrete if they are discrete, and a Dict of "continuous" and "discrete"
if they are both. With discrete actions, `infos["action_mask"]` is True where an action is allowed,
with one column per option of every branch.

Statistics: `infos["stats"]` has the values that the game gave to Unity's StatsRecorder, by name.
`envs.sums` has the names of those that the game adds up.

Waiting: `step_async` sends the actions and `step_wait` waits for the answers; together they are
`step`. The players simulate in between.

Crashes: a player that crashes or hangs is restarted up to `max_restarts` times in a row.
`infos["restarted"]` is then True for its slots: their agents are new, and their pending decisions
never get a reward.
"""

from onefile_rl.engines.unity import Player, UnityPlayerError
from onefile_rl.engines.vec_env import EngineVecEnv, demo


class UnityVecEnv(EngineVecEnv):
    """A vector env with one slot per agent of the Unity build at `path`.

    Args:
        path: the id of a bundled scene, the path of a Unity build, or "editor" to wait for the
        editor's Play button behavior: the behavior to train, needed if there are several; agents of
        the others act at random
        num_players: how many processes of the build to launch
        max_agents: the number of slots per player; by default the number of agents at the first
        decision
        seed: player i gets the seed `seed + i`; Unity takes its seed only at the start
        base_port: player i connects to the port `base_port + i`; by default to a free port
        time_scale: game time per wall-clock time; the bundled scenes always run as fast as possible
        parameters: Unity's environment parameters, a dict from name to float
        player_args: additional command line arguments of the players
        no_graphics: whether to run the players without a window and without graphics
        timeout: seconds to wait for a player
        max_restarts: how often in a row a player that crashed or hangs is restarted
    """

    Error = UnityPlayerError

    def __init__(
        self, path, *, behavior=None, num_players=1, max_agents=None, seed=0, base_port=None,
        time_scale=20.0, parameters=None, player_args=(), no_graphics=True, timeout=60, max_restarts=0,
    ):  # fmt: skip
        super().__init__(path, num_players, seed, timeout, max_restarts)
        if max_agents is not None and max_agents < 1:
            raise ValueError(f"--max-agents {max_agents}: at least one slot is needed")
        self.behavior = behavior
        self.max_agents = max_agents
        self.base_port = base_port
        self.time_scale = time_scale
        self.parameters = parameters
        self.player_args = [*player_args]
        if no_graphics:
            self.player_args = ["-nographics", "-batchmode", *self.player_args]
        self._open_players(num_players)

    def _launch(self, worker):
        return Player(
            self.path, worker, self.base_port, self.timeout, self.player_args, seed=self._seed(worker),
            time_scale=self.time_scale, parameters=self.parameters, announced=self.announced,
        )  # fmt: skip


def main(
    path: str = "Crawler", behavior: str | None = None, num_players: int = 1, max_agents: int | None = None,
    time_scale: float = 20.0, steps: int = 500, seed: int = 0, player_args: tuple[str, ...] = (),
    compare: str | None = None,
):  # fmt: skip
    """Step a bundled scene or a Unity build with random actions and print the number of decisions per
    second.

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
    """
    try:
        trained = None
        if compare is not None:
            from onefile_rl.engines.compare import Trained
            from onefile_rl.engines.printing import accept_any_encoding

            accept_any_encoding()
            trained = Trained(compare)
        make_envs = lambda: UnityVecEnv(
            path, behavior=behavior, num_players=num_players, max_agents=max_agents, time_scale=time_scale, seed=seed,
            player_args=player_args,
        )  # fmt: skip
        demo(make_envs, steps, seed, trained)
    except (UnityPlayerError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
