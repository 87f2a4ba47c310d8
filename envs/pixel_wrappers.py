"""One gymnasium env with image observations: rendering, action repeat, and observations as a dict of images."""

import gymnasium as gym
import mujoco
import numpy as np
from PIL import Image

from envs import contract
from envs.make import (
    ResetOptions,
    cannot_make,
    channels_last_shape,
    find,
    gym_make,
    is_image,
    known_leaves,
    look_up,
    rescale_far_actions,
)
from envs.rendering import NEEDS_GL, choose_gl, disable_expensive_rendering, use_tracking_camera

# gymnasium's own camera shows the arm and the target of Reacher with a few pixels only
CAMERAS = {"Reacher": {"distance": 0.5, "elevation": -90, "azimuth": 90, "lookat": np.zeros(3)}}
# What rendering raises where there is no OpenGL
GL_ERRORS = (AttributeError, ImportError, OSError, RuntimeError, gym.error.Error)
RENDERED_SIZE = 64  # pixels, of images that --from-pixels renders
ATARI_SIZE = 84  # pixels
# Geometry of round bodies and floors: with fewer triangles than MuJoCo's defaults, rendering takes a third of the time
COARSE_QUALITY = {"numslices": 12, "numstacks": 6, "numquads": 2}


def is_rendered_by_mujoco(env_id):
    return str(find(env_id).entry_point).startswith(("gymnasium.envs.mujoco", "envs.tasks.reacher"))


def make_pixel_env(
    env_id,
    from_pixels=False,
    image_size=None,
    grayscale=False,
    action_repeat=None,
    env_kwargs=None,
    reset_options=None,
    painter=None,
):
    """Return one gymnasium env whose observations are a dict of images and a vector.

    from_pixels: render a MuJoCo env, and observe the image in place of its own observation
    image_size: of rendered images, by default 64, and of Atari's, by default 84; other images are resized if it is
        given
    action_repeat: by default 4 for Atari, otherwise 1
    reset_options: the argument `options` of every reset
    painter: another env of the same id in this process; its OpenGL context renders this env too
    """
    spec = find(env_id)
    kwargs = dict(env_kwargs or {})
    atari = is_preprocessed_atari(env_id, kwargs)
    if atari:
        kwargs["frameskip"] = 1  # AtariPreprocessing skips frames itself
    if from_pixels:
        image_size = image_size or RENDERED_SIZE
        if not is_rendered_by_mujoco(env_id):
            raise ValueError(
                f"--from-pixels renders gymnasium's MuJoCo envs and the reachers, and {env_id} is none of them"
            )
        choose_gl()
        kwargs |= {"render_mode": "rgb_array", "width": image_size, "height": image_size}
        if spec.name in CAMERAS:
            kwargs.setdefault("default_camera_config", CAMERAS[spec.name])
    try:
        env = rescale_far_actions(gym_make(spec, kwargs))
    except Exception as error:
        if from_pixels and isinstance(error, GL_ERRORS):
            raise ValueError(f"--from-pixels {NEEDS_GL} ({error})") from None
        raise cannot_make(env_id, env_kwargs, error) from None
    contract.check_reward_space(env)
    if reset_options:
        env = ResetOptions(env, reset_options)
    if atari:
        return Named(preprocess_atari(env, env_id, image_size, action_repeat))
    if action_repeat and action_repeat > 1:
        env = Repeat(env, action_repeat)
    if not from_pixels:
        return Named(env, grayscale, image_size)
    try:
        env = use_tracking_camera(env, kwargs)
        env = FromPixels(env, painter and painter.get_wrapper_attr("viewer"))
    except GL_ERRORS as error:
        raise ValueError(f"--from-pixels {NEEDS_GL} ({error})") from None
    return Named(env, grayscale)


def is_atari(env_id):
    return str(find(env_id).entry_point).startswith("ale_py.")


def is_preprocessed_atari(env_id, env_kwargs):
    """Return whether the env is an Atari game that is preprocessed here.

    With one of these arguments in --env-kwargs, the game is used as the user makes it.
    """
    return is_atari(env_id) and not {"frameskip", "obs_type"} & set(env_kwargs)


def preprocess_atari(env, env_id, image_size, action_repeat):
    """Return an Atari game in the usual form: up to 30 idle frames at the start, 4 frames per action of which the last
    two are combined, grayscale images of 84 x 84 pixels."""
    settings = {"frame_skip": action_repeat or 4, "screen_size": image_size or ATARI_SIZE}
    try:
        return gym.wrappers.AtariPreprocessing(env, **settings)
    except gym.error.DependencyNotInstalled:
        raise ValueError(
            f"{env_id} needs OpenCV to resize images: pip install opencv-python-headless"
        ) from None


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
    """Turns any nested observation into a dict: each image by its name, everything else in one "vector".

    image_size: the height and width to which images are resized; without it they keep their size
    """

    def __init__(self, env, grayscale=False, image_size=None):
        super().__init__(env)
        self.grayscale = grayscale
        self.image_size = image_size
        self.leaves = [
            (name, path, space, is_image(space)) for name, path, space in known_leaves(env)
        ]
        spaces = {}
        vector_size = 0
        for name, _, space, image in self.leaves:
            if image:
                height, width, channels = channels_last_shape(space.shape)
                size = (image_size, image_size) if image_size else (height, width)
                shape = (*size, 1 if grayscale else channels)
                spaces[name] = gym.spaces.Box(0, 255, shape, np.uint8)
            else:
                vector_size += gym.spaces.flatdim(space)
        if vector_size:
            spaces["vector"] = gym.spaces.Box(-np.inf, np.inf, (vector_size,), np.float32)
        self.observation_space = gym.spaces.Dict(spaces)

    def observation(self, obs):
        out = {}
        vector = []
        for name, path, space, image in self.leaves:
            value = look_up(obs, path)
            if image:
                picture = channels_last(np.asarray(value))
                if self.grayscale:
                    picture = to_grayscale(picture)
                out[name] = resize(picture, self.image_size) if self.image_size else picture
            else:
                vector.append(gym.spaces.flatten(space, value))
        if vector:
            out["vector"] = np.concatenate(vector, dtype=np.float32)
        return out


def channels_last(image):
    """Return an image as (height, width, channel). If its first dimension is the smallest, that is the channel."""
    if image.ndim == 2:
        return image[:, :, None]
    return image.transpose(1, 2, 0) if image.shape[0] < min(image.shape[1:]) else image


def resize(image, size):
    """Return an image (height, width, channel) as a square. Each pixel is the mean of the area that it covers."""
    if image.shape[:2] == (size, size):
        return image
    if image.shape[2] == 3:
        return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BOX))
    channels = [Image.fromarray(channel) for channel in image.transpose(2, 0, 1)]
    return np.stack([channel.resize((size, size), Image.Resampling.BOX) for channel in channels], 2)


def to_grayscale(image):
    """Return the luma of an RGB image by ITU-R BT.601, with integer weights."""
    if image.shape[2] == 1:
        return image
    return (image[:, :, :3] @ np.array([77, 150, 29], np.uint32) >> 8).astype(np.uint8)[:, :, None]
