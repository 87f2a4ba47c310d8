"""UnityVecEnv and GodotVecEnv in the interfaces of other libraries.

    from onefile_rl.engines.views import as_pettingzoo, as_sb3

    model = PPO("MlpPolicy", as_sb3(UnityVecEnv("3DBall")))     Stable-Baselines3
    env = as_pettingzoo(UnityVecEnv("3DBall"))                  PettingZoo

A view adds no transitions and hides none. Where an interface can't express what the agents do, it is refused with the
reason. The libraries are imported only when their view is made.
"""


def as_sb3(envs):
    """Return the agents of a UnityVecEnv or GodotVecEnv as the envs of a VecEnv of Stable-Baselines3.

    All agents must request a decision in every step. See sb3_view.SB3View.
    """
    from onefile_rl.engines.sb3_view import SB3View

    return SB3View(envs)


def as_pettingzoo(envs, parallel=None):
    """Return the agents of a UnityVecEnv or GodotVecEnv as a ParallelEnv or an AECEnv of PettingZoo.

    parallel: True for a ParallelEnv, in which all agents act in every step, and False for an AECEnv, in which an agent
    acts when it requests a decision. By default one step with actions of 0 finds out which of them fits; the episodes
    start again with the first reset.
    """
    from onefile_rl.engines.pettingzoo_view import AECView, ParallelView

    if parallel is None:
        parallel = decide_together(envs)
    return ParallelView(envs) if parallel else AECView(envs)


def decide_together(envs):
    """Return whether all agents request a decision at the start and after one step."""
    from onefile_rl.engines.pettingzoo_view import default_actions

    _, infos = envs.reset()
    if not infos["ready"].all():
        return False
    *_, infos = envs.step(default_actions(envs, infos))
    return bool(infos["ready"].all())
