"""A watchdog for hangs: a rank that sees no progress reports where it stands, before the timeout ends the group.

A rank that never enters a collective makes all others wait for it, and all of them look alike from outside. So every
rank has a thread that reports its own view, a ``hang`` event; all of them together show which rank is missing
(`dtrain_dagster.monitoring.hangs`).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.comm.group import Collective, InterruptibleGroup
from trainer.config import DistributedTrainingConfig
from trainer.documents.schemas import NO_COLLECTIVE
from trainer.observability.reporter import Reporter

LEAST_SECONDS, STEPS = 20.0, 20
"""By default a step counts as a hang if it takes longer than the first, in seconds, and longer than the second, in
usual steps."""
PATIENT = "barrier"
"""The collective in which ranks wait while one works alone, for as long as that takes."""
STACKS_BYTES, FRAMES, RECENT = 20_000, 64, 10
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TRAINER = f"{Path(__file__).parents[1]}{os.sep}"
_log = logging.getLogger(__name__)


def limit_seconds(given: float | None, usual: float | None, timeout: float) -> float:
    """Return how many seconds a step may take. ``given``: as configured; ``usual``: the median step, None before the
    first, which may compile the model for as long as that takes; ``timeout``: infinite if there are no other ranks.

    A rank that makes the others wait reports after about a usual step plus half of the timeout; the other half is left
    for the report.
    """
    if usual is None:
        return math.inf if given is None else given
    return min(max(LEAST_SECONDS, STEPS * usual) if given is None else given, usual + timeout / 2)


class Watchdog:
    """A watchdog of one rank. The training calls `progress` and `rest`, which cost next to nothing."""

    def __init__(self, config: DistributedTrainingConfig) -> None:
        self._given, self._timeout = config.hang_seconds, config.collective_timeout_seconds
        self._seconds: deque[float] = deque(maxlen=64)
        self._mark: tuple[int, float | None] = (0, None)
        """Steps done, and when the current one began; None if something else is under way. Replaced as a whole."""
        self._told: object = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._world: tuple[Reporter, InterruptibleGroup | None, Sequence[int], int] | None = None

    def attend(self, reporter: Reporter, group: InterruptibleGroup | None, nodes: Sequence[int], node_id: int) -> None:
        """Watch this rank in a new world from now on. ``nodes``: that of each rank."""
        self._world = (reporter, group, nodes, node_id)
        if not self._thread.is_alive():
            self._thread.start()

    def progress(self, step: int) -> None:
        """Note that ``step`` steps are done and the next one begins."""
        now, (before, began) = time.monotonic(), self._mark
        if began is not None and step > before:
            self._seconds.append(now - began)
        self._mark = (step, now)

    def rest(self) -> None:
        """Note that something other than a step begins: an evaluation, a checkpoint, a regroup. It has no limit of its
        own; a rank reports only if it waits in one collective for half of its timeout."""
        self._mark = (self._mark[0], None)

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _limit(self) -> float:
        seconds = list(self._seconds)
        is_alone = self._world is not None and self._world[1] is None
        timeout = math.inf if is_alone else self._timeout
        return limit_seconds(self._given, statistics.median(seconds) if seconds else None, timeout)

    def _work(self) -> None:
        while not self._stop.wait(min(1.0, self._limit() / 10, self._timeout / 20)):
            try:
                self._look()
            except Exception:  # a watchdog that fails must not be what ends a training
                _log.exception("the watchdog could not check the ranks")

    def _look(self) -> None:
        world, mark, now = self._world, self._mark, time.monotonic()
        if world is None or self._told is mark:  # once per hang
            return
        reporter, group, nodes, node_id = world
        step, began = mark
        recent = [item for item in (list(group.collectives) if group else []) if item.began is not None]
        failed = group is not None and group.error is not None  # then nobody waits any more for what did not end
        waits_in = recent[-1] if recent and recent[-1].ended is None and not failed else None
        is_late = began is not None and now - began > self._limit()
        waited = now - (_began(waits_in) if waits_in else began or now)
        is_waiting = waits_in is not None and waits_in.what != PATIENT and waited > self._timeout / 2
        if not is_late and not is_waiting:
            return
        self._told = mark
        fields: dict[str, Any] = {
            "step": step + (began is not None),
            "node_id": node_id,
            "nodes": list(nodes),
            "operation": waits_in.what if waits_in else NO_COLLECTIVE,
            "sequence": recent[-1].sequence if recent else 0,
            "waited_seconds": round(waited, 3),
            "where": where_now(),
            "stacks": stacks(),
            "recent": [
                {"sequence": item.sequence, "what": item.what, "ended": item.ended is not None}
                for item in recent[-RECENT:]
            ],
        }
        reporter.emit("hang", **fields)
        _log.warning(
            "no progress in step %d: %s for %.1f s (collective %d), in %s\n%s",
            fields["step"],
            fields["operation"],
            waited,
            fields["sequence"],
            fields["where"],
            fields["stacks"],
        )


def _began(collective: Collective) -> float:
    assert collective.began is not None
    return collective.began


def where_now() -> str:
    """Return ``file:line function`` of the innermost line of the main thread that is the trainer's or the user's
    own."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return next((_place(item) for item in _inside_out(frame) if _is_own(item.f_code.co_filename)), "")


def stacks() -> str:
    """Return where all other threads of this process stand, the main thread first; as much as fits. Source lines are
    left out: to read them may mean to wait for the very disk that hangs."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [
            f'  File "{item.f_code.co_filename}", line {item.f_lineno}, in {item.f_code.co_qualname}'
            for item in reversed(list(itertools.islice(_inside_out(frames[ident]), FRAMES)))
        ]
    return "\n".join(lines).encode(errors="replace")[:STACKS_BYTES].decode(errors="ignore")


def _inside_out(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_own(file: str) -> bool:
    """Return whether a file is neither Python's nor an installed package's, unless that is the trainer itself."""
    return file.startswith(_TRAINER) or not (file.startswith(_LIBRARIES) or file.startswith("<"))


def _place(frame: FrameType) -> str:
    """Return ``file:line function``, with the file as seen from the nearest folder that Python imports from."""
    file = frame.f_code.co_filename
    roots = [root for root in sys.path if root and file.startswith(f"{root}{os.sep}")]
    name = file[len(max(roots, key=len)) + 1 :] if roots else os.path.basename(file)
    return f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}"
