"""One gymnasium env with image observations: rendering, action repeat, and observations as a dict of images."""

import gymnasium as gym
import mujoco
import numpy as np

from envs.make import find, is_image
from envs.rendering import NEEDS_GL, choose_gl, disable_expensive_rendering, use_tracking_camera

# gymnasium's own camera shows the arm and the target of Reacher with a few pixels only
CAMERAS = {"Reacher": {"distance": 0.5, "elevation": -90, "azimuth": 90, "lookat": np.zeros(3)}}
# Geometry of round bodies and floors: with fewer triangles than MuJoCo's defaults, rendering takes a third of the time
COARSE_QUALITY = {"numslices": 12, "numstacks": 6, "numquads": 2}


def is_rendered_by_mujoco(env_id):
    return str(find(env_id).entry_point).startswith(("gymnasium.envs.mujoco", "envs.tasks.reacher"))


def make_pixel_env(
    env_id,
    from_pixels=False,
    image_size=64,
    grayscale=False,
    action_repeat=1,
    env_kwargs=None,
    painter=None,
):
    """Return one gymnasium env whose observations are a dict of images and a vector.

    from_pixels: render a MuJoCo env, and observe the image in place of its own observation
    painter: another env of the same id in this process; its OpenGL context renders this env too
    """
    spec = find(env_id)
    kwargs = dict(env_kwargs or {})
    if from_pixels:
        if not is_rendered_by_mujoco(env_id):
            raise ValueError(
                f"--from-pixels renders gymnasium's MuJoCo envs and the reachers, and {env_id} is none of them"
            )
        choose_gl()
        kwargs |= {"render_mode": "rgb_array", "width": image_size, "height": image_size}
        if spec.name in CAMERAS:
            kwargs.setdefault("default_camera_config", CAMERAS[spec.name])
    try:
        env = gym.make(spec, disable_env_checker=True, **kwargs)
        if action_repeat > 1:
            env = Repeat(env, action_repeat)
        if from_pixels:
            env = use_tracking_camera(env, kwargs)
            env = FromPixels(env, painter and painter.get_wrapper_attr("viewer"))
            return Named(env, grayscale)
    except (AttributeError, ImportError, OSError, RuntimeError, gym.error.Error) as error:
        reason = (
            f"--from-pixels {NEEDS_GL} ({error})" if from_pixels else f"--env-id {env_id}: {error}"
        )
        raise ValueError(reason) from None
    except Exception as error:
        given = f" with {env_kwargs}" if env_kwargs else ""
        raise ValueError(
            f"--env-id {env_id}{given} can't be made: {' '.join(str(error).split())}"
        ) from None
    return Named(env, grayscale)


class Repeat(gym.Wrapper):
    """Repeats every action several times and adds up the rewards."""

    def __init__(self, env, times):
        super().__init__(env)
        self.times = times

    def step(self, action):
        total = 0.0
        for _ in range(self.times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class FromPixels(gym.ObservationWrapper):
    """Replaces the observation of a MuJoCo env by its rendered image.

    Envs with the same model share one viewer: switching between OpenGL contexts would take a tenth of the time.
    """

    def __init__(self, env, viewer=None):
        super().__init__(env)
        self.base = env.unwrapped
        disable_expensive_rendering(self.base.model)
        self.viewer = viewer or self._make_viewer()
        viewport = self.viewer.viewport
        self.observation_space = gym.spaces.Box(
            0, 255, (viewport.height, viewport.width, 3), np.uint8
        )

    def _make_viewer(self):
        self.env.reset(
            seed=0
        )  # gymnasium's camera keeps looking at the model's centre at the first image
        quality = self.base.model.vis.quality
        defaults = {}
        for name, coarse in COARSE_QUALITY.items():
            defaults[name] = getattr(quality, name)
            setattr(quality, name, min(coarse, defaults[name]))
        self.env.render()  # fails here if there is no OpenGL
        for (
            name,
            value,
        ) in defaults.items():  # videos, which are larger, are rendered with the defaults
            setattr(quality, name, value)
        return getattr(self.base, "mujoco_renderer", self.base).viewer

    def observation(self, _):
        """Render as gymnasium's viewer does, but without reading the depth buffer."""
        view = self.viewer
        model = self.base.model
        data = self.base.data
        image = np.empty(self.observation_space.shape, np.uint8)
        view.make_context_current()  # a video of this env is rendered in another context
        mujoco.mjv_updateScene(
            model, data, view.vopt, view.pert, view.cam, mujoco.mjtCatBit.mjCAT_ALL, view.scn
        )
        mujoco.mjr_render(view.viewport, view.scn, view.con)
        mujoco.mjr_readPixels(image, None, view.viewport, view.con)
        return image[::-1]


class Named(gym.ObservationWrapper):
    """Turns any nested observation into a dict: each image by its name, everything else in one "vector"."""

    def __init__(self, env, grayscale=False):
        super().__init__(env)
        self.grayscale = grayscale
        self.leaves = [
            (name, path, space, is_image(space))
            for name, path, space in leaves(env.observation_space)
        ]
        spaces = {}
        vector_size = 0
        for name, _, space, image in self.leaves:
            if image:
                height, width, channels = channels_last(np.empty(space.shape)).shape
                spaces[name] = gym.spaces.Box(
                    0, 255, (height, width, 1 if grayscale else channels), np.uint8
                )
            else:
                vector_size += gym.spaces.flatdim(space)
        if vector_size:
            spaces["vector"] = gym.spaces.Box(-np.inf, np.inf, (vector_size,), np.float32)
        self.observation_space = gym.spaces.Dict(spaces)

    def observation(self, obs):
        out = {}
        vector = []
        for name, path, space, image in self.leaves:
            value = obs
            for key in path:
                value = value[key]
            if image:
                picture = channels_last(value)
                out[name] = to_grayscale(picture) if self.grayscale else picture
            else:
                vector.append(gym.spaces.flatten(space, value))
        if vector:
            out["vector"] = np.concatenate(vector, dtype=np.float32)
        return out


def leaves(space, path=()):
    """Yield the name, the path and the space of each part of a nested observation space."""
    if isinstance(space, gym.spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, gym.spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        yield ".".join(map(str, path)) or "image", path, space
        return
    for key, part in parts:
        yield from leaves(part, (*path, key))


def channels_last(image):
    """Return an image as (height, width, channel). If its first dimension is the smallest, that is the channel."""
    if image.ndim == 2:
        return image[:, :, None]
    return image.transpose(1, 2, 0) if image.shape[0] < min(image.shape[1:]) else image


def to_grayscale(image):
    """Return the luma of an RGB image by ITU-R BT.601, with integer weights."""
    if image.shape[2] == 1:
        return image
    return (image[:, :, :3] @ np.array([77, 150, 29], np.uint32) >> 8).astype(np.uint8)[:, :, None]
