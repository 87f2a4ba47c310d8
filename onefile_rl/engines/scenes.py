"""Ids of the bundled scenes, and the engine that an id belongs to."""

# Bundled scenes that speak ML-Agents' protocol. They run on MuJoCo and do not need Unity.
SCENES = (
    "3DBall",
    "Basic",
    "Crawler",
    "FoodCollector",
    "GridWorld",
    "Hallway",
    "Mixed",
    "MixedDiscrete",
    "MixedHybrid",
    "PushBlock",
    "Sorter",
    "WallClimb",
)
# The environment parameters of bundled scenes. Those that are not here have none.
PARAMETERS = {
    "3DBall": ("gravity", "mass", "scale"),
    "Crawler": (
        "randomize_mass",
        "randomize_strength",
        "randomize_friction",
        "randomize_damping",
        "randomize_delay",
    ),
    "FoodCollector": ("agent_scale",),
    "GridWorld": ("gridSize",),
    "Hallway": ("gravity",),
    "PushBlock": ("block_drag", "block_scale", "dynamic_friction", "gravity"),
    "Sorter": ("gravity", "num_tiles"),
    "WallClimb": ("big_wall",),
}
# Bundled scenes that need Godot 4.
GODOT_SCENES = ("GodotDiscs", "GodotRover")


def engine(args):
    """Return "Unity" or "Godot" if the scripts' arguments ask for one of these engines, else None."""
    if args.godot_path or (args.env_id in GODOT_SCENES and not args.unity_path):
        return "Godot"
    return "Unity" if args.unity_path or args.env_id in SCENES else None


def derive_seed(seed, offset):
    """Return `seed` + `offset`, wrapped into the seeds that all envs accept, 0 to 2^31 - 1.

    Unity's seed is a signed integer of 32 bits, and numpy's seeds are not negative.
    """
    return int(seed + offset) % 2**31


class EngineError(RuntimeError):
    """A game or a worker process that runs envs failed. Base class of the errors of players and workers."""
