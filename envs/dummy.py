"""A dot to be driven onto a target, seen as an image: a task that is solved in a minute, and so cheap that what remains
of the time is the algorithm's.

    DummyPixels-v0                  two velocities from -1 to 1
    DummyPixelsDiscrete-v0          stay, left, right, up, down
    DummyPixelsMultiDiscrete-v0     two branches: left, stay, right; up, stay, down
    DummyPixelsDict-v0              two velocities; the image shows the target alone, a vector says where the dot is

The reward is the way that has come closer, in images, and 1 on the target, where the episode ends; after 50 steps it is
cut.
"""

import gymnasium as gym
import numpy as np

MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
SPEED, DOT, TARGET = 5, 3, 5  # pixels a step; half the sides of the squares
GROUND = np.array((30, 30, 40), np.uint8)


def square(half, color):
    """Ready to be put into an image: filling a part of one with a colour takes longer."""
    return np.full((2 * half + 1, 2 * half + 1, 3), color, np.uint8)


NOTHING, DRAWN_DOT, DRAWN_TARGET = square(DOT, GROUND), square(DOT, (240, 240, 240)), square(TARGET, (40, 180, 90))


class DummyPixels(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, actions="continuous", vector=False, size=64, render_mode=None):
        self.actions, self.vector, self.size, self.render_mode = actions, vector, size, render_mode
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
        self.target_x, self.target_y = self.np_random.integers(TARGET, self.size - TARGET, 2).tolist()
        self.x, self.y = self.np_random.uniform(DOT, self.size - DOT - 1, 2).tolist()
        while self._on_target():
            self.x, self.y = self.np_random.uniform(DOT, self.size - DOT - 1, 2).tolist()
        self.canvas[:] = GROUND
        return self._see(), {}

    def step(self, action):
        if self.actions == "continuous":
            dx, dy = action.tolist()
        elif self.actions == "discrete":
            dx, dy = MOVES[action]
        else:
            dx, dy = action[0] - 1, action[1] - 1
        before, end = self._distance(), self.size - DOT - 1
        self._draw(self.x, self.y, DOT, NOTHING)
        self.x, self.y = min(max(self.x + SPEED * dx, DOT), end), min(max(self.y + SPEED * dy, DOT), end)
        there = self._on_target()
        reward = (before - self._distance()) / self.size + there
        return self._see(), reward, there, False, {"is_success": there}

    def render(self):
        return self._image(dot=True)

    def _distance(self):
        return ((self.x - self.target_x) ** 2 + (self.y - self.target_y) ** 2) ** 0.5

    def _on_target(self):
        return abs(self.x - self.target_x) <= TARGET and abs(self.y - self.target_y) <= TARGET

    def _draw(self, x, y, half, square):
        x, y = round(x) - half, round(y) - half
        self.canvas[y : y + 2 * half + 1, x : x + 2 * half + 1] = square

    def _image(self, dot):
        self._draw(self.target_x, self.target_y, TARGET, DRAWN_TARGET)
        if dot:
            self._draw(self.x, self.y, DOT, DRAWN_DOT)
        return self.canvas.copy()

    def _see(self):
        if not self.vector:
            return self._image(dot=True)
        position = np.array([self.x, self.y], np.float32) / (self.size / 2) - 1
        return {"image": self._image(dot=False), "position": position}
