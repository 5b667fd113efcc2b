"""One log file for the processes of a node, in which every line is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.documents.reader import LOG_BYTES
from trainer.storage.regular_files import open_regular

_NODE_LOG = re.compile(r"node-(\d{1,9})\.log")
LINE_BYTES = 1 << 14
"""Bytes of one line that are shown."""
PIPE_BYTES = 1 << 20
"""Bytes that a process can print between two looks without having to wait."""
PATIENCE_SECONDS = 0.5
"""Seconds that an unfinished line waits for its end; after that it is a prompt or a progress bar."""


@dataclass(slots=True)
class _Source:
    waiting: bytes = b""
    since: float = 0.0
    """When ``waiting`` began; without meaning while ``waiting`` is empty."""


class LineLog:
    """A log that passes the output of several processes on to a file, line by line.

    Processes that share a file mix their lines: unbuffered Python writes a ``print`` of five words in ten pieces. Here
    each process has its own pipe. A full disk costs lines, but no process notices.
    """

    def __init__(self, path: Path, header: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._file.write(header.encode() + b"\n")
        self._sources: dict[int, _Source] = {}

    def open_pipe(self) -> int:
        """Return a descriptor for a process to write to; the caller closes its own copy once the process has it."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # a limit of the machine; it only buffers less then
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._sources[read] = _Source()
        return write

    def pump(self, last: bool = False) -> None:
        """Write the input since the last call, up to the last whole line of each process; if ``last``, all of it."""
        now = time.monotonic()
        for descriptor, source in list(self._sources.items()):
            data, ended = _read(descriptor)
            text = source.waiting + data
            end = text.rfind(b"\n") + 1
            if end or not source.waiting:
                source.since = now
            if ended or last or now - source.since > PATIENCE_SECONDS:
                end = len(text)
            source.waiting = text[end:]
            if end:
                with contextlib.suppress(OSError):
                    self._file.write(text[:end])
            if ended or last:
                os.close(descriptor)
                del self._sources[descriptor]

    def close(self) -> None:
        """Write the rest and close all pipes and the file."""
        self.pump(last=True)
        self._file.close()


def _read(descriptor: int) -> tuple[bytes, bool]:
    """Return the bytes that are there now and whether every writer has gone. At most one pipe's capacity is taken at a
    time: a process that prints without end waits for the log and does not hold its reader here."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while len(data) < PIPE_BYTES:
            part = os.read(descriptor, PIPE_BYTES)
            if not part:
                return data, True
            data += part
    return data, False


def last_lines(path: Path, lines: int) -> str:
    """Return the last lines of a log, read from its end; "" if there is none."""
    block, data = 8192, b""
    try:
        with open_log(path) as file:
            position = file.seek(0, os.SEEK_END)
            while position > 0 and data.count(b"\n") <= lines and len(data) < LOG_BYTES:
                step = min(block, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
                block *= 2
    except FileNotFoundError:
        return ""
    return "\n".join(readable(data).splitlines()[-lines:]) if lines > 0 else ""


def readable(data: bytes) -> str:
    """Return a log as text, with lines of bounded length: some programs print everything on one line. A carriage return
    also ends a line: progress bars overwrite themselves with it, and a terminal must not obey it."""
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    if max(map(len, lines)) > LINE_BYTES:
        lines = [
            line if len(line) <= LINE_BYTES else line[:LINE_BYTES] + b" ... %d bytes more" % (len(line) - LINE_BYTES)
            for line in lines
        ]
    return b"\n".join(lines).decode(errors="replace")


def open_log(path: Path) -> IO[bytes]:
    """Return an open log of a folder in a run directory. Raise FileNotFoundError where there is none, `DamagedError`
    where it is no file, or where the folder leads elsewhere."""
    return open_regular(str(path.parent.parent), f"{path.parent.name}/{path.name}")


def text_of(path: Path) -> str:
    """Return the whole text of a log, of a very long one its end. Raise FileNotFoundError where there is none,
    `DamagedError` where it is no file."""
    with open_log(path) as file:
        left_out = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(left_out)
        text = readable(file.read(LOG_BYTES))
    return f"… the first {left_out:,} bytes are left out …\n{text}" if left_out else text


def logs_of(folder: Path, node_id: int | None = None) -> dict[int, Path]:
    """Return node → its log, in order of nodes. Other files of the folder are left out."""
    found = {int(match[1]): path for path in folder.glob("node-*.log") if (match := _NODE_LOG.fullmatch(path.name))}
    return {node: found[node] for node in sorted(found) if node_id in (None, node)}
