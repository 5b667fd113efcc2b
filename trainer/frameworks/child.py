"""A user's program as a child of the starter, where something beside it has to be ended after it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial

from trainer.node.processes import MARK
from trainer.runtime.parent_death import die_with


class Child:
    """A program that this process has started. SIGTERM and Ctrl-C are its business: this process only waits."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, preexec_fn=partial(die_with, os.getpid())
        )
        # The clusters of dtrain send a signal to every process of a job; other launchers to this one alone.
        self._passes_on = MARK not in environment
        self.was_asked = False
        """Whether it was asked to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def poll(self) -> int | None:
        """Return its exit code, None while it runs; of one that a signal has ended, 128 and the signal, as a shell
        does."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self) -> int:
        """Return its exit code once it has ended, as `poll` does."""
        self._process.wait()
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill it: what it needs is gone."""
        self._process.kill()
        self._process.wait()

    def _on_signal(self, number: int, _: object) -> None:
        self.was_asked = True
        if self._passes_on and self._process.poll() is None:
            self._process.send_signal(number)
