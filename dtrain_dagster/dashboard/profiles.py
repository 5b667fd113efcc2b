"""The traces of a job: their list, and each as a picture for the page (`dashboard.flame`) or as the file itself."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from dtrain_dagster.dashboard.flame import pictures_of
from trainer.rundir import PROFILE, RunDir
from trainer.storage.regular_files import open_regular

MOST_TRACES = 100
"""The most traces that are listed: the newest."""
TRACE_BYTES = 128 << 20
"""The largest trace that is drawn; a larger one is opened in Perfetto."""
PIECE_BYTES = 256 << 10
KEPT = 8
"""The pictures that are kept; a trace is written once and never changed."""
_TRACE = re.compile(r"trace-r(\d{1,9})-s(\d{1,15})\.json")


class TraceError(ValueError):
    """A trace cannot be drawn. The message says why, and what to do instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFile:
    """A trace of one rank's steps."""

    name: str
    rank: int
    step: int
    """The step with which it ends."""


def list_traces(rundir: RunDir) -> list[TraceFile]:
    """Return the traces of a job, the newest steps first."""
    found = [
        TraceFile(name=name, rank=int(match[1]), step=int(match[2]))
        for name in rundir.storage.list(PROFILE)
        if (match := _TRACE.fullmatch(name))
    ]
    return sorted(found, key=lambda item: (-item.step, item.rank))[:MOST_TRACES]


def read_trace(rundir: RunDir, name: str) -> bytes:
    """Return a trace as it was written. Raise FileNotFoundError where there is none of that name, `DamagedError` for
    one that is too large or no file."""
    if not _TRACE.fullmatch(name):
        raise FileNotFoundError(name)
    return rundir.storage.read_bounded(f"{PROFILE}/{name}", TRACE_BYTES)


def trace_pieces(rundir: RunDir, name: str) -> Iterator[bytes]:
    """Return a trace as it was written, in pieces; on remote storage it is read first. Raise as `read_trace`."""
    if not _TRACE.fullmatch(name):
        raise FileNotFoundError(name)
    if not rundir.storage.is_local:
        return iter([read_trace(rundir, name)])
    file = open_regular(str(rundir.storage.local_path()), f"{PROFILE}/{name}")
    return _pieces(file)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class TracePictures:
    """Pictures of traces, each made once for all browsers. One is made at a time: it takes much memory."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def picture(self, rundir: RunDir, name: str) -> bytes:
        """Return the pictures of a trace (`pictures_of`) as JSON. Raise as `read_trace`, and `TraceError` for a file
        that is no trace."""
        with self._lock:
            made = self._made.get((rundir.uri, name))
            if made is None:
                data = read_trace(rundir, name)
                try:
                    found = pictures_of(json.loads(data))
                except (ValueError, RecursionError) as error:
                    raise TraceError(f"{name} cannot be drawn: {error}; open the file itself in Perfetto") from None
                made = self._made[rundir.uri, name] = json.dumps(found, allow_nan=False).encode()
                while len(self._made) > KEPT:
                    self._made.popitem(last=False)
        return made
