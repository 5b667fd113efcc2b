"""The bytes of the tensors that live at once on the CPU, whose allocator counts none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_of(run: Callable[[], object]) -> int:
    """Return the bytes of the tensors that were made while this ran, and held at once."""
    with LiveStorages() as live:
        run()
    return live.most


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all tensors that live at once, of those made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            part.untyped_storage()._cdata for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)
        }
        for part in tree_leaves(result):
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                if storage._cdata not in self._known | given and storage.nbytes():
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
