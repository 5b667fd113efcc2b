from __future__ import annotations

import json
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import until
from trainer.config import DatasetRef, JobConfig, TrackingConfig
from trainer.observability import reporter as metrics
from trainer.observability.mlflow_sink import KIND_TAG, MLflowSink, is_shown
from trainer.observability.reporter import Reporter, Sink, sinks_of
from trainer.observability.scalars import NODE, Scalars, TensorBoardSink
from trainer.rundir import EVALUATION, TRACKING, RunDir, SeenFiles, event
from trainer.runtime.launch import ORDER, with_order
from trainer.storage.open import open_storage

NOW = 1_700_000_000.0
STEP = {"learning_rate": 0.1, "grad_norm": 2.0, "samples_per_second": 100.0, "step_seconds": 0.5, "eta_seconds": 5.0}


def job(folder: Path, uri: str | None = None) -> JobConfig:
    tracking = TrackingConfig(tensorboard=False, mlflow_tracking_uri=uri, tags={"team": "quant"})
    return JobConfig(job_id="j", run_dir=str(folder), dataset=DatasetRef(uri="/d", dataset_id="abc"), tracking=tracking)


def steps(reporter: Reporter, *numbers: int) -> None:
    for step in numbers:
        reporter.emit("step", step=step, epoch=0, loss=1.0 / step, **STEP)


class Stuck:
    """A tracking server that takes connections and never answers."""

    def __init__(self, released: threading.Event) -> None:
        self.released = released

    def write(self, events: list[dict[str, Any]]) -> None:
        self.released.wait()

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.1)


def test_events_can_be_read_while_training_runs_in_numbered_files(tmp_path: Path) -> None:
    rundir = RunDir(str(tmp_path))
    reporter = Reporter(rundir, 3, 2, [])
    steps(reporter, 1)
    until(lambda: len(list(rundir.events())) == 1)
    steps(reporter, 2, 3)
    until(lambda: len(list(rundir.events())) == 3)
    reporter.emit("end", status="succeeded")
    reporter.close()
    found = list(rundir.events())
    assert [item["kind"] for item in found] == ["step", "step", "step", "end"]
    assert {(item["rank"], item["generation"]) for item in found} == {(3, 2)}
    assert rundir.storage.list("events") == [f"g0002-r00003-{number:06d}.jsonl" for number in (1, 2, 3)]
    assert not [thread for thread in threading.enumerate() if thread.name in ("reporter", "tracking")]


def test_a_long_training_writes_seldom_and_at_once_what_people_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(metrics, "URGENT_SECONDS", 0.02)
    rundir, kept = RunDir(str(tmp_path)), Kept()
    reporter = Reporter(rundir, 0, 1, [lambda: kept])
    steps(reporter, 1)
    until(lambda: len(list(rundir.events())) == 1)
    reporter._began -= 10_000.0  # it has run for hours
    steps(reporter, 2)
    until(lambda: len(kept.events) == 2)  # tracking gets it as ever
    time.sleep(0.1)
    assert len(rundir.storage.list("events")) == 1
    reporter.emit("checkpoint", step=2, path="checkpoints/a")
    until(lambda: len(list(rundir.events())) == 3)
    steps(reporter, 3)
    reporter.write_now(60.0)
    assert len(list(rundir.events())) == 4
    steps(reporter, 4)
    metrics.write_last_events(60.0)
    assert len(list(rundir.events())) == 5
    append, refused = rundir.append_events, [True]

    def full(*what: Any) -> None:
        if refused[0]:
            raise OSError("no space left on device")
        append(*what)

    rundir.append_events = full  # type: ignore[method-assign]
    steps(reporter, 5)
    reporter.write_now(60.0)
    refused[0] = False
    steps(reporter, 6)
    reporter.close()
    assert [item["step"] for item in rundir.events("step")] == [1, 2, 3, 4, 5, 6]
    assert len(rundir.storage.list("events")) == 5, "the two that were left share a file"


def test_nothing_is_lost_at_the_end_and_a_number_taken_is_left_alone(tmp_path: Path) -> None:
    rundir = RunDir(str(tmp_path))
    for _ in range(2):  # the same generation twice
        reporter = Reporter(rundir, 0, 1, [])
        steps(reporter, *range(1, 501))
        reporter.close()
    assert len(list(rundir.events())) == 1000


