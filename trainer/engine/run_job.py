"""`run_job`: a whole training in this process, from its configuration to its exit code, and how the process is left.

Which exception ends a job with which code belongs here; the document that says so is `trainer.engine.result`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from dataclasses import replace
from typing import Any

import torch

from trainer.comm.group import GroupError, has_abandoned_groups
from trainer.config import ConfigError, JobConfig
from trainer.data.manifest import DatasetError
from trainer.engine.interruptions import BudgetSpent, GPUTooSmall, JobOver, OutOfMemoryError, Stopped
from trainer.engine.problem import ProblemMaker
from trainer.engine.reports import Watch
from trainer.engine.result import write_result
from trainer.engine.steps import NonFiniteError, Steps, carry_out
from trainer.engine.trainer import DistributedTrainer
from trainer.errors import DamagedError, NoGenerationError, WorkerHungError
from trainer.exit_codes import BUDGET, DONE, EVICTED, FAILED, LOST, UNUSABLE
from trainer.runtime.launch import Launch
from trainer.secrets.redaction import redact
from trainer.storage.base import StorageError

INTERRUPTED = "KeyboardInterrupt: the training was interrupted"
"""The error of a training that a person has interrupted."""


def run_job(job: JobConfig) -> int:
    """Train the job that its configuration describes as `train_job` does, and return the exit code."""
    return carry_out(train_job(job))[0]


def train_job(
    job: JobConfig, maker: ProblemMaker | None = None, watch: Watch | None = None, failure: Exception | None = None
) -> Steps[tuple[int, dict[str, Any]]]:
    """Yield the steps of a job in this process, write how it ended to ``result.json``, and return the exit code and
    this rank's result. ``maker`` makes what is trained; None: what the job's configuration describes. ``watch`` is
    called with each event that this process reports. ``failure``: what has failed already; the job then ends with that.
    Where its GPU has too little memory and the job leaves the choice of the device open, it goes on on the CPU from the
    latest checkpoint or with the state of its peers."""
    trainer = DistributedTrainer(job, maker, watch)
    try:
        code, result = yield from _run(trainer, failure)
    except GPUTooSmall as moved:
        print(moved, file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
        fields = {"samples": job.training.batch_size_per_gpu, "activation_checkpointing": False, "device": "cpu"}
        trainer.reports.emit("out_of_memory", step=trainer.steps_done, **fields)
        trainer.close(tracking_seconds=5.0)
        second = replace(Launch.read(os.environ), incarnation=2)  # faults are injected into the first only
        os.environ.update(second.variables())
        moved_job = replace(job, training=replace(job.training, backend="gloo"))
        return (yield from train_job(moved_job, maker, watch))
    if "error" in result:
        result["error"] = redact(result["error"])  # a client's error may contain the address that it was given
        if (facts := trainer.facts) is not None:
            result |= {"node_id": facts.node_rank, "local_rank": facts.local_rank}
    launch = trainer.launch
    if code != DONE:
        if "error" in result:
            trainer.reports.emit("error", message=result["error"], fatal=code != LOST)
        trainer.reports.emit("end", status=result["status"])
    if "error" in result:
        print(result["error"], file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
        if code != LOST or launch is None:
            # Before the group is left: that makes peers fail too, later, and the first failure is the cause.
            write_result(trainer.rundir, result, launch)
    elif result.pop("everybody", False) and trainer.participant.world.rank == 0:
        write_result(trainer.rundir, result, launch)
    if code == DONE:
        trainer.participant.budget.close()  # first: however long the rest takes, this job is done
    trainer.close(tracking_seconds=60.0 if code == DONE else 5.0)
    return code, result


def _run(trainer: DistributedTrainer, failure: Exception | None) -> Steps[tuple[int, dict[str, Any]]]:
    """Return (exit code, result); raise `GPUTooSmall` alone. ``everybody`` in it says that all ranks have
    ended together, so that the job has ended."""
    try:
        trainer.initialize_distributed()
        if failure is not None:
            raise failure
        trainer.setup()
        return DONE, (yield from trainer.steps())
    except Stopped as stopped:
        return EVICTED, {"status": "stopped", "steps": trainer.steps_done, "everybody": stopped.everybody}
    except BudgetSpent:
        where = f"at step {trainer.steps_done}"
        return BUDGET, {
            "status": "budget",
            "steps": trainer.steps_done,
            "error": trainer.participant.budget.explain(where),
        }
    except JobOver as over:
        codes, status = {"succeeded": DONE, "stopped": EVICTED, "budget": BUDGET}, over.result["status"]
        if status == "failed":
            where = f" on node {over.result['node_id']}" if "node_id" in over.result else ""
            said = over.result.get("error", "it failed")
            print(f"another process of this job{where} has ended it: {said}", file=sys.stderr, flush=True)  # noqa: T201
        return codes.get(status, FAILED), {"status": status}
    except (ConfigError, DamagedError, DatasetError) as error:
        return UNUSABLE, {"status": "failed", "error": str(error)}
    except (GroupError, NoGenerationError, StorageError) as error:
        if (mistake := getattr(error, "mistake", None)) is not None:
            return FAILED, {"status": "failed", "error": f"{type(mistake).__name__}: {mistake}"}
        return LOST, {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    except GPUTooSmall:
        raise
    except OutOfMemoryError as error:
        return FAILED, {"status": "failed", "error": str(error), **({"memory": error.facts} if error.facts else {})}
    except NonFiniteError as error:
        return FAILED, {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    except KeyboardInterrupt:
        return FAILED, {"status": "failed", "error": INTERRUPTED}
    except Exception as error:
        traceback.print_exc()
        code = LOST if _may_go_better(error) else FAILED
        return code, {"status": "failed", "error": f"{type(error).__name__}: {error}"}


def _may_go_better(error: Exception) -> bool:
    """Return whether the error is one of this machine, which need not come again: its device is gone, or a process that
    loads data was killed, as for its memory, which counts as a loss for any process that is."""
    if isinstance(error, (WorkerHungError, getattr(torch, "AcceleratorError", WorkerHungError))):
        return True
    if "CUDA error" in str(error):
        return True
    said = (str(error), str(error.__cause__ or ""))
    return said[0].startswith("DataLoader worker (pid") and any("killed by signal: Killed" in text for text in said)


def leave_process(code: int) -> int:
    """Return the exit code, or end the process here: where a group was abandoned, whose threads may hang for long;
    where a thread in the background still works, such as that of a checkpoint; or where the budget is spent.

    Such a thread may be inside native code, which does not survive the interpreter's end: the process would abort,
    whatever its exit code was to be.
    """
    if has_abandoned_groups() or any(thread.daemon for thread in threading.enumerate()) or code == BUDGET:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code
