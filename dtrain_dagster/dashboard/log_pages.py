"""A job's logs as its page shows them: the last lines, asked for again and again. `dtrain logs` has all of them.

Lines come from files of this machine, read a little at a time, or from the cluster, asked now and then for all browsers
together. Secrets are struck out of every line, and it stays on one line, whatever a program has printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dtrain_dagster.jobs.log_follower import FileFollower, by_part, time_in
from trainer.node.line_log import logs_of
from trainer.printable import visible
from trainer.secrets.redaction import redact

MOST_LINES = 1000
"""The most lines of one answer: the newest."""
MOST_CHARACTERS = 4000
"""The most characters of one line."""
TAIL_BYTES = 512 << 10
"""The most bytes of each log that are read at once."""
MOST_KEPT = 8
"""The most jobs whose logs are kept until a cluster is asked again."""
CLUSTER_SECONDS = 10.0
"""Seconds for which what the cluster has said is shared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPage:
    """An answer to a page that shows logs."""

    lines: tuple[tuple[int, str], ...]
    """Pairs of node and line, in order of time as far as lines tell theirs."""
    nodes: tuple[int, ...]
    """The nodes that have a log."""
    is_cut: bool
    """Whether there are lines before these."""


class LogFiles:
    """The logs that nodes write to this machine."""

    def __init__(self, folder_of: Callable[[str], Path]) -> None:
        """``folder_of`` returns the folder of a job's logs."""
        self._folder_of = folder_of

    def page(self, job_id: str, node: int | None) -> LogPage:
        """Return the last lines of ``node``, or of all. Raise `DamagedError` or OSError where they cannot be read."""
        follower = FileFollower(self._folder_of(job_id), most_bytes=TAIL_BYTES)
        follower.skip_to_end(MOST_LINES, node)
        found = list(follower.read(node))
        return LogPage(
            lines=_newest(found),
            nodes=tuple(logs_of(follower.folder)),
            is_cut=follower.has_left_out or len(found) > MOST_LINES,
        )


class ClusterLogs:
    """The logs that only the cluster can read; ``ask`` as `GPUClusterManager.job_logs`."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._said: dict[str, tuple[float, list[tuple[int, str]]]] = {}
        self._lock = threading.Lock()

    def page(self, job_id: str, node: int | None) -> LogPage:
        """Return the same. Raise `ClusterError` where they cannot be read."""
        with self._lock:
            at, said = self._said.get(job_id, (-1e9, []))
            if time.monotonic() - at > CLUSTER_SECONDS:
                parts = by_part(self._ask(job_id)).items()
                said = [(part[0], line) for part, lines in parts for line in lines]
                self._said[job_id] = (time.monotonic(), said)
                while len(self._said) > MOST_KEPT:
                    del self._said[next(iter(self._said))]
        found = [item for item in said if node in (None, item[0])]
        nodes = tuple(sorted({number for number, _ in said}))
        return LogPage(lines=_newest(found), nodes=nodes, is_cut=len(found) > MOST_LINES)


LogSource: TypeAlias = LogFiles | ClusterLogs


def in_order_of_time(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return lines in order of time; one without a time stays behind the line before it of its node. Pure."""
    last: dict[int, str] = {}
    keyed = []
    for node, line in lines:
        last[node] = time_in(line) or last.get(node, "")
        keyed.append((last[node], node, line))
    keyed.sort(key=lambda item: item[0])
    return [(node, line) for _, node, line in keyed]


def _newest(lines: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return the newest `MOST_LINES` in order of time: without secrets, every character visible, of bounded length."""
    return tuple(
        (node, visible(redact(line[:MOST_CHARACTERS])) + ("…" if len(line) > MOST_CHARACTERS else ""))
        for node, line in in_order_of_time(lines)[-MOST_LINES:]
    )