def test_a_number_that_is_not_finite_costs_no_event(tmp_path: Path) -> None:
    rundir = RunDir(str(tmp_path))
    reporter = Reporter(rundir, 0, 1, [])
    reporter.emit("evaluation", step=1, split="valid", loss=math.nan, metrics={"nll": math.inf, "pinball": 0.5},
                  curve=[1.0, (math.nan, 2)])  # fmt: skip
    steps(reporter, 2)
    reporter.close()
    evaluation, step = rundir.events()
    assert (evaluation["loss"], evaluation["metrics"]) == (None, {"nll": None, "pinball": 0.5})
    assert evaluation["curve"] == [1.0, [None, 2]]
    assert step["step"] == 2


def test_a_sink_that_hangs_delays_neither_events_nor_the_end(tmp_path: Path) -> None:
    rundir, released = RunDir(str(tmp_path)), threading.Event()
    reporter = Reporter(rundir, 0, 1, [lambda: Stuck(released)])
    steps(reporter, 1)
    until(lambda: len(list(rundir.events("step"))) == 1)
    steps(reporter, 2)
    until(lambda: len(list(rundir.events("step"))) == 2)
    reporter.close(tracking_seconds=0.1)
    [error] = rundir.events("error")
    assert "tracking did not finish within 0.1 s" in error["message"]
    assert error["fatal"] is False
    released.set()


def test_sinks_are_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    rundir, released, opened = RunDir(str(tmp_path)), threading.Event(), []

    def open_slowly() -> Kept:
        released.wait()
        opened.append(True)
        return Kept()

    reporter = Reporter(rundir, 0, 1, [open_slowly])
    assert not reporter.wait_until_open(0.05)
    released.set()
    assert reporter.wait_until_open(60.0)
    assert opened
    reporter.close()
    other = Reporter(rundir, 1, 1, [])
    assert other.wait_until_open(0.0), "there are none"
    other.close()


