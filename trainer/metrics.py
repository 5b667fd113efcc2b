"""What a rank reports and who writes it: threads of their own, fed by queues, so that training never waits.

Every rank writes events; rank 0 writes TensorBoard and MLflow besides (F5, T5). A tracking server that fails is
reported once and left alone: training goes on.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer.azure_token import WORKSPACE, tracking_address
from trainer.config import JobConfig
from trainer.rundir import RunDir, event
from trainer.storage import Storage
from trainer.tracking import artifact_location

METRICS_PER_REQUEST, AZURE_NAMES = 200, 40
"""Azure ML takes 250 values at once, and 50 names of metrics in a run, of which registration needs some."""
TRACKING = "tracking.json"
"""In the run directory: the MLflow run, so that a resumed job goes on in the same one."""
TENSORBOARD = "tensorboard"
UPLOAD_SECONDS = 60.0
FLUSH_SECONDS, REMOTE_FLUSH_SECONDS = 1.0, 5.0
"""How much time the events of one file span; every file on remote storage is paid for."""
URGENT = "hang"
"""Written at once: the timeout that ends this process may be near."""
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Somewhere events go besides the run directory."""

    def write(self, events: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """Takes events from any thread and writes them in the background, in numbered files.

    The sinks have a thread of their own: a slow tracking server delays neither training nor the events.
    """

    def __init__(self, rundir: RunDir, rank: int, generation: int, sinks: list[Callable[[], Sink]]) -> None:
        self.rundir, self.rank, self.generation = rundir, rank, generation
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._numbers: dict[tuple[int, int], int] = {}
        self._tracking: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="reporter", daemon=True)]
        self._threads[0].start()
        self._open(sinks)

    def move(self, rank: int, generation: int, sinks: list[Callable[[], Sink]]) -> None:
        """Report as this rank of this generation from now on, to these sinks besides, unless it has some already."""
        self.rank, self.generation = rank, generation
        self._open(sinks)

    def _open(self, sinks: list[Callable[[], Sink]]) -> None:
        if sinks and len(self._threads) == 1:
            self._threads.append(threading.Thread(target=self._track, args=(sinks,), name="tracking", daemon=True))
            self._threads[1].start()

    def emit(self, kind: str, **fields: Any) -> None:
        """Report an event; returns at once. A number that is not finite is written as null."""
        self._queue.put(event(kind, self.rank, self.generation, **_finite(fields)))

    def close(self, tracking_seconds: float = 60.0) -> None:
        """Write what is left, and wait for the sinks, though no longer than that."""
        self._queue.put(None)
        for thread in self._threads:
            thread.join(tracking_seconds if thread.name == "tracking" else None)
            if thread.is_alive():
                self._failed(f"tracking did not finish within {tracking_seconds:g} s; its last values are lost")
        self._queue.put(None)  # what the sinks had to say at the end
        left, _ = self._next_batch()
        if left:
            self._write(left)

    def _work(self) -> None:
        closing = False
        while not closing:
            batch, closing = self._next_batch()
            if batch:
                self._write(batch)
                if len(self._threads) > 1:
                    self._tracking.put(batch)
        self._tracking.put(None)

    def _next_batch(self) -> tuple[list[dict[str, Any]], bool]:
        """Events of the next second or seconds, and whether they are the last."""
        batch: list[dict[str, Any]] = []
        deadline = time.monotonic() + (FLUSH_SECONDS if self.rundir.storage.is_local else REMOTE_FLUSH_SECONDS)
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=remaining)
            except queue.Empty:
                break
            if item is None:
                return batch, True
            batch.append(item)
            if item["kind"] == URGENT:
                break
        return batch, False

    def _write(self, batch: list[dict[str, Any]]) -> None:
        places = dict.fromkeys((item["generation"], item["rank"]) for item in batch)
        for place in places:
            self._append(place, [item for item in batch if (item["generation"], item["rank"]) == place])

    def _append(self, place: tuple[int, int], events: list[dict[str, Any]]) -> None:
        while True:
            number = self._numbers[place] = self._numbers.get(place, 0) + 1
            try:
                return self.rundir.append_events(*place, number, events)
            except FileExistsError:  # of an earlier start that was given the same generation
                continue
            except (OSError, ValueError, TypeError) as error:
                return _log.error("could not write %d events: %s", len(events), error)

    def _track(self, factories: list[Callable[[], Sink]]) -> None:
        sinks = [sink for factory in factories if (sink := self._try("open", factory))]
        while (batch := self._tracking.get()) is not None:
            for sink in list(sinks):
                if not self._try("write to", functools.partial(_write_to, sink, batch)):
                    sinks.remove(sink)
        for sink in sinks:
            self._try("close", sink.close)

    def _try(self, what: str, action: Callable[[], Any]) -> Any | None:
        try:
            return action()
        except Exception as error:  # whatever a tracking server does must not stop a training
            self._failed(
                f"could not {what} a tracking sink: {type(error).__name__}: {error}; training goes on without it"
            )
            return None

    def _failed(self, message: str) -> None:
        _log.warning(message)
        self.emit("error", message=message, fatal=False)


def _write_to(sink: Sink, batch: list[dict[str, Any]]) -> bool:
    sink.write(batch)
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class StepWindow:
    """This rank's sums over the steps since the last report, and the time they took; pauses do not count."""

    began: float = field(default_factory=time.monotonic)
    steps: int = 0
    loss_sum: float = 0.0
    samples: int = 0

    def add(self, loss_sum: float, samples: int) -> None:
        self.steps += 1
        self.loss_sum += loss_sum
        self.samples += samples


