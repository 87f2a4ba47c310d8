"""A dot to be driven onto a target, seen as an image: a task that is solved in a minute, and so cheap that what remains of the time is the algorithm's.

    DummyPixels-v0                  two velocities from -1 to 1
    DummyPixelsDiscrete-v0          stay, left, right, up, down
    DummyPixelsMultiDiscrete-v0     two branches: left, stay, right; up, stay, down
    DummyPixelsDict-v0              two velocities; the image shows the target alone, a vector says where the dot is

The reward is the way that has come closer, in images, and 1 on the target, where the episode ends; after 50 steps it is cut.
"""

import gymnasium as gym
import numpy as np

SPEED, DOT, TARGET = 5, 3, 5  # pixels a step; half the sides of the squares
GROUND, GREEN, WHITE = (np.array(color, np.uint8) for color in ((30, 30, 40), (40, 180, 90), (240, 240, 240)))
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))


class DummyPixels(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, actions="continuous", vector=False, size=64, render_mode=None):
        self.actions, self.vector, self.size, self.render_mode = actions, vector, size, render_mode
        self.action_space = {
            "continuous": gym.spaces.Box(-1, 1, (2,), np.float32), "discrete": gym.spaces.Discrete(5), "multidiscrete": gym.spaces.MultiDiscrete([3, 3]),
        }[actions]  # fmt: skip
        self.observation_space = image = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        if vector:
            self.observation_space = gym.spaces.Dict({"image": image, "position": gym.spaces.Box(-1, 1, (2,), np.float32)})
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
        self._square(self.x, self.y, DOT, GROUND)
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

    def _square(self, x, y, half, color):
        x, y = round(x), round(y)
        self.canvas[y - half : y + half + 1, x - half : x + half + 1] = color

    def _image(self, dot):
        self._square(self.target_x, self.target_y, TARGET, GREEN)
        if dot:
            self._square(self.x, self.y, DOT, WHITE)
        return self.canvas.copy()

    def _see(self):
        if not self.vector:
            return self._image(dot=True)
        position = np.array([self.x, self.y], np.float32) / (self.size / 2) - 1
        return {"image": self._image(dot=False), "position": position}
