"""What a worker of Ray Train and a trial of Ray Tune do for a training: they become ranks of ours, and tell Ray of each
evaluation.

The place of this process in Ray, and its end by Ray, belong here. Starting workers is `trainer.adapters.ray_trainer`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.comm.launch_secret import SECRET_BYTES, SECRET_FILE
from trainer.comm.launcher_env import RankFacts, rank_variables
from trainer.comm.own_address import LOOPBACK, hold_ports
from trainer.config import ConfigError
from trainer.engine.interruptions import Stopped
from trainer.engine.reports import Watch
from trainer.engine.result import write_result
from trainer.exit_codes import DONE, EVICTED, LOST, UNUSABLE
from trainer.fit import FitResult, Trainer, TrainingFailedError
from trainer.observability.progress_line import ProgressLine
from trainer.rundir import RunDir

Report = Callable[[dict[str, Any]], object]
"""Tells Ray of figures, by name."""


def find_worker_place() -> RankFacts | None:
    """Return the place of this process among the workers of Ray Train; None where it is no such worker."""
    if "ray.train" not in sys.modules:
        return None
    import ray.train

    try:
        context = ray.train.get_context()
    except (RuntimeError, DeprecationWarning):  # of a driver, and of a trial of Ray Tune
        return None
    return RankFacts(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        node_rank=context.get_node_rank(),
    )


def find_trial_folder() -> str | None:
    """Return the folder of the trial of Ray Tune that this process runs; None where it runs none."""
    if "ray.tune" not in sys.modules:
        return None
    import ray.tune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns of this question where there is no trial
        context = ray.tune.get_context()
        return context.get_trial_dir() if context.get_trial_id() else None


class Reporter:
    """A reporter of each evaluation to Ray, in all ranks equally often: to Ray Train it is a barrier."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._step: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take an event; report when an evaluation has ended. Only rank 0 has figures, the others report none. Raise
        `Stopped` where Ray ends this process's training."""
        if kind == "step":
            self._step = {name: fields[name] for name in ("step", "epoch", "loss", "learning_rate")}
        elif kind == "evaluation":
            self._evaluation = {"valid_loss": fields["loss"], **(fields["metrics"] or {}), "step": fields["step"]}
        elif kind == "phase" and fields["name"] == "evaluation":
            try:
                self._report({**self._step, **self._evaluation})
            except SystemExit:  # how Ray Tune ends a trial, inside of its report
                raise Stopped(everybody=True) from None


class TrainerInRay(Trainer):
    """A trainer in a process that Ray has started, and ends."""

    report: Report

    def _watch(self, line: ProgressLine) -> Watch:
        return Reporter(self.report).take

    def _result(self, rundir: RunDir, code: int, result: dict[str, Any]) -> FitResult:
        if code == EVICTED:
            sys.exit(0)  # this thread ends, as Ray asked; the process is Ray's
        return super()._result(rundir, code, result)


@contextlib.contextmanager
def be_rank(place: RankFacts) -> Iterator[None]:
    """Give this worker the variables of a rank while the block runs. Rank 0 chooses address, port and a new secret,
    which Ray hands to all. A collective."""
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    offer = None
    if place.rank == 0:
        is_one_host = place.local_world_size == place.world_size
        host = LOOPBACK if is_one_host else get_node_ip_address()
        with hold_ports(host) as [port]:
            offer = {"address": host, "port": port, "secret": secrets.token_hex(SECRET_BYTES)}
    offer = broadcast_from_rank_zero(offer)
    assert offer is not None
    with tempfile.TemporaryDirectory(prefix="dtrain-ray-") as folder:  # this user's alone
        path = Path(folder) / "secret"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(offer["secret"])
        place = replace(place, master_addr=offer["address"], master_port=offer["port"])
        before = dict(os.environ)
        os.environ.update(rank_variables(place), **{SECRET_FILE: str(path)})
        try:
            yield
        finally:
            for name in (*rank_variables(place), SECRET_FILE):
                os.environ.pop(name)
                if name in before:
                    os.environ[name] = before[name]


def work(order: dict[str, Any]) -> int:
    """Train as a worker of a group that `RayTrainer` has started, and return the exit code. ``order``: the
    parts of the training by name, as references to Ray's store; the run directory, and the name of the script.

    What would only happen again (settings that cannot be used, a loss that is not finite) is written to the run
    directory, and is no error for Ray, which would start the group again. Raise `TrainingFailedError` for the rest.
    """
    import ray
    import ray.train

    place = find_worker_place()
    assert place is not None
    sys.argv[0] = order["script"]  # by which the job names its data
    parts = {name: ray.get(reference) for name, reference in order["parts"].items()}
    given = [parts.pop(split, None) for split in ("train", "valid", "test")]
    with be_rank(place):
        try:
            trainer = TrainerInRay(run_dir=order["run_dir"], progress=False, **parts)
            trainer.report = ray.train.report
            trainer.fit(*given)
        except ConfigError as error:
            write_result(RunDir(order["run_dir"]), {"status": "failed", "error": str(error)}, None)
            return UNUSABLE
        except TrainingFailedError as error:
            if error.code == LOST:
                raise
            return error.code
    return DONE
