"""A file system that fails and stalls on demand."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class BrokenFileSystem(MemoryFileSystem):
    """In memory. The next `failures` files that are opened for writing fail; while `working` is not set, they block."""

    protocol = "broken"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures = 0
    working = threading.Event()
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


fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)
