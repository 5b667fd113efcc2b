"""How a training ends: `run_job`, the exit code that it chooses, and ``result.json``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.async_writer import still_writing
from trainer.comm.group import GroupError, abandoned
from trainer.config import ConfigError, JobConfig
from trainer.data.shards import DatasetError
from trainer.elastic.membership import NoGenerationError
from trainer.engine.budget import BudgetSpent
from trainer.errors import DamagedError
from trainer.exit_codes import BUDGET, DONE, EVICTED, FAILED, LOST, UNUSABLE
from trainer.observability.reporter import TRACKING
from trainer.rundir import RESULT, RunDir
from trainer.secrets.redaction import redact
from trainer.storage.base import StorageError

if TYPE_CHECKING:
    from trainer.engine.trainer import DistributedTrainer


class Stopped(Exception):
    """This process was asked to end (SIGTERM), alone or with everybody; a checkpoint has been written."""

    def __init__(self, everybody: bool = True) -> None:
        super().__init__("asked to end")
        self.everybody = everybody


class Regroup(Exception):
    """Another generation is wanted, between two steps. The message says why."""


class JobOver(Exception):
    """Another process has ended the job meanwhile, this way."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("error", result["status"]))
        self.result = result


class OutOfMemoryError(RuntimeError):
    """Memory does not suffice for the smallest part of a micro-batch."""


def raise_if_ended(rundir: RunDir, launch: int, asked_to_stop: bool) -> None:
    """Called while waiting for others. `Stopped` when asked to end, `JobOver` when the job of this launch has ended."""
    if asked_to_stop:
        raise Stopped(everybody=False)
    result = rundir.read_result()
    if result is not None and result.get("launch") == launch:
        raise JobOver(result)


def run_job(job: JobConfig) -> int:
    """Train the job in this process; the exit code. How it ended is in ``result.json``."""
    from trainer.engine.trainer import DistributedTrainer

    trainer = DistributedTrainer(job)
    code, result = _run(trainer)
    if "error" in result:
        result["error"] = redact(result["error"])  # a client may repeat the address that it was given
    launch = trainer.elastic.launch if trainer.elastic else None
    if trainer.reporter and code != DONE:
        if "error" in result:
            trainer.reporter.emit("error", message=result["error"], fatal=code != LOST)
        trainer.reporter.emit("end", status=result["status"])
    if "error" in result:
        print(result["error"], file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
        if code != LOST or launch is None:
            # Before the group is left: peers fail of that, later, and what failed first is the cause.
            write_result(trainer.rundir, result, launch)
    elif result.pop("everybody", False) and trainer.world.rank == 0:
        write_result(trainer.rundir, result, launch)
    if code == DONE and trainer.budget:
        trainer.budget.close()  # first: however long the rest takes, this job is done
    trainer.close(tracking_seconds=60.0 if code == DONE else 5.0)
    return code


def _run(trainer: DistributedTrainer) -> tuple[int, dict[str, Any]]:
    """(exit code, result). ``everybody``: all ranks have ended together, so this is how the job ended."""
    import torch

    try:
        trainer.initialize_distributed()
        trainer.setup()
        return DONE, trainer.train()
    except Stopped as stopped:
        return EVICTED, {"status": "stopped", "steps": trainer.progress.step, "everybody": stopped.everybody}
    except BudgetSpent:
        assert trainer.budget is not None
        where = f"at step {trainer.progress.step}"
        return BUDGET, {"status": "budget", "steps": trainer.progress.step, "error": trainer.budget.explain(where)}
    except JobOver as over:
        codes = {"succeeded": DONE, "stopped": EVICTED, "budget": BUDGET}
        return codes.get(over.result["status"], FAILED), {"status": over.result["status"]}
    except (ConfigError, DamagedError, DatasetError) as error:
        return UNUSABLE, {"status": "failed", "error": str(error)}
    except (GroupError, NoGenerationError, StorageError) as error:
        return LOST, {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        device_is_gone = isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)
        return LOST if device_is_gone else FAILED, {"status": "failed", "error": f"{type(error).__name__}: {error}"}


def write_result(rundir: RunDir, result: dict[str, Any], launch: int | None) -> bool:
    """Write ``result.json`` unless a rank of this launch has: the first to fail says why. False if it cannot be
    written."""
    tracking: dict[str, Any] = {}
    try:
        with contextlib.suppress(DamagedError):
            tracking = rundir.read_json(TRACKING) or {}
        fields = {**result, "launch": launch, "mlflow_run_id": tracking.get("mlflow_run_id")}
        text = json.dumps(fields, indent=2, allow_nan=False)
        old = rundir.read_result()
        if launch is not None and (old.get("launch") != launch if old else rundir.storage.exists(RESULT)):
            rundir.storage.delete(RESULT)  # of an earlier launch, or none at all
        rundir.storage.create(RESULT, text.encode())
    except FileExistsError:
        pass
    except OSError as error:
        print(f"could not write {rundir.uri}/{RESULT}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return False
    return True


def end_at_budget(trainer: DistributedTrainer) -> None:
    """End this process where it stands, for the budget is spent to the last; not one that has done all its work."""
    from trainer.elastic.node_presence import last_word

    assert trainer.budget is not None
    launch, step = trainer.launch, trainer.progress.step
    message = trainer.budget.explain(f"at step {step}, before the next checkpoint" if step else "before the first step")
    with contextlib.suppress(OSError, ValueError):
        write_result(trainer.rundir, {"status": "budget", "steps": step, "error": message}, launch)
        result = trainer.rundir.read_result() or {}
        if result.get("status") == "succeeded" and result.get("launch") == launch:
            return
    print(message, file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
    last_word(BUDGET)
    os._exit(BUDGET)


def leave_process(code: int) -> int:
    """The exit code; where a group was left behind, whose threads may hang for long, where a checkpoint is still being
    written, which would make the interpreter crash at its end, or where each second is one too many, the process ends
    here."""
    if abandoned() or still_writing() or code == BUDGET:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code