def test_a_dead_tracking_server_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        rundir = RunDir(str(tmp_path))
        reporter = Reporter(rundir, 0, 1, sinks_of(job(tmp_path, uri), rundir, 0))
        for number in (1, 2, 3):
            steps(reporter, number)
        reporter.close()
    [error] = rundir.events("error")
    assert "could not open a tracking sink" in error["message"]
    assert len(list(rundir.events("step"))) == 3


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rundir = RunDir(str(tmp_path))
    sinks: list[Callable[[], Sink]] = [lambda: TensorBoardSink(open_storage(tmp_path))]
    reporter = Reporter(rundir, 0, 1, sinks)
    steps(reporter, 1, 2)
    reporter.emit("evaluation", step=2, split="valid", loss=0.25, metrics={"pinball": 0.5, "nll": math.nan})
    reporter.emit("node", node_id=1, cpu_percent=50.0, memory_percent=10.0, gpu_utilization=None)
    reporter.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = {tag: [(point.step, point.value) for point in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert scalars["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert scalars["valid/loss"] == [(2, 0.25)]
    assert scalars["node_1/cpu_percent"] == [(2, 50.0)]
    assert "valid/nll" not in scalars
    assert {"train/grad_norm", "train/step_seconds", "train/learning_rate", "valid/pinball"} <= set(scalars)


def test_remote_files_of_tensorboard_are_copied_once_and_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    now, written = [0.0], list[tuple[str, int]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: NOW + now[0])  # of which the names of files are made
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write = storage.write
    storage.write = lambda name, data: (written.append((name, len(data))), write(name, data))  # type: ignore
    sink = TensorBoardSink(storage)
    for step in range(1, 1441):
        now[0] += 60.5
        sink.write([event("step", 0, 1, step=step, loss=1 / step)])
    sink.close()
    names = [name for name, _ in written]
    assert len(names) == len(set(names)) < 400, "each is copied once; a day has hundreds"
    assert sum(size for _, size in written) < 1440 * 120 + 400 * 200, "and no byte twice"
    monkeypatch.undo()
    for name in names:
        (tmp_path / Path(name).name).write_bytes(storage.read(name))
    board = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [*range(1, 1441)]


class Kept:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, events: list[dict[str, Any]]) -> None:
        self.events += events

    def close(self) -> None: ...


@pytest.mark.parametrize("why_not", ["remote", "alone", "damaged"])
def test_the_end_is_told_whatever_can_be_seen_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why_not: str
) -> None:
    """To read what they say takes too long at the end on remote storage; of nobody there is nothing to be read."""
    monkeypatch.setattr(metrics, "REMOTE_FLUSH_SECONDS", 0.2)
    kept, remote = Kept(), f"memory://{uuid.uuid4().hex}"
    rundir, other = (RunDir(remote if why_not == "remote" else str(tmp_path)) for _ in range(2))
    follow, looks = rundir.follow, list[SeenFiles]()
    rundir.follow = lambda seen: (looks.append(seen), follow(seen))[1]  # type: ignore[method-assign]
    reporter = Reporter(rundir, 0, 1, [lambda: kept])
    reporter.has_other_nodes = why_not != "alone"
    steps(reporter, 1)
    until(lambda: len(kept.events) == 1)
    other.append_events(1, 1, 1, [{"what": "is this?"}, {"kind": "node", "node_id": 1}])
    reporter.emit("end", status="succeeded")
    reporter.close(5.0)
    assert [item["kind"] for item in kept.events] == ["step", "end"]
    assert len(looks) == (why_not == "damaged")


def test_looks_at_what_others_report_take_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, rundir = list[float](), RunDir(str(tmp_path))

    def slow(seen: set[str]) -> list[dict[str, Any]]:
        looks.append(time.monotonic())
        time.sleep(0.02)
        return []

    monkeypatch.setattr(metrics, "OTHERS_SECONDS", 0.01)
    rundir.follow = slow  # type: ignore[method-assign]
    reporter = Reporter(rundir, 0, 1, [Kept])
    until(lambda: len(looks) == 2)
    reporter.close()
    assert looks[1] - looks[0] >= 50 * 0.02


def test_rank_0_draws_what_other_nodes_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "OTHERS_SECONDS", 0.2)
    kept, rundir = Kept(), RunDir(str(tmp_path))
    other = Reporter(rundir, 1, 1, [])
    other.emit("node", node_id=1, step=0)  # of an earlier start: drawn already
    until(lambda: len(list(rundir.events())) == 1)

    def open_slowly() -> Kept:
        other.emit("node", node_id=1, step=1)
        until(lambda: len(list(rundir.events())) == 2)
        return kept

    reporter = Reporter(rundir, 0, 1, [open_slowly])
    until(lambda: len(kept.events) == 1)
    steps(reporter, 1)
    until(lambda: len(kept.events) == 2)
    other.emit("node", node_id=1, step=2)
    other.close()
    reporter.emit("end", status="succeeded")
    reporter.close()
    assert [(item["kind"], item["rank"]) for item in kept.events] == [
        ("node", 1), ("step", 0), ("node", 1), ("end", 0),
    ]  # fmt: skip
    assert [kept.events[at]["step"] for at in (0, 2)] == [1, 2]


def test_a_run_gets_a_handful_of_curves_however_many_nodes_it_has() -> None:
    sample = dict.fromkeys(NODE, 1.0)
    segments = {name: [0.1] for name in ("input", "forward", "backward", "communication", "waiting", "optimizer")}
    events = [event("node", 0, 1, node_id=number, step=1, **sample) for number in range(20)]
    events.append(event("timing", 0, 1, step=1, steps=1, seconds=1.0, nodes=[0], segments=segments))
    events.append(event("step", 0, 1, step=1, epoch=0, loss=1.0, **STEP))
    scores = {"nll": 1.0, "coverage_90": 0.9, "pinball": 0.1}
    events.append(event("evaluation", 0, 1, step=1, split="valid", loss=1.0, metrics=scores))
    assert {item.name for item in Scalars().of(events) if is_shown(item.name)} == {
        "train/loss", "train/learning_rate", "train/grad_norm", "train/samples_per_second", "communication/share",
        "cluster/gpu_utilization", "valid/loss", "valid/nll",
    }  # fmt: skip


