"""`FlatAdamW`: AdamW whose weights and moments each lie in one piece of memory, so that an update is one operation.

In a small model, an update of each parameter costs more for going from one to the next than for computing: with the
default model on a CPU, torch's own takes about a tenth of a step. A whole step takes 1.04 times as long without it
(quartiles 0.97 and 1.05, `benchmarks.cpu_parts`: 64 samples per rank, two cores).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel import buckets
from trainer.runtime.step_timer import traced

UPDATE = "Optimizer.step#FlatAdamW.step"
"""The name of an update in traces, as torch calls it."""

# Without decorators that load torch._dynamo, which takes a rank 0.9 s.
_ADD_PARAM_GROUP = unwrap(torch.optim.Optimizer.add_param_group)
_ZERO_GRAD = unwrap(torch.optim.Optimizer.zero_grad)
_STATE_DICT = unwrap(torch.optim.Optimizer.state_dict)
_LOAD_STATE_DICT = unwrap(torch.optim.Optimizer.load_state_dict)
_STEP = unwrap(torch.optim.AdamW.step)


class FlatAdamW(torch.optim.AdamW):
    """AdamW that updates all parameters at once where it can, and one by one where it cannot, with the same result
    except for rounding. Its state dict is that of `torch.optim.AdamW`.

    Parameters move into one piece when this is made, if they fit into a first bucket
    (`trainer.parallel.buckets.FIRST_BYTES`), are on the CPU, and nothing else is known to look at their memory; they
    stay the same objects. On a GPU they stay where they are: there torch updates all of them in one kernel, and cuDNN
    wants the weights of a recurrent layer in an order of its own.

    Which way an update takes follows from the parameters and the saved state, not from earlier updates: ranks that have
    loaded a state must do what the others do, to the last bit.
    """

    def __init__(self, module: nn.Module, lr: float, weight_decay: float, together: bool = True) -> None:
        """``together``: False leaves the parameters where they are."""
        super().__init__(module.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
        # In the order of a bucket, so that its buffer is the gradient of `_weights`.
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._weights: Tensor | None = None
        self._places: list[int] = []
        self._moments: tuple[Tensor, Tensor] | None = None
        self._steps = torch.zeros(len(self._parameters))
        self._apart = False
        """Whether some parameters have been updated more often than others."""
        if together and _can_move(module, self._parameters):
            self._weights, places = _together([item.detach() for item in self._parameters], self._parameters)
            for parameter, place in zip(self._parameters, places, strict=True):
                parameter.data = place
            self._places = [parameter.data_ptr() for parameter in self._parameters]

    @property
    def is_flat(self) -> bool:
        """Whether the weights lie together; a model may have given one of them other memory."""
        return bool(self._places) and [parameter.data_ptr() for parameter in self._parameters] == self._places

    def release(self) -> None:
        """Give each parameter memory of its own again, where they lie together: the model is its caller's from now
        on."""
        if self.is_flat:
            for parameter in self._parameters:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
            self._places = []

    def update(self, gradient: Tensor | None) -> None:
        """Update the parameters. ``gradient`` holds those of all parameters as they lie in a bucket; with None, where
        some have no gradient or they do not lie together, the gradients are read from the parameters."""
        if gradient is None or not self._is_of_all(gradient):
            self._moments, self._apart = None, False  # some are updated more often than others now, or not any more
            self._update_each()
        elif not self._have_moments():
            self._update_each()
        else:
            self._update_all(gradient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as `torch.optim.Optimizer.add_param_group` does."""
        _ADD_PARAM_GROUP(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove all gradients, as `torch.optim.Optimizer.zero_grad` does."""
        _ZERO_GRAD(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.optim.AdamW.state_dict` returns."""
        return dict(_STATE_DICT(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of this class or of `torch.optim.AdamW` has returned."""
        _LOAD_STATE_DICT(self, state_dict)
        self._moments, self._apart = None, False

    def _update_all(self, gradient: Tensor) -> None:
        assert self._weights is not None
        assert self._moments is not None
        [group] = self.param_groups
        beta1, beta2 = group["betas"]
        self._steps += 1
        with torch.no_grad(), traced(UPDATE):
            torch._fused_adamw_(
                [self._weights], [gradient], [self._moments[0]], [self._moments[1]], [], [self._steps[0]],
                lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False,
            )  # fmt: skip

    def _update_each(self) -> None:
        """Update as torch does. It walks through each parameter, its gradient and its moments as they lie in memory, so
        all of them must have the parameter's strides, whatever the checkpoint and the model have made of them."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = _as(parameter, parameter.grad)
            of_one = self.state.get(parameter) or {}
            for name in _MOMENTS:
                if name in of_one:
                    of_one[name] = _as(parameter, of_one[name])
        with torch.no_grad(), traced(UPDATE):
            _STEP(self)

    def _is_of_all(self, gradient: Tensor) -> bool:
        """Return whether the gradient is that of all weights: a parameter frozen since is in no later bucket."""
        return self._weights is not None and gradient.numel() == self._weights.numel() and self.is_flat

    def _have_moments(self) -> bool:
        """Return whether all have been updated equally often; if so, bring their moments together."""
        if self._moments is None and not self._apart:
            known = [self.state[parameter] for parameter in self._parameters if self.state.get(parameter)]
            counts = {float(of_one["step"]) for of_one in known}
            self._apart = len(counts) > 1 or len(known) not in (0, len(self._parameters))
            if not self._apart:
                self._bring_together(counts.pop() if counts else 0.0)
        return not self._apart

    def _bring_together(self, count: float) -> None:
        """Move the moments into one piece each; ``count`` is the number of updates of every parameter."""
        self._steps = torch.full((len(self._parameters),), count)
        found = []
        for name in _MOMENTS:
            values = [self.state[item].get(name, torch.zeros_like(item)) for item in self._parameters]
            flat, places = _together(values, self._parameters)
            found.append(flat)
            for parameter, place in zip(self._parameters, places, strict=True):
                self.state[parameter][name] = place
        for number, parameter in enumerate(self._parameters):
            self.state[parameter]["step"] = self._steps[number]
        self._moments = found[0], found[1]


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _can_move(module: nn.Module, parameters: list[nn.Parameter]) -> bool:
    if not parameters or not all(type(item) is nn.Parameter and item.layout is torch.strided for item in parameters):
        return False
    kinds = {item.dtype for item in parameters}
    if len(kinds) > 1 or not kinds.pop().is_floating_point or not all(item.is_cpu for item in parameters):
        return False
    if sum(item.nbytes for item in parameters) > buckets.FIRST_BYTES:
        return False
    # Of several that share memory, one would stay behind.
    everything = [*module.parameters(), *(item for item in module.buffers() if item.layout is torch.strided)]
    if len({item.untyped_storage().data_ptr() for item in everything}) < len(everything):
        return False
    return not any(_is_watched(item) for item in parameters)


def _is_watched(tensor: Tensor) -> bool:
    """Return whether another tensor uses this one's memory: a view that a model keeps would no longer see it learn."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is None or count(tensor.untyped_storage()._cdata) > 2  # itself, and the storage that is asked here


def _together(tensors: list[Tensor], parameters: list[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Copy these tensors, one for each parameter, into one piece of memory; return it and the views into it, with the
    strides of the parameters."""
    flat = torch.empty(sum(item.numel() for item in parameters), dtype=tensors[0].dtype, device=tensors[0].device)
    places = buckets.views(flat, parameters)
    torch._foreach_copy_(places, tensors)
    return flat, places


def _as(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    if tensor.stride() == parameter.stride() or tensor.layout is not torch.strided:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
