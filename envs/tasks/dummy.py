"""A dot that must be moved onto a target, observed as an image. PPO solves it in a minute, and the env takes hardly any
of that time.

    DummyPixels-v0                  two velocities from -1 to 1
    DummyPixelsDiscrete-v0          stay, left, right, up, down
    DummyPixelsMultiDiscrete-v0     two branches: left, stay, right; up, stay, down
    DummyPixelsDict-v0              two velocities; the image shows the target only, and a vector the dot's position

The reward is the decrease of the distance to the target, in image widths, and 1 on the target, which ends the episode.
Episodes are truncated after 50 steps.
"""

import gymnasium as gym
import numpy as np

MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
SPEED = 5  # pixels per step
DOT = 3  # half of a side, in pixels
TARGET = 5  # half of a side, in pixels
GROUND = np.array((30, 30, 40), np.uint8)


def square(half, color):
    """Return a square that can be copied into an image, which is faster than filling a part of it with a colour."""
    return np.full((2 * half + 1, 2 * half + 1, 3), color, np.uint8)


ERASED_DOT = square(DOT, GROUND)
DRAWN_DOT = square(DOT, (240, 240, 240))
DRAWN_TARGET = square(TARGET, (40, 180, 90))


class DummyPixels(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, actions="continuous", vector=False, size=64, render_mode=None):
        self.actions = actions
        self.vector = vector
        self.size = size
        self.render_mode = render_mode
        self.action_space = {
            "continuous": gym.spaces.Box(-1, 1, (2,), np.float32),
            "discrete": gym.spaces.Discrete(5),
            "multidiscrete": gym.spaces.MultiDiscrete([3, 3]),
        }[actions]
        self.observation_space = image = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        if vector:
            position = gym.spaces.Box(-1, 1, (2,), np.float32)
            self.observation_space = gym.spaces.Dict({"image": image, "position": position})
        self.canvas = np.empty((size, size, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target_x, self.target_y = self.np_random.integers(
            TARGET, self.size - TARGET, 2
        ).tolist()
        self.x, self.y = self.np_random.uniform(DOT, self.size - DOT - 1, 2).tolist()
        while self._on_target():
            self.x, self.y = self.np_random.uniform(DOT, self.size - DOT - 1, 2).tolist()
        self.canvas[:] = GROUND
        return self._observe(), {}

    def step(self, action):
        if self.actions == "continuous":
            dx, dy = action.tolist()
        elif self.actions == "discrete":
            dx, dy = MOVES[action]
        else:
            dx = action[0] - 1
            dy = action[1] - 1
        before = self._distance()
        end = self.size - DOT - 1
        self._draw(self.x, self.y, DOT, ERASED_DOT)
        self.x = min(max(self.x + SPEED * dx, DOT), end)
        self.y = min(max(self.y + SPEED * dy, DOT), end)
        on_target = self._on_target()
        reward = (before - self._distance()) / self.size + on_target
        return self._observe(), reward, on_target, False, {"is_success": on_target}

    def render(self):
        return self._image(dot=True)

    def _distance(self):
        return ((self.x - self.target_x) ** 2 + (self.y - self.target_y) ** 2) ** 0.5

    def _on_target(self):
        return abs(self.x - self.target_x) <= TARGET and abs(self.y - self.target_y) <= TARGET

    def _draw(self, x, y, half, square):
        """Copy a square with the given half side into the canvas, centred at (x, y)."""
        x = round(x) - half
        y = round(y) - half
        self.canvas[y : y + 2 * half + 1, x : x + 2 * half + 1] = square

    def _image(self, dot):
        self._draw(self.target_x, self.target_y, TARGET, DRAWN_TARGET)
        if dot:
            self._draw(self.x, self.y, DOT, DRAWN_DOT)
        return self.canvas.copy()

    def _observe(self):
        if not self.vector:
            return self._image(dot=True)
        position = np.array([self.x, self.y], np.float32) / (self.size / 2) - 1
        return {"image": self._image(dot=False), "position": position}
