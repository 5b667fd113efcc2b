"""Iterators over what a Ray gives that spills to a disk of this machine: they end with an error where it is full.

Ray guards against a disk that fills slowly. Where what it spills does not fit all the same, it tries again for ever,
and whoever waits for its objects would wait for ever, too.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
STALLED_SECONDS = 15.0
"""Seconds without anything new after which a disk that was full is believed to be."""
FULL = b"[Errno 28]"
"""What a worker of Ray that spills writes into its log where the disk is full, on Linux in any language."""
FULLEST = 0.95
"""The share of a disk in use from which a Ray spills nothing more, by its ``local_fs_capacity_threshold``. What waits
for room then says so nowhere."""
_TAIL_BYTES = 1 << 16


def watched(items: Iterator[Item], is_full: Callable[[], bool], refuse: Callable[[], OSError]) -> Iterator[Item]:
    """Yield what an iterator gives, which is advanced in a thread of its own. Raise what it raises, and what ``refuse``
    returns where nothing new has come for `STALLED_SECONDS` and ``is_full`` says so."""
    made: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(maxsize=1)
    ended = threading.Event()

    def put(kind: str, value: Item | BaseException | None = None) -> bool:
        while not ended.is_set():
            try:
                made.put((kind, value), timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def advance() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
            put("end")
        except BaseException as error:
            put("error", error)

    threading.Thread(target=advance, name="ray-items", daemon=True).start()  # one that waits for ever is left behind
    try:
        since = time.monotonic()
        while True:
            try:
                kind, value = made.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() - since > STALLED_SECONDS and is_full():
                    raise refuse() from None
                continue
            if kind == "end":
                return
            if isinstance(value, BaseException):
                raise value
            yield value  # type: ignore[misc]
            since = time.monotonic()
    finally:
        ended.set()


def says_full(logs: Path) -> bool:
    """Return whether a worker of this Ray that spills has found the disk full. ``logs``: the folder of its logs."""
    for path in logs.glob("*io_worker*"):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                if FULL in file.read():
                    return True
        except OSError:  # it was rotated meanwhile
            continue
    return False


def is_too_full(folder: Path) -> bool:
    """Return whether the disk of this folder is so full that Ray spills nothing to it."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return False
    return usage.used >= FULLEST * (usage.used + usage.free)
