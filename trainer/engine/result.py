"""``result.json``: how a job ended, written once and read by processes that wait for others.

Which exception ends a training with which code is `trainer.engine.run_job`; the document itself belongs here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from trainer.engine.interruptions import JobOver, Stopped
from trainer.errors import DamagedError
from trainer.rundir import RESULT, TRACKING, RunDir


def raise_if_ended(rundir: RunDir, launch: int, asked_to_stop: bool) -> None:
    """Raise `Stopped` when asked to end, `JobOver` when the job of this launch has ended; called while waiting for
    others."""
    if asked_to_stop:
        raise Stopped(everybody=False)
    result = rundir.read_result()
    if result is not None and result.get("launch") == launch:
        raise JobOver(result)


def forget_stop(rundir: RunDir, launch: int) -> None:
    """Remove the result of a start of this launch whose ranks were all told to end (SIGTERM). Called by a process that
    begins: Azure starts a preempted job again under its own name, so that the launch goes on."""
    result = rundir.read_result()
    if result is not None and result.get("launch") == launch and result["status"] == "stopped":
        rundir.storage.delete(RESULT)


def write_result(rundir: RunDir, result: dict[str, Any], launch: int | None) -> bool:
    """Write ``result.json`` unless a rank of this launch has: the first to fail gives the cause. Return False if it
    cannot be written."""
    tracking: dict[str, Any] = {}
    try:
        with contextlib.suppress(DamagedError):
            tracking = rundir.read_json(TRACKING) or {}
        fields = {**result, "launch": launch, "mlflow_run_id": tracking.get("mlflow_run_id")}
        text = json.dumps(fields, indent=2, allow_nan=False)
        old = rundir.read_result()
        if launch is not None and (old.get("launch") != launch if old else rundir.storage.exists(RESULT)):
            rundir.storage.delete(RESULT)  # of an earlier launch, or not readable
        rundir.storage.create(RESULT, text.encode())
    except FileExistsError:
        pass
    except OSError as error:
        print(f"could not write {rundir.uri}/{RESULT}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return False
    return True
