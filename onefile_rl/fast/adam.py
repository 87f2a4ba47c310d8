"""Adam, written so that torch.compile can trace it together with the loss."""

import inspect
import math
import weakref

import torch

# The methods of torch's base class without their wrapper, which would import torch._dynamo: that takes two seconds, and
# a run without a compiled update does not need it.
add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

ALL = weakref.WeakSet()  # every Adam of this process


def read_param_groups():
    """Let all Adam optimizers read the numbers of their param groups. Call it before a compiled update."""
    for optimizer in ALL:
        optimizer.read_param_groups()


class Adam(torch.optim.Optimizer):
    """Adam with the numbers of `torch.optim.Adam`, for use inside a compiled update.

    Param groups, `state_dict`, `load_state_dict` and learning rate schedulers work as with any
    optimizer of torch. Two things differ inside. The state is created in the constructor, and the
    parameters of a group share one count of steps as long as all of them have gradients. The
    learning rate of a group is copied into a tensor before each step, so that a compiled update
    follows when the loop changes `param_groups[0]["lr"]`.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.groups = []  # one per param group: (parameter, state) pairs, learning rate as a tensor
        self.constants = []  # one per param group: beta1, beta2, eps
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self._opt_called = True  # see the end of `step`
        ALL.add(self)

    def add_param_group(self, param_group):
        for name in ("weight_decay", "amsgrad", "maximize"):
            if param_group.get(name):
                raise ValueError(f"fast.Adam has no {name}: use an optimizer of torch.optim")
        add_param_group(self, param_group)
        params = self.param_groups[-1]["params"]
        step = torch.zeros((), dtype=torch.float64, device=params[0].device)
        for p in params:
            # A frozen parameter counts its own steps, in case it is unfrozen later.
            self.state[p]["step"] = step if p.requires_grad else step.clone()
            self.state[p]["exp_avg"] = torch.zeros_like(p)
            self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        self.groups.append(([(p, self.state[p]) for p in params], torch.full_like(step, -1.0)))
        self.constants.append(None)
        self.read_param_groups()

    def read_param_groups(self):
        """Copy the numbers of the param groups to where `step` reads them: the loop may have changed them."""
        for i, group in enumerate(self.param_groups):
            lr = self.groups[i][1]
            if lr.item() != group["lr"]:
                lr.fill_(group["lr"])
            self.constants[i] = (*group["betas"], group["eps"])

    def zero_grad(self, set_to_none=True):
        for pairs, _ in self.groups:
            for p, _ in pairs:
                if not set_to_none and p.grad is not None:
                    p.grad.zero_()
                # torch.compile mixes up gradients if one of a frozen parameter is assigned
                elif p.requires_grad or not torch.compiler.is_compiling():
                    p.grad = None

    def count_alone(self, params):
        """Let parameters without a gradient count their own steps from now on, as torch does."""
        for p in params:
            step = self.state[p]["step"]
            if any(other is not p and self.state[other]["step"] is step for other in self.state):
                self.state[p]["step"] = step.clone()

    @torch.no_grad()
    def step(self):
        if not torch.compiler.is_compiling():  # a compiled update has done so before the call
            self.read_param_groups()
        for (pairs, lr), (beta1, beta2, eps) in zip(self.groups, self.constants, strict=True):
            if not torch.compiler.is_compiling():
                self.count_alone([p for p, _ in pairs if p.grad is None])
            counted = None
            for p, state in pairs:
                if p.grad is None:
                    continue
                if state["step"] is not counted:
                    counted = state["step"]
                    counted += 1
                    # exp(step * log(beta)) is beta ** step. The compiler computes an exp once, and a power per weight.
                    step_size = (lr / (1 - torch.exp(counted * math.log(beta1)))).to(p.dtype)
                    correction = torch.rsqrt(1 - torch.exp(counted * math.log(beta2))).to(p.dtype)
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denominator = state["exp_avg_sq"].sqrt() * correction + eps
                p.sub_(step_size * state["exp_avg"] / denominator)

    # Schedulers of torch wrap `step` to notice a wrong order of calls, and torch.compile can't trace their wrapper.
    step._wrapped_by_lr_sched = True

    def state_dict(self):
        return state_dict(self)

    def load_state_dict(self, saved):
        """Load a state of this class or of `torch.optim.Adam`, into the tensors that are already in use."""
        in_use = {p: dict(state) for p, state in self.state.items()}
        load_state_dict(self, saved)
        for p, tensors in in_use.items():
            loaded = self.state[p]
            for name, tensor in tensors.items():
                if name in loaded:
                    tensor.copy_(loaded[name])
                else:  # torch.optim.Adam has no state of a parameter that has not had a gradient yet
                    tensor.zero_()
            self.state[p] = tensors
        for i, group in enumerate(self.param_groups):
            pairs = [(p, self.state[p]) for p in group["params"]]
            self.groups[i] = (pairs, self.groups[i][1])
        self.read_param_groups()
