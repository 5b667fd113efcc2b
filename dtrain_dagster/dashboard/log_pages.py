"""A job's logs as its page shows them: the last lines, what is new since, and the lines that contain a text.

Lines come from files of this machine, read a little at a time, or from the cluster, asked now and then for all browsers
together. Secrets are struck out of every line, and it stays on one line, whatever a program has printed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from dtrain_dagster.jobs.log_follower import by_part, time_in
from trainer.documents.reader import LOG_BYTES
from trainer.node.line_log import logs_of, open_log, readable
from trainer.printable import visible
from trainer.secrets.redaction import redact

MOST_LINES = 1000
"""The most lines of one answer: the newest."""
MOST_CHARACTERS = 4000
"""The most characters of one line."""
TAIL_BYTES = 512 << 10
"""The most bytes of each log that are read for its last lines, or for what is new."""
SEARCH_BYTES = 64 << 20
"""The most bytes that one search reads, over all logs of a job."""
MOST_KEPT = 8
"""The most jobs whose logs are kept until a cluster is asked again."""
LOOK_SECONDS, LOOK_LINES = 0.2, 20_000
"""Seconds of waiting, and lines of looking, between two questions whether somebody still waits for the answer."""
CLUSTER_SECONDS = 10.0
"""Seconds for which what the cluster has said is shared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPage:
    """An answer to a page that shows logs."""

    lines: tuple[tuple[int, str], ...]
    """Pairs of node and line, in order of time as far as lines tell theirs."""
    cursor: str
    """What the page gives to get what is new since; "" where it gets everything anew."""
    nodes: tuple[int, ...]
    """The nodes that have a log."""
    is_cut: bool
    """Whether there are lines before these, and after ``cursor`` where one was given, that are not among them."""


class LeftError(Exception):
    """Nobody waits for the answer any more: the page looks for something else."""


def is_always_wanted() -> bool:
    """Return True: somebody waits for the answer to its end."""
    return True


class LogSource(Protocol):
    """Where a job's logs are read."""

    def page(
        self, job_id: str, node: int | None, text: str, cursor: str, is_wanted: Callable[[], bool] = is_always_wanted
    ) -> LogPage:
        """Return the lines of ``node``, or of all, that contain ``text``: those since ``cursor``, or the last ones
        where it is "". ``is_wanted`` is asked now and then whether somebody still waits. Raise `LeftError` where nobody
        does, and `DamagedError`, OSError or `ClusterError` where they cannot be read."""


