"""Copies of a state on the CPU, in reused buffers: the only part of a save that training waits for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from trainer.runtime.nested import map_leaves


class Stage:
    """A set of CPU buffers for one copy of a state.

    Memory is asked for at the first copy only (new memory costs a page fault for every 4 KiB that is written to it) and
    when shapes change.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, state: Any) -> Any:
        """Return the state with every tensor replaced by its copy in this stage, and every plain value copied. The
        result of an earlier call is overwritten. Tensors that share their memory do so in the copy."""
        buffers, sources, copies = iter(self._buffers), [], []
        known: dict[tuple[Any, ...], Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
                return tensor.cpu().clone()  # no kind that the stock trainer has
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and place in known:
                return known[place]
            buffer = next(buffers, None)
            pinned = tensor.is_cuda  # which lets the device copy by itself, all tensors at once
            if (
                buffer is None
                or buffer.shape != tensor.shape
                or buffer.dtype != tensor.dtype
                or (pinned and not buffer.is_pinned())
            ):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            sources.append(tensor)
            copies.append(buffer)
            known[place] = buffer
            return buffer

        with torch.no_grad():
            result = map_leaves(lambda part: take(part) if isinstance(part, Tensor) else copy.deepcopy(part), state)
            for buffer, source in zip(copies, sources, strict=True):
                buffer.copy_(source, non_blocking=True)
            for device in {source.device for source in sources if source.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
        self._buffers = copies
        return result
