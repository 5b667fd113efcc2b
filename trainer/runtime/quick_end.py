"""The end of a process that has nothing left to do: at once, without taking all of its objects apart.

An interpreter that has loaded torch takes a second of processor time for that, and the node is paid for meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys


class QuickEnd:
    """Ends the process where the interpreter would begin to take its objects apart: after threads that are waited for,
    and after all exit handlers that were registered later. Make it before anything large is imported."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def set_code(self, code: int) -> None:
        """End with this exit code. Without it, as after an exception, the process ends as any other."""
        self._code = code

    def _end(self) -> None:
        if self._code is None:
            return
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):  # a closed pipe: nobody reads what is left
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self._code)
