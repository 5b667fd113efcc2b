"""A stand-in for CUDA graphs on a CPU: torch's operations are recorded one by one, and replayed on the same memory.

Like a graph, a replay runs none of the Python that was recorded, reads its inputs where they were, and writes its
results there. What a recording does while it is made is undone: a graph does nothing then. Recordings of one pool
overwrite each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.runtime.nested import leaves_of


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        if "batch_norm" in str(func):
            self._keep(args[3:5])  # running statistics, which its schema does not say
        result = func(*args, **kwargs)
        given = {each.untyped_storage().data_ptr() for each in leaves_of([*args]) if isinstance(each, Tensor)}
        for each in leaves_of(result):
            if isinstance(each, Tensor) and (place := each.untyped_storage().data_ptr()) not in given:
                self.made.add(place)
        self.operations.append((func, args, kwargs, result))
        return result

    def _keep(self, value: Any) -> None:
        for each in leaves_of(value):
            if isinstance(each, Tensor) and id(each) not in self.before:
                place = each.untyped_storage().data_ptr()
                if place not in self.made:
                    self.before[id(each)] = each, each.detach().clone()


class Replays:
    """A `trainer.engine.graphs.Recorder`."""

    def __init__(self) -> None:
        self.replayed = 0
        self.made: list[tuple[object, list[Tensor]]] = []
        """The pool of each recording, and what is in it."""
        self.fails: Exception | None = None
        """The error of a recording, where it fails."""

    def new_pool(self) -> object:
        return object()

    def record(self, work: Callable[[], object], pool: object) -> Callable[[], object]:
        log, random = _Log(), torch.get_rng_state()
        with log:
            work()
        torch.set_rng_state(random)
        with torch.no_grad():
            for each, value in reversed(log.before.values()):
                each.copy_(value)
        if self.fails is not None:
            raise self.fails

        mine_made = [
            each
            for *_, result in log.operations
            for each in leaves_of(result)
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in log.made
        ]
        self.made.append((pool, mine_made))

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                others = [made for its_pool, made in self.made if its_pool is pool and made is not mine_made]
                for each in chain.from_iterable(others):
                    each.fill_(77)
                for func, args, kwargs, result in log.operations:
                    found = func(*args, **kwargs)
                    for mine, new in zip(leaves_of(result), leaves_of(found), strict=True):
                        if isinstance(mine, Tensor) and mine.data_ptr() != new.data_ptr():
                            mine.copy_(new)

        return replay

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        with _NoReading():
            yield


class _NoReading(TorchDispatchMode):
    """Reading a number of a tensor is what waits for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))
