"""LSTMs over packed sequences, computed by numpy.

For small batches, torch takes several times as long. Rows are packed as in torch's PackedSequence:
the first rows of all sequences, the longest sequence first, then their second rows, and so on.
`sizes` says how many sequences have a first row, a second row, and so on.
"""

import numpy as np
import torch
from torch.autograd.function import once_differentiable

COMPARE_EVERY = 20  # calls between two comparisons with `unroll`


class _Lstm(torch.autograd.Function):
    """LSTM and its gradients. All arrays have the shape (network, row, number)."""

    @staticmethod
    def forward(ctx, pre, weight_hh, states, sizes):
        gates = pre.detach().numpy().copy()
        weight_hh = weight_hh.detach().numpy()
        h, c = np.split(states.numpy(), 2, -1)
        sizes = sizes.tolist()
        ends = np.cumsum(sizes).tolist()
        width = h.shape[-1]

        # For the gradients: hidden states and cells before each row, and tanh of the cells after it
        shape = (*gates.shape[:2], width)
        outputs = np.empty(shape, np.float32)
        h_before = np.empty(shape, np.float32)
        c_before = np.empty(shape, np.float32)
        tanh_c = np.empty(shape, np.float32)

        # sigmoid(x) is (1 + tanh(x / 2)) / 2, so one call of tanh computes all gates
        scale = np.repeat(np.array([0.5, 0.5, 1, 0.5], np.float32), width)
        weight_t = np.ascontiguousarray(weight_hh.transpose(0, 2, 1))
        for end, size in zip(ends, sizes, strict=True):
            rows = slice(end - size, end)
            h = h[:, :size]
            c = c[:, :size]
            h_before[:, rows] = h
            c_before[:, rows] = c
            z = gates[:, rows]
            z += h @ weight_t
            z *= scale
            np.tanh(z, out=z)
            for sigmoids in (z[..., : 2 * width], z[..., 3 * width :]):
                sigmoids += 1
                sigmoids *= 0.5
            i, f, g, o = _split_gates(z, width)
            c = f * c + i * g
            tanh_c[:, rows] = np.tanh(c)
            h = o * tanh_c[:, rows]
            outputs[:, rows] = h
        ctx.saved = gates, weight_hh, h_before, c_before, tanh_c, sizes, ends
        return torch.from_numpy(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gates, weight_hh, h_before, c_before, tanh_c, sizes, ends = ctx.saved
        grad = grad.numpy()
        width = h_before.shape[-1]
        i, f, g, o = _split_gates(gates, width)

        # Derivatives that do not depend on later rows: of the cells with respect to the first three
        # gates, of the output with respect to the fourth gate and to the cells
        by_gates = np.concatenate(
            [g * i * (1 - i), c_before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], -1
        )
        by_cell = o * (1 - tanh_c * tanh_c)

        # Back in time. dh and dc are the gradients that arrive from later rows
        grad_pre = np.empty_like(gates)
        dh = np.zeros((len(gates), sizes[0], width), np.float32)
        dc = np.zeros((len(gates), sizes[0], width), np.float32)
        for end, size in zip(reversed(ends), reversed(sizes), strict=True):
            rows = slice(end - size, end)
            dh_now = grad[:, rows] + dh[:, :size]
            dc_now = dc[:, :size] + dh_now * by_cell[:, rows]
            z = grad_pre[:, rows]
            for k, d_now in enumerate((dc_now, dc_now, dc_now, dh_now)):
                gate = slice(k * width, (k + 1) * width)
                np.multiply(d_now, by_gates[:, rows, gate], out=z[..., gate])
            dh[:, :size] = z @ weight_hh
            dc[:, :size] = dc_now * f[:, rows]
        grad_weight = grad_pre.transpose(0, 2, 1) @ h_before
        return torch.from_numpy(grad_pre), torch.from_numpy(grad_weight), None, None


def _split_gates(gates, width):
    """Return views of the gates in torch's order: input, forget, cell, output."""
    return [gates[..., k * width : (k + 1) * width] for k in range(4)]


def lstm(pre, weight_hh, states, sizes):
    """Return the outputs of several LSTMs of the same size, (network, row, width).

    pre: the gates without the part of the hidden state, with all biases, (network, row, 4 * width)
    weight_hh: the weights of the hidden state, (network, 4 * width, width)
    states: hidden states and cells at the start of the sequences, (network, sequence, 2 * width)
    sizes: the number of sequences at each step
    """
    if pre.device.type == "cpu":
        return _Lstm.apply(pre, weight_hh, states, sizes)

    # torch.lstm multiplies its inputs by weights too: by the identity matrix here
    identity = torch.eye(pre.shape[-1], device=pre.device)
    no_bias = pre.new_zeros(pre.shape[-1])
    outputs = []
    for network_pre, network_weight, network_states in zip(pre, weight_hh, states, strict=True):
        h, c = network_states.chunk(2, 1)
        initial = [h[None].contiguous(), c[None].contiguous()]
        weights = [identity, network_weight, no_bias, no_bias]
        outputs.append(
            torch.lstm(network_pre, sizes, initial, weights, True, 1, 0.0, False, False)[0]
        )
    return torch.stack(outputs)


class Unrolled:
    """Compute `unroll(agent, obs, lstm_state, packed_sizes)`.

    unroll: the function of the script that calls `agent.step` for one step after the other, and
    returns the outputs of the LSTMs of actor and critic
    enabled: False calls `unroll` in any case

    Here `agent.encode` computes the inputs of all steps at once, and `lstm` the sequences of
    `agent.actor_memory` and `agent.critic_memory`, if these are LSTMs with the layers `linear_ih`
    and `linear_hh`. Outputs and gradients are compared with those of `unroll` from time to time.
    """

    def __init__(self, unroll, enabled=True):
        self.unroll = unroll
        self.enabled = enabled
        self.calls = 0  # with more than one step: only these compare the new state

    def __call__(self, agent, obs, lstm_state, packed_sizes):
        if self.enabled:
            try:
                outputs = self.with_lstm(agent, obs, lstm_state, packed_sizes)
                if self.calls % COMPARE_EVERY == 0:
                    self.enabled = self.is_equal(agent, obs, lstm_state, packed_sizes)
            except Exception:  # other layers or shapes
                self.enabled = False
            if not self.enabled:
                reason = "its step() is not the LSTM of fast/lstm.py"
                print(f"Stepping the memory with PyTorch (slower): {reason}", flush=True)
        if not self.enabled:
            return self.unroll(agent, obs, lstm_state, packed_sizes)
        self.calls += len(packed_sizes) > 1
        return outputs

    def with_lstm(self, agent, obs, lstm_state, packed_sizes):
        memories = (agent.actor_memory, agent.critic_memory)
        pre = []
        for memory, x in zip(memories, agent.encode(obs), strict=True):
            pre.append(memory.linear_ih(x) + memory.linear_hh.bias)
        weight_hh = torch.stack([memory.linear_hh.weight for memory in memories])
        states = torch.stack(lstm_state.chunk(2, 1))
        return tuple(lstm(torch.stack(pre), weight_hh, states, packed_sizes))

    def is_equal(self, agent, obs, lstm_state, packed_sizes):
        """Compare outputs and gradients of the first two steps. The second output depends on the
        state after the first."""
        packed_sizes = packed_sizes[:2]
        obs = obs[: int(packed_sizes.sum())]
        parameters = [p for p in agent.parameters() if p.requires_grad]
        results = []
        for compute in (self.with_lstm, self.unroll):
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):  # there may be dropout
                outputs = compute(agent, obs, lstm_state, packed_sizes)
                total = sum(x.square().sum() for x in outputs)
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            results.append([*outputs, *gradients])
        return all(is_close(ours, expected) for ours, expected in zip(*results, strict=True))


def is_close(x, y):
    if x is None or y is None:
        return x is y
    return torch.allclose(x, y, rtol=1e-3, atol=1e-4)
