"""Faults injected through the environment: tests break the real trainer at an exact point of a step.

DTRAIN_FAULTS is a JSON list of ``{"kind", "at", "step", "node"}``: when the process of that node reaches that point of
that step (0-based, the one being done), the fault happens, once, in the node's first incarnation only. With
``"every": true`` it happens each time, such as a sleep in every step of a slow node. A sleep with ``"until"`` ends
before its ``"seconds"`` once there is a file of that path.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from trainer.errors import ConfigError
from trainer.runtime.launch import Launch

Kind = Literal["kill", "stop", "oom", "gpu_oom", "raise", "sigterm", "sleep"]
Point = Literal[
    "input",
    "forward",
    "backward",
    "all_reduce",
    "optimizer",
    "report",
    "evaluate",
    "save",
    "regroup",
    "formed",
    "finish",
    "alone",
]
"""``alone``: rank 0, once the others may leave at the end (`trainer.engine.finalize`)."""


class InjectedError(RuntimeError):
    """The error that the fault ``raise`` raises."""


class Faults:
    """The faults of one process. Without any, `reach` costs next to nothing."""

    def __init__(self, environment: Mapping[str, str], node: int) -> None:
        listed = json.loads(environment.get("DTRAIN_FAULTS") or "[]")
        first_incarnation = Launch.read(environment).incarnation == 1
        for fault in listed:
            if fault.get("kind") not in get_args(Kind) or fault.get("at") not in get_args(Point):
                raise ConfigError(f"DTRAIN_FAULTS holds {fault!r}; kinds: {get_args(Kind)}, points: {get_args(Point)}")
        self._pending: list[dict[str, Any]] = [item for item in listed if item["node"] == node and first_incarnation]
        self._lock = threading.Lock()

    def reach(self, at: Point, step: int) -> None:
        """Carry out the fault that is due at this point of this step, if there is one."""
        if not self._pending:
            return
        with self._lock:  # `save` and `all_reduce` are reached on threads of their own
            due = next((item for item in self._pending if item["at"] == at and item.get("step", step) == step), None)
            if due is not None and not due.get("every"):
                self._pending.remove(due)
        if due is not None:  # the next one of the same place happens when the step is done again
            self._happen(due)

    def _happen(self, fault: dict[str, Any]) -> None:
        kind = fault["kind"]
        if kind == "kill":
            os.killpg(0, signal.SIGKILL)
        elif kind == "stop":
            if "seconds" in fault:  # this process cannot resume itself
                alarm = f"sleep {float(fault['seconds'])}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", alarm], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "sleep":
            end = time.monotonic() + float(fault.get("seconds", 1.0))
            while (left := end - time.monotonic()) > 0 and not os.path.exists(fault.get("until", "")):
                time.sleep(min(left, 0.05) if "until" in fault else left)
        elif kind == "oom":
            raise torch.OutOfMemoryError("out of memory, injected")
        elif kind == "gpu_oom":
            raise torch.OutOfMemoryError("CUDA out of memory, injected")
        else:
            raise InjectedError("injected")
