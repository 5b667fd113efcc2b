"""The lines printed on a job's nodes since the last look, from files of this machine or from the cluster."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager
from trainer.documents.reader import LOG_BYTES
from trainer.node.line_log import logs_of, open_log, readable
from trainer.rundir import LOGS, RunDir

PIECE_BYTES = 4 << 20
"""Bytes of a log that are read at once."""
_NODE = re.compile(r"=== node-(\d+)\.log ===")
_PART = re.compile(r"--- (launch \d+, .*|rank \d+) ---")
"""The line that begins the output of a launch or a rank (`clusters.azure_ml.jobs`): each part grows at its own
end."""
_STAMP = re.compile(r"(?:\[|--- launch \d+, )?(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")

Part = tuple[int, str, str]
"""A node, and the lines that name the launch and the rank, where there are such."""


@dataclass(slots=True)
class FileFollower:
    """A reader of logs that grow in a folder of this machine, which returns each line once."""

    folder: Path
    offsets: dict[int, int] = field(default_factory=dict)
    """Node → bytes that were read of its log."""
    most_bytes: int = LOG_BYTES
    """Bytes at the end of a log that are read at most: a reader that is behind leaves out what is before."""
    has_left_out: bool = False
    poll_seconds: float = 0.1

    def skip_to_end(self, keep_lines: int = 0, node_id: int | None = None) -> None:
        """Leave out the present lines, except the last ``keep_lines`` of each log."""
        for node, path in logs_of(self.folder, node_id).items():
            with open_log(path) as file:
                end = file.seek(0, os.SEEK_END)
                begin = file.seek(max(0, end - self.most_bytes))
                data = file.read(self.most_bytes) if keep_lines else b""
            lines = data.splitlines(keepends=True)
            whole = lines[1:] if begin and len(lines) > 1 else lines
            self.offsets[node] = end - (sum(map(len, whole[-keep_lines:])) if keep_lines else 0)
            self.has_left_out |= self.offsets[node] > 0

    def read(self, node_id: int | None = None, to_the_end: bool = False) -> Iterator[tuple[int, str]]:
        """Yield (node, line) of each line finished since the last call; ``to_the_end``: the unfinished one, too."""
        for node, path in logs_of(self.folder, node_id).items():
            is_more = True
            while is_more:
                with open_log(path) as file:
                    size, since = file.seek(0, os.SEEK_END), self.offsets.get(node, 0)
                    since = since if since <= size else 0  # it was written anew
                    begin = file.seek(max(since, size - self.most_bytes))
                    data = file.read(PIECE_BYTES)
                self.has_left_out |= begin > since
                is_more = len(data) == PIECE_BYTES
                end = data.rfind(b"\n") + 1
                if (to_the_end and not is_more) or (is_more and not end):
                    end = len(data)
                self.offsets[node] = begin + end
                for line in readable(data[:end]).splitlines():
                    yield node, line


class LogPoller:
    """The same, of logs that only the cluster can read; ``ask`` as `GPUClusterManager.job_logs` for all nodes."""

    def __init__(self, ask: Callable[[], str], poll_seconds: float) -> None:
        self.ask, self.poll_seconds = ask, poll_seconds
        self._last: dict[Part, list[str]] = {}
        self._given: dict[Part, list[str]] = {}

    def skip_to_end(self, keep_lines: int = 0) -> None:
        self._last = by_part(self.ask())
        kept: Counter[int] = Counter()
        for part, lines in reversed(self._last.items()):
            left_out = max(0, len(lines) - (keep_lines - kept[part[0]]))
            self._given[part] = lines[:left_out]
            kept[part[0]] += len(lines) - left_out

    def read(self, node_id: int | None = None, to_the_end: bool = False) -> Iterator[tuple[int, str]]:
        try:
            found = by_part(self.ask())
        except ClusterError:
            if to_the_end:
                raise
            return  # asked again at the next look
        before, self._last = self._last, found
        for part, lines in found.items():
            # Whether a line is finished is not said: the last one is, where two looks find it the same.
            finished = lines if to_the_end or lines == before.get(part) else lines[:-1]
            new = new_lines(self._given.get(part, []), finished)
            if new and node_id in (None, part[0]):
                self._given[part] = finished
                yield from ((part[0], line) for line in new)


LogFollower: TypeAlias = FileFollower | LogPoller


def follow_logs(manager: GPUClusterManager, rundir: RunDir, shares_home: bool) -> LogFollower:
    """Return a follower of a job's logs: of its files, where nodes write them to this home, else of what the cluster
    says."""
    if shares_home:
        return FileFollower(rundir.storage.local_path(LOGS))
    job_id = rundir.uri.rstrip("/").rpartition("/")[2]
    return LogPoller(lambda: manager.job_logs(job_id), manager.poll_seconds)


def by_part(text: str) -> dict[Part, list[str]]:
    """Return part → its lines, from what `GPUClusterManager.job_logs` returns for all nodes. Pure."""
    found: dict[Part, list[str]] = {}
    lines: list[str] = []
    node, launch, rank = 0, "", ""
    for line in text.splitlines():
        if match := _NODE.fullmatch(line):
            node, launch, rank = int(match[1]), "", ""
            lines = found.setdefault((node, launch, rank), [])
            continue
        if match := _PART.fullmatch(line):
            launch, rank = (launch, line) if match[1].startswith("rank") else (line, "")
            lines = found.setdefault((node, launch, rank), [])
        lines.append(line)
    return found


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """Return the lines that came since, of a rewritten log those from the first difference on. Pure."""
    alike = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        alike += 1
    return after[alike:]


def time_in(line: str) -> str | None:
    """Return the time that a line begins with, as ``2026-11-26 14:25:01.250000``; None where there is none. Pure."""
    if not (match := _STAMP.match(line)):
        return None
    return f"{match[1]}-{match[2]}-{match[3]} {match[4]}.{match[5] or '':0<6}"
