"""Storage for images. Each image is stored once, even if several stacks contain it."""

import numpy as np
import torch


class Frames:
    """The images of all slots as uint8, numbered in the order in which they were added.

    The images of an observation are the last `stack_size` images of its slot. This stack is stored
    as the numbers of its images, oldest first. An example with two slots and stacks of three:

        number    0    1    2    3    4    5    6    7
        slot      0    1    0    1    0    1    0    1
        image    [a0] [b0] [a1] [b1] [a2] [b2] [a3] [b3]

        stacks of slot 0:   [0, 0, 0]    a0: the first image of an episode fills the stack
                            [0, 0, 2]    a1
                            [0, 2, 4]    a2
                            [2, 4, 6]    a3

    An env may have several cameras: an observation has an image of each, and these images share one
    number. `shapes` has (height, width, channels) by the name of the camera. `capacity` is the
    expected number of images; the storage grows if there are more.

    Attributes:
        last           the current stack of each slot, (num_slots, stack_size)
        new_episode    whether the next image of a slot is the first of an episode, (num_slots,)
    """

    def __init__(self, shapes, stack_size, num_slots, capacity):
        self.store = {
            name: np.empty((capacity, *shape), np.uint8) for name, shape in shapes.items()
        }
        self.size = 0
        self.last = np.zeros((num_slots, stack_size), int)
        self.new_episode = np.ones(num_slots, bool)

    def add(self, slots, obs):
        """Store the new images of `slots` and return their stacks. `obs` has those of all slots."""
        images = obs
        if len(slots) < len(self.last):  # for all slots, indexing would only copy the images twice
            images = {name: obs[name][slots] for name in self.store}
        numbers = self.append(images, len(slots))[:, None]
        stacks = np.concatenate([self.last[slots, 1:], numbers], 1)
        stacks = np.where(self.new_episode[slots, None], numbers, stacks)
        self.last[slots] = stacks
        self.new_episode[slots] = False
        return stacks

    def add_final(self, stack, obs):
        """Store the images of a final observation, which follows the observation with the stack
        `stack`. Return its stack."""
        number = self.append({name: obs[name][None] for name in self.store}, 1)
        return np.append(stack[1:], number)

    def append(self, images, count):
        """Store `count` images of each camera, and return their numbers."""
        first = self.size
        self.size += count
        for name, stored in self.store.items():
            while self.size > len(stored):
                stored = np.concatenate([stored, np.empty_like(stored)])
            stored[first : self.size] = images[name]
            self.store[name] = stored
        return np.arange(first, self.size)

    def keep(self, stacks):
        """Drop all images but those of `stacks` and of the current stack of each slot.

        The images that stay get new numbers. Return `stacks` with the new numbers.
        """
        kept = np.unique(np.concatenate([self.last, stacks]))
        for stored in self.store.values():
            stored[: len(kept)] = stored[kept]
        self.size = len(kept)
        self.last = np.searchsorted(kept, self.last)
        return np.searchsorted(kept, stacks)

    def images(self, device="cpu"):
        """Return all images of each camera as tensors, (number, height, width, channels)."""
        return [torch.from_numpy(stored[: self.size]).to(device) for stored in self.store.values()]

    def state(self):
        """Return the images of the current stack of each slot, for a checkpoint."""
        if self.size == 0:
            return {}
        return {name: stored[self.last] for name, stored in self.store.items()}

    def restore(self, state):
        """Restore the current stacks from what `state` returned."""
        if state:
            images = {name: saved.flatten(0, 1).numpy() for name, saved in state.items()}
            self.last = self.append(images, self.last.size).reshape(self.last.shape)
            self.new_episode[:] = False


def stacked(images, stacks):
    """Return the stacks of images of each camera as tensors (batch, channels, height, width).

    `images` is what `Frames.images` returns. The channels of the oldest image come first. In memory
    the channels are the last dimension, with which convolutions are faster on a CPU.
    """
    batches = []
    for all_images in images:
        frames = [
            all_images.index_select(0, column) for column in torch.as_tensor(stacks).unbind(1)
        ]
        batch = torch.cat(frames, 3) if len(frames) > 1 else frames[0]
        batches.append(batch.permute(0, 3, 1, 2))
    return batches
