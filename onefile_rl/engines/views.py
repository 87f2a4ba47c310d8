"""UnityVecEnv and GodotVecEnv in the interfaces of Stable-Baselines3 and PettingZoo.

    from unity_vec_env import UnityVecEnv, as_pettingzoo, as_sb3     or from godot_vec_env

    model = PPO("MlpPolicy", as_sb3(UnityVecEnv("3DBall")))
    env = as_pettingzoo(UnityVecEnv("3DBall"))

A view adds no transitions and hides none. Where an interface can't express what the agents do, the view raises an error
that says why. The libraries are imported when a view is made, so that the helpers do not need them.
"""


def as_sb3(envs):
    """Return the agents of a UnityVecEnv or GodotVecEnv as the envs of a VecEnv of Stable-Baselines3.

    All agents must request a decision in every step. See sb3_view.SB3View.
    """
    try:
        from onefile_rl.engines.sb3_view import SB3View
    except ModuleNotFoundError as error:
        raise missing(error, "as_sb3", "stable-baselines3") from None
    return SB3View(envs)


def as_pettingzoo(envs, parallel=None):
    """Return the agents of a UnityVecEnv or GodotVecEnv as a ParallelEnv or an AECEnv of PettingZoo.

    parallel: True for a ParallelEnv, in which all agents act in every step, and False for an AECEnv, in which an agent
    acts when it requests a decision. By default one step with actions of 0 finds out which of them fits; the episodes
    start again with the first reset. See pettingzoo_view.ParallelView and AECView.
    """
    try:
        from onefile_rl.engines.pettingzoo_view import AECView, ParallelView, decide_together
    except ModuleNotFoundError as error:
        raise missing(error, "as_pettingzoo", "pettingzoo") from None
    if parallel is None:
        parallel = decide_together(envs)
    return ParallelView(envs) if parallel else AECView(envs)


def missing(error, function, package):
    """Return the error of a missing package with the command that installs it."""
    if error.name.split(".")[0] != package.replace("-", "_"):
        return error
    return ModuleNotFoundError(f"{function} needs {package}: pip install {package}")
