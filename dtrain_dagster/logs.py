"""What was printed on a job's nodes since the last look: from files of this machine, or by asking the cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dtrain_dagster.clusters.base import ClusterError

_NODE = re.compile(r"=== node-(\d+)\.log ===")


class LogFollower(Protocol):
    """Gives each line once."""

    poll_seconds: float

    def skip_to_end(self, keep_lines: int = 0) -> None:
        """Leave out what is there already, but for the last lines of each log."""

    def read(self, node_id: int | None = None, to_the_end: bool = False) -> Iterable[tuple[int, str]]:
        """(node, line) of every line finished since; with ``to_the_end`` the unfinished one as well."""


@dataclass(slots=True)
class FileFollower:
    """Of logs that grow in a folder of this machine."""

    folder: Path
    offsets: dict[Path, int] = field(default_factory=dict)
    poll_seconds: float = 0.1

    def skip_to_end(self, keep_lines: int = 0) -> None:
        for path in self._paths(None):
            data = path.read_bytes()
            kept = data.splitlines(keepends=True)[-keep_lines:] if keep_lines else []
            self.offsets[path] = len(data) - sum(map(len, kept))

    def read(self, node_id: int | None = None, to_the_end: bool = False) -> Iterator[tuple[int, str]]:
        for path in self._paths(node_id):
            with open(path, "rb") as file:
                file.seek(self.offsets.get(path, 0))
                data = file.read()
            end = len(data) if to_the_end else data.rfind(b"\n") + 1
            self.offsets[path] = self.offsets.get(path, 0) + end
            for line in data[:end].decode(errors="replace").splitlines():
                yield int(path.stem.removeprefix("node-")), line

    def _paths(self, node_id: int | None) -> list[Path]:
        name = "*" if node_id is None else str(node_id)
        return sorted(self.folder.glob(f"node-{name}.log"), key=lambda path: (len(path.name), path.name))


class LogPoller:
    """Of logs that only the cluster can read. ``ask``: what it tells of all nodes, as `GPUClusterManager.job_logs`."""

    def __init__(self, ask: Callable[[], str], poll_seconds: float) -> None:
        self.ask, self.poll_seconds = ask, poll_seconds
        self._last: dict[int, list[str]] = {}
        self._given: dict[int, list[str]] = {}

    def skip_to_end(self, keep_lines: int = 0) -> None:
        self._last = by_node(self.ask())
        self._given = {node: lines[: max(0, len(lines) - keep_lines)] for node, lines in self._last.items()}

    def read(self, node_id: int | None = None, to_the_end: bool = False) -> Iterator[tuple[int, str]]:
        try:
            found = by_node(self.ask())
        except ClusterError:
            if to_the_end:
                raise
            return  # asked again at the next look
        before, self._last = self._last, found
        for node, lines in found.items():
            # Whether a line is finished is not said: the last one is, where two looks find it the same.
            finished = lines if to_the_end or lines == before.get(node) else lines[:-1]
            new = new_lines(self._given.get(node, []), finished)
            if new and node_id in (None, node):
                self._given[node] = finished
                yield from ((node, line) for line in new)


def by_node(text: str) -> dict[int, list[str]]:
    """Node → its lines, from what `GPUClusterManager.job_logs` gives of all nodes. Pure."""
    found: dict[int, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := _NODE.fullmatch(line):
            lines = found.setdefault(int(match[1]), [])
        else:
            lines.append(line)
    return found


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """What a later look at a log has and the earlier had not; where a log was written anew, from where it differs.
    Pure."""
    alike = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        alike += 1
    return after[alike:]