class TensorBoardSink:
    """Loss, validation, learning rate, gradient norm and utilisation as TensorBoard scalars."""

    def __init__(self, storage: Storage) -> None:
        """Files in the folder ``tensorboard`` of a storage. TensorBoard's writer knows local files only: elsewhere they
        are made on this machine and copied as a whole, every `UPLOAD_SECONDS` and at the end."""
        from torch.utils.tensorboard import SummaryWriter

        self._remote = None if storage.is_local else storage
        self._scratch = tempfile.TemporaryDirectory() if self._remote else None
        self._folder = self._scratch.name if self._scratch else str(storage.local_path(TENSORBOARD))
        self._writer = SummaryWriter(self._folder)
        self._step = 0
        self._copied_at = time.monotonic()

    def write(self, events: list[dict[str, Any]]) -> None:
        for step, name, value, at in _scalars(events, self._step):
            self._writer.add_scalar(name, value, step, walltime=at)
            self._step = step
        self._writer.flush()
        if time.monotonic() - self._copied_at > UPLOAD_SECONDS:
            self._copy()

    def close(self) -> None:
        self._writer.close()
        self._copy()
        if self._scratch:
            self._scratch.cleanup()

    def _copy(self) -> None:
        if self._remote is not None:
            for path in Path(self._folder).iterdir():
                self._remote.write(f"{TENSORBOARD}/{path.name}", path.read_bytes())
        self._copied_at = time.monotonic()


class MLflowSink:
    """The same scalars as MLflow metrics, and the configuration as parameters (R6.2)."""

    def __init__(self, job: JobConfig, rundir: RunDir) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # by default a dead server costs four minutes
        from mlflow.tracking import MlflowClient

        assert job.tracking.mlflow_tracking_uri is not None
        self._uri = tracking_address(job.tracking.mlflow_tracking_uri)
        self._client = MlflowClient(tracking_uri=self._uri)
        self._most = AZURE_NAMES if WORKSPACE in self._uri else None
        self._names: set[str] = set()
        self._step = 0
        known = rundir.read_json(TRACKING)
        if known:
            self.run_id = known["mlflow_run_id"]
            self._client.update_run(self.run_id, status="RUNNING")
            return
        self.run_id = self._start(job)
        rundir.write_json(TRACKING, {"mlflow_run_id": self.run_id})

    def _start(self, job: JobConfig) -> str:
        from mlflow.entities import Param

        name = job.tracking.mlflow_experiment
        experiment = self._client.get_experiment_by_name(name)
        location = artifact_location(self._uri)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, location)
        tags = {"job_id": job.job_id, "dataset_id": job.dataset.dataset_id or "", **job.tracking.tags}
        if self._most and os.environ.get("MLFLOW_RUN_ID"):  # the run of the Azure ML job that this process is in
            tags["mlflow.parentRunId"] = os.environ["MLFLOW_RUN_ID"]  # a job's end does not end this run: it may go on
        run = self._client.create_run(experiment_id, tags=tags, run_name=job.tracking.mlflow_run_name or job.job_id)
        values = {"model": job.model.factory, "loss": job.loss.factory, **asdict(job.training)}
        self._client.log_batch(run.info.run_id, params=[Param(key, str(value)) for key, value in values.items()])
        return run.info.run_id

    def write(self, events: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name.replace("/", "."), value, int(at * 1000), step)
            for step, name, value, at in _scalars(events, self._step)
        ]
        if metrics:
            self._step = metrics[-1].step
        metrics = [metric for metric in metrics if self._fits(metric.key)]
        for at in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self.run_id, metrics=metrics[at : at + METRICS_PER_REQUEST])
        for item in events:
            if item["kind"] == "end":
                finished = {"succeeded": "FINISHED", "stopped": "KILLED"}.get(item["status"], "FAILED")
                self._client.set_terminated(self.run_id, status=finished)

    def _fits(self, name: str) -> bool:
        """Whether the server takes one more name; those of nodes beyond it are in the events only."""
        if name not in self._names and (self._most is None or len(self._names) < self._most):
            self._names.add(name)
        return name in self._names

    def close(self) -> None:
        """Nothing is held open."""


def _scalars(events: list[dict[str, Any]], step: int) -> list[tuple[int, str, float, float]]:
    """(step, name, value, Unix seconds) of what is drawn; a sample of a node counts at the last step seen."""
    named = {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "grad_norm": "train/grad_norm",
        "samples_per_second": "train/samples_per_second",
        "step_seconds": "train/step_seconds",
    }
    utilisation = ("cpu_percent", "memory_percent", "gpu_utilization", "gpu_memory_percent")
    rows = []
    for item in events:
        at = item["time"]
        if item["kind"] == "step":
            step = item["step"]
            rows += [(step, name, item[field], at) for field, name in named.items()]
            rows.append((step, "train/epoch", float(item["epoch"]), at))
        elif item["kind"] == "evaluation":
            step = item["step"]
            values = {"loss": item["loss"], **item["metrics"]}
            rows += [(step, f"{item['split']}/{name}", value, at) for name, value in values.items()]
        elif item["kind"] == "node":
            prefix = f"node_{item['node_id']}"
            rows += [(step, f"{prefix}/{name}", item[name], at) for name in utilisation if item.get(name) is not None]
    return [row for row in rows if row[2] is not None]


def sinks_of(job: JobConfig, rundir: RunDir, rank: int) -> list[Callable[[], Sink]]:
    """What rank 0 writes to besides the run directory; nothing on other ranks."""
    factories: list[Callable[[], Sink]] = []
    if rank == 0 and job.tracking.tensorboard:
        factories.append(lambda: TensorBoardSink(rundir.storage))
    if rank == 0 and job.tracking.mlflow_tracking_uri:
        factories.append(lambda: MLflowSink(job, rundir))
    return factories