@pytest.mark.slow
def test_a_real_mlflow_has_parameters_metrics_and_the_end_and_goes_on_in_the_same_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri, rundir = f"sqlite:///{tmp_path}/mlflow.db", RunDir(str(tmp_path))
    described = job(tmp_path, uri)
    rundir.write_json(
        EVALUATION,
        {
            "model": {"nll": 0.5},
            "baselines": {"har": {"nll": 0.75, "pinball": 0.1}},
            "gate": {"passed": True, "reasons": []},
        },
    )
    reporter = Reporter(rundir, 0, 1, sinks_of(described, rundir, 0))
    reporter.emit("node", node_id=0, step=0, cpu_percent=50.0)
    steps(reporter, *range(1, 401))  # seven values each: more than a server takes in one request
    reporter.emit("end", status="stopped")
    reporter.close()
    assert not list(rundir.events("error"))
    client = MlflowClient(uri)
    run_id = (rundir.read_json(TRACKING) or {})["mlflow_run_id"]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics["train/loss"]) == ("KILLED", 1 / 400)
    assert len(client.get_metric_history(run_id, "train/loss")) == 400
    assert (run.data.params["model"], run.data.params["epochs"]) == ("tcn", "6")
    assert not [name for name in run.data.metrics if "node_0" in name], "figures of nodes are elsewhere"
    assert "test/nll" not in run.data.metrics, "a training that was stopped has no result"
    [dataset] = run.inputs.dataset_inputs
    assert (dataset.dataset.digest, json.loads(dataset.dataset.source)["uri"]) == ("abc", "/d")
    of_all = client.get_experiment(run.info.experiment_id).tags
    assert of_all[KIND_TAG] == "custom_model_development"
    columns = json.loads(of_all["mlflow.sharedViewState.dtrain"])["selectedColumns"]
    assert {"params.`model`", "metrics.`valid/loss`", "tags.`gate`", "metrics.`cost/total_usd`"} <= set(columns)
    assert {"job_id": "j", "dataset_id": "abc", "team": "quant"}.items() <= run.data.tags.items()
    sink = MLflowSink(described, rundir)
    sink.write([{"kind": "end", "time": time.time(), "status": "succeeded"}])
    assert sink.run_id == run_id
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.metrics["test/nll"], run.data.metrics["test/margin"]) == (0.5, 0.25)
    assert {"gate": "passed", "best_baseline": "har"}.items() <= run.data.tags.items()
    assert client.get_experiment(run.info.experiment_id).artifact_location == str(tmp_path / "mlartifacts")


@pytest.mark.slow
def test_a_run_of_mlflow_is_taken_over_only_from_a_killed_start_of_this_very_job(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mine, others = RunDir(str(tmp_path / "mine")), RunDir(str(tmp_path / "others"))
    first = MLflowSink(job(Path(mine.uri), uri), mine)
    (tmp_path / "mine" / TRACKING).unlink()  # killed before it was written down
    again = MLflowSink(job(Path(mine.uri), uri), mine)
    assert again.run_id == first.run_id
    assert MLflowSink(job(Path(others.uri), uri), others).run_id != first.run_id, "another's job of the same name"
    again.write([{"kind": "step", "time": time.time(), "step": 1, "rank": 0, "generation": 1, "loss": 1.0, **STEP}])
    again.write([{"kind": "end", "time": time.time(), "status": "succeeded"}])
    assert MlflowClient(uri).get_run(again.run_id).data.metrics
    (tmp_path / "mine" / TRACKING).unlink()  # the folder was removed, and the name is used for another training
    assert MLflowSink(job(Path(mine.uri), uri), mine).run_id != first.run_id


def test_only_rank_0_reports_elsewhere_and_a_launch_may_be_kept_out_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, rundir = job(tmp_path, "http://127.0.0.1:1"), RunDir(str(tmp_path))
    both = sinks_of(described, rundir, 0)
    assert sinks_of(described, rundir, 1) == []
    monkeypatch.setenv(ORDER, with_order({}, is_tracked=False)[ORDER])
    assert len(sinks_of(described, rundir, 0)) == len(both) - 1