class LogFiles:
    """The logs that nodes write to this machine, as a `LogSource`. One search is made at a time: each reads many
    megabytes."""

    def __init__(self, folder_of: Callable[[str], Path]) -> None:
        """``folder_of`` returns the folder of a job's logs."""
        self._folder_of = folder_of
        self._searching = threading.Lock()

    def page(
        self, job_id: str, node: int | None, text: str, cursor: str, is_wanted: Callable[[], bool] = is_always_wanted
    ) -> LogPage:
        if not text or cursor:  # little is read
            return self._page(job_id, node, text, cursor, is_wanted)
        with waited_for(self._searching, is_wanted):
            return self._page(job_id, node, text, cursor, is_wanted)

    def _page(self, job_id: str, node: int | None, text: str, cursor: str, is_wanted: Callable[[], bool]) -> LogPage:
        logs = logs_of(self._folder_of(job_id))
        wanted = {number: path for number, path in logs.items() if node in (None, number)}
        offsets, after = parse_cursor(cursor), {}
        each = min(LOG_BYTES, SEARCH_BYTES // max(1, len(wanted))) if text and not cursor else TAIL_BYTES
        found: list[tuple[int, str]] = []
        is_cut = False
        for number, path in wanted.items():
            refuse_if_left(is_wanted)
            part, after[number], left_out = _read(path, offsets.get(number) if cursor else None, each)
            is_cut |= left_out
            found += [(number, line) for line in part]
        lines, more = _chosen(found, text, is_wanted)
        return LogPage(lines=lines, cursor=write_cursor(after), nodes=tuple(logs), is_cut=is_cut or more)


class ClusterLogs:
    """The logs that only the cluster can read, as a `LogSource`. ``ask`` returns those of all nodes of a job, as
    `GPUClusterManager.job_logs`."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._said: dict[str, tuple[float, list[tuple[int, str]]]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def page(
        self, job_id: str, node: int | None, text: str, cursor: str, is_wanted: Callable[[], bool] = is_always_wanted
    ) -> LogPage:
        with self._lock:
            lock = self._locks.setdefault(job_id, threading.Lock())
        with waited_for(lock, is_wanted):
            at, said = self._said.get(job_id, (-1e9, []))
            if time.monotonic() - at > CLUSTER_SECONDS:
                parts = by_part(self._ask(job_id)).items()
                said = [(part[0], line) for part, lines in parts for line in lines]
                with self._lock:
                    self._said[job_id] = (time.monotonic(), said)
                    while len(self._said) > MOST_KEPT:
                        del self._said[next(iter(self._said))]
        lines, more = _chosen([item for item in said if node in (None, item[0])], text, is_wanted)
        return LogPage(lines=lines, cursor="", nodes=tuple(sorted({number for number, _ in said})), is_cut=more)


@contextmanager
def waited_for(lock: threading.Lock, is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock within the block. Raise `LeftError` where nobody waits for the answer before it is free."""
    while not lock.acquire(timeout=LOOK_SECONDS):
        refuse_if_left(is_wanted)
    try:
        yield
    finally:
        lock.release()


def refuse_if_left(is_wanted: Callable[[], bool]) -> None:
    """Raise `LeftError` where nobody waits for the answer any more."""
    if not is_wanted():
        raise LeftError("nobody waits for these lines any more")


def as_long_as_wanted(lines: Iterable[tuple[int, str]], is_wanted: Callable[[], bool]) -> Iterator[tuple[int, str]]:
    """Yield these lines. Raise `LeftError` as soon as nobody waits for them."""
    for number, line in enumerate(lines):
        if number % LOOK_LINES == 0:
            refuse_if_left(is_wanted)
        yield line


def in_order_of_time(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return lines of several nodes in the order of the times that they begin with; one without a time stays behind the
    line before it of its node. Pure."""
    last: dict[int, str] = {}
    keyed = []
    for node, line in lines:
        last[node] = time_in(line) or last.get(node, "")
        keyed.append((last[node], node, line))
    keyed.sort(key=lambda item: item[0])
    return [(node, line) for _, node, line in keyed]


def parse_cursor(text: str) -> dict[int, int]:
    """Return node → bytes that were read, from what `write_cursor` wrote; what is not of that form is left out."""
    pairs = re.findall(r"(\d{1,9}):(\d{1,15})(?:,|$)", text[:100_000])
    return {int(node): int(offset) for node, offset in pairs}


def write_cursor(offsets: Mapping[int, int]) -> str:
    """Return the bytes that were read of each node's log, as a page gives them back."""
    return ",".join(f"{node}:{offset}" for node, offset in offsets.items())


def _read(path: Path, since: int | None, most: int) -> tuple[list[str], int, bool]:
    """Return the whole lines of a log from ``since`` on, of ``most`` bytes at its end; where they end; and whether
    earlier ones were left out."""
    with open_log(path) as file:
        size = file.seek(0, os.SEEK_END)
        if since is not None and since > size:  # it was written anew
            since = None
        begin = max(since or 0, size - most)
        file.seek(begin)
        data = file.read(most)
    end = data.rfind(b"\n") + 1
    if not end and (size - begin >= most or since is None):
        end = len(data)
    is_cut = begin > (since or 0)
    first = data.find(b"\n") + 1 if is_cut and since is None else 0  # the rest of a line that began earlier
    return readable(data[first:end]).splitlines() if end > first else [], begin + end, is_cut


def _chosen(
    lines: list[tuple[int, str]], text: str, is_wanted: Callable[[], bool]
) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Return the newest of the lines that contain ``text``, made safe, and whether there are more of them."""
    wanted, in_order = text.casefold(), in_order_of_time(as_long_as_wanted(lines, is_wanted))
    found = [
        (node, line) for node, line in as_long_as_wanted(in_order, is_wanted) if not wanted or wanted in line.casefold()
    ]
    # What is struck out cannot be searched for, either: the text must be in what is shown.
    safe = ((node, safe_line(line)) for node, line in as_long_as_wanted(reversed(found), is_wanted))
    kept = list(islice((item for item in safe if not wanted or wanted in item[1].casefold()), MOST_LINES))
    return tuple(reversed(kept)), len(found) > MOST_LINES


def safe_line(line: str) -> str:
    """Return a line of a log as it may be shown: without secrets, with every character visible, of bounded length."""
    return visible(redact(line[:MOST_CHARACTERS])) + ("…" if len(line) > MOST_CHARACTERS else "")
