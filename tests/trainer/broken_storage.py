"""A file system that fails and stalls on demand, and a manager of checkpoints that notes what it reports."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

from trainer.checkpoint.manager import CheckpointManager
from trainer.rundir import RunDir


class BrokenFileSystem(MemoryFileSystem):
    """In memory. The next `failures` files that are opened for writing fail; while `working` is not set, they block."""

    protocol = "broken"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures = 0
    working = threading.Event()
    working.set()
    reached = threading.Semaphore(0)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("broken://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            self.reached.release()
            self.working.wait()
            if BrokenFileSystem.failures > 0:
                BrokenFileSystem.failures -= 1
                raise OSError(f"no answer about {path}")
        return super()._open(path, mode, **options)


@contextmanager
def stalled() -> Iterator[threading.Semaphore]:
    """Whoever opens a file for writing waits for the end of this; the semaphore is released by each that does."""
    while BrokenFileSystem.reached.acquire(blocking=False):
        pass  # what was before
    BrokenFileSystem.working.clear()
    try:
        yield BrokenFileSystem.reached
    finally:
        BrokenFileSystem.working.set()


fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)


class Checkpoints(CheckpointManager):
    """Those of a run directory; on storage that breaks on demand, where none is given."""

    def __init__(self, rundir: RunDir | None = None, keep: int = 3, fingerprint: str = "this") -> None:
        self.told: list[dict[str, Any]] = []
        self.rundir = rundir or RunDir(f"broken://{uuid.uuid4().hex}")
        super().__init__(
            self.rundir, keep, fingerprint, lambda kind, **fields: self.told.append({"kind": kind, **fields})
        )


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((100,), float(step))}, "progress": {"step": step, "best_loss": float("inf")}}


def loaded_step(checkpoints: CheckpointManager) -> int | None:
    found = checkpoints.load_latest()
    return None if found is None else int(found[1]["model"]["weight"][0])
