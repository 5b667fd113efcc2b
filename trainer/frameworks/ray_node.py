"""One node of a job's own Ray: ``ray start --block`` as a process, until the job ends it with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import psutil

from trainer.runtime.parent_death import die_with

START_SECONDS = 120.0
END_SECONDS = 6.0
"""The seconds that a Ray has to end in order; a cluster allows a few more between SIGTERM and SIGKILL."""
ATTEMPTS = 3
TOO_BUSY = "timed out during startup"
"""What it says where its parts were not up within half a minute, for which there is no setting."""
STARTED = "Ray runtime started"
KEPT_LINES = 40


class RayNode:
    """A node of Ray, as a context manager; when it is left nothing of it runs."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self._options, self._environment = list(options), dict(environment)
        self._spawn()

    def _spawn(self) -> None:
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._heard = threading.Event()
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *self._options],
            env={**self._environment, "PYTHONUNBUFFERED": "1", "RAY_DISABLE_IMPORT_WARNING": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process, self._heard), name="ray", daemon=True).start()

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def wait_until_ready(self) -> str:
        """Wait until it has started, where the machine was too busy at the second or third try; return why it has not,
        "" where it has."""
        for attempt in range(1, ATTEMPTS + 1):
            if self._heard.wait(START_SECONDS) and self._is_ready:
                return ""
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # it has closed its output, and has ended, or is about to
            if attempt == ATTEMPTS or not any(TOO_BUSY in line for line in self._said):
                break
            self.end()
            self._spawn()
        return self._explain()

    def explain_end(self) -> str:
        """Return why it runs no more, as far as it has said so; "" while it does."""
        return "" if self._process.poll() is None else self._explain()

    def _explain(self) -> str:
        code = self._process.poll()
        how = f"`ray start` ended with exit code {code}" if code is not None else "`ray start` did not come up in time"
        return f"{how}: {' | '.join(line for line in self._said if line.strip())[-800:]}"

    def end(self, seconds: float = END_SECONDS) -> None:
        """End the node and all that it started: with SIGTERM, then, after these seconds, by force."""
        started = self._started()
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._process.poll() is None or any(map(_runs, started))):
            time.sleep(0.05)
        for process in started | self._started():
            if _runs(process):
                try:
                    process.send_signal(signal.SIGKILL)  # psutil: of no process that has its number by now
                except psutil.Error:
                    continue
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _started(self) -> set[psutil.Process]:
        try:
            return set(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.Error:
            return set()

    def _read(self, process: subprocess.Popen[str], heard: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:  # to the end: a full pipe would stop it
            self._said.append(line.rstrip())
            if STARTED in line:
                self._is_ready = True
                heard.set()
        heard.set()  # it has ended


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
