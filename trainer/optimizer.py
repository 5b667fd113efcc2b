"""`FlatAdamW`: AdamW whose weights and moments lie in one piece of memory each, so that an update is one operation.

Where a model is small, an update of each parameter costs more for going from one to the next than for computing: with
the default model on a CPU, torch's own takes about a tenth of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.buckets import divide, views
from trainer.timing import traced

UPDATE = "Optimizer.step#AdamW.step"
"""In traces: by names like this one, tools find the end of a step."""


class FlatAdamW(torch.optim.AdamW):
    """Updates all parameters at once where it can, and one by one where it cannot, with the same result but for
    rounding. What it saves and loads is what `torch.optim.AdamW` does.

    Parameters move together when this is made, if they are small enough to make one bucket (`trainer.buckets`), on the
    CPU, and share their memory with nobody; they stay the same objects. On a GPU they stay where they are: there torch
    updates all of them in one kernel, and cuDNN wants the weights of a recurrent layer in an order of its own.
    """

    def __init__(self, module: nn.Module, lr: float, weight_decay: float, together: bool = True) -> None:
        """``together``: False leaves the parameters where they are."""
        super().__init__(module.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
        # In the order of a bucket, so that its buffer is the gradient of `_weights`.
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._weights: Tensor | None = None
        self._moments: tuple[Tensor, Tensor] | None = None
        self._steps = torch.zeros(len(self._parameters))
        self._apart = False
        """Have some parameters been updated more often than others?"""
        if together and _can_move(module, self._parameters):
            self._weights, places = _together([parameter.detach() for parameter in self._parameters])
            for parameter, place in zip(self._parameters, places, strict=True):
                parameter.data = place
        self._places = [parameter.data_ptr() for parameter in self._parameters]

    @property
    def is_flat(self) -> bool:
        """Do the weights lie together?"""
        return self._weights is not None

    def update(self, gradient: Tensor | None) -> None:
        """``gradient``: of all parameters, as they lie in a bucket; None where there is none such, or where some have
        no gradient. Then it is in the parameters."""
        if gradient is None or not self._are_at_home() or not self._have_moments():
            self._moments = None  # some may have been updated more often than others, after this
            self.step()
            return
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._moments, self._apart = None, False

    def _are_at_home(self) -> bool:
        """Do the parameters lie where they were put? A model may have given one other memory."""
        return self.is_flat and [parameter.data_ptr() for parameter in self._parameters] == self._places

    def _have_moments(self) -> bool:
        """Have all been updated equally often, so that their moments can lie together? Then they do."""
        if self._moments is None and not self._apart:
            known = [self.state[parameter] for parameter in self._parameters if self.state.get(parameter)]
            counts = {float(of_one["step"]) for of_one in known}
            self._apart = len(counts) > 1 or len(known) not in (0, len(self._parameters))
            if not self._apart:
                self._bring_together(counts.pop() if counts else 0.0)
        return not self._apart

    def _bring_together(self, count: float) -> None:
        """All were updated so often."""
        self._steps = torch.full((len(self._parameters),), count)
        found = []
        for name in ("exp_avg", "exp_avg_sq"):
            values = [self.state[item].get(name, torch.zeros_like(item)) for item in self._parameters]
            flat, places = _together(values)
            found.append(flat)
            for parameter, place in zip(self._parameters, places, strict=True):
                self.state[parameter][name] = place
        for number, parameter in enumerate(self._parameters):
            self.state[parameter]["step"] = self._steps[number]
        self._moments = found[0], found[1]


def _can_move(module: nn.Module, parameters: list[nn.Parameter]) -> bool:
    everything = [*module.parameters(), *module.buffers()]
    return (
        bool(parameters)
        and all(type(item) is nn.Parameter and item.device.type == "cpu" for item in parameters)
        and all(item.layout is torch.strided and item.is_floating_point() for item in parameters)
        # Of several that share memory, one would stay behind.
        and len({item.untyped_storage().data_ptr() for item in everything}) == len(everything)
        and len(divide(parameters)) == 1
    )


def _together(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies of these, in one piece of memory: all of it, and each one in it."""
    flat = torch.empty(sum(item.numel() for item in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    places = views(flat, tensors)
    torch._foreach_copy_(places, tensors)
    return flat, places
