"""Estimate trainings of different sizes on the local cluster, then run them: measure how good the estimates are.

Run `python -m benchmarks.estimate`. Model, batch, data, epochs and one to three nodes are made from a seed. Each
training is probed on the cluster as `cost_estimate` does it, and its estimate learns from the trainings before it, as
an instance of Dagster does. Then it is trained as `trained_checkpoint` does it. With ``--beside CORES``, other work
takes that many cores on average, at times none and at times twice as many, for 5 to 30 seconds each.

20 trainings with their probes took 8 minutes on two cores without other work. After ``--budget`` seconds no further one
is begun, and the line has ``partial``.

    median_error_percent      absolute error of the wall time
    coverage_90_percent       trainings that lay within their 90 % interval
    unlearned                 the same two, without learning from the trainings before
    first_epoch_times_epochs  the same for the time of the first epoch times the epochs (no interval: within 10 %)
    beside_cores              see ``--beside``
    rows                      each training: sizes, interval, actual seconds, and both phase by phase
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host import busy_beside, note, options_of, stop_on_signals, tell
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from dtrain_dagster.costs.estimate import Forecast, Interval, LearnedCorrection, Sizes
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
from dtrain_dagster.planning import evidence
from dtrain_dagster.planning.build_plan import pace_mark, sizes_of
from dtrain_dagster.planning.evidence import read_measured
from dtrain_dagster.planning.scoring import Score, learn
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.documents.events import EvaluationEvent, MembershipEvent, read_events
from trainer.rundir import RunDir

SKU = "Standard_NC6s_v3"
MARKETS = ((8, 1000, 20), (24, 1200, 20), (24, 1200, 40))
"""Tickers, days and window of each dataset."""
MODELS = (("tcn", {}, 1500), ("lstm", {}, 700), ("transformer", {}, 700))
"""Factory, arguments, and the number of steps of a training, about; heavier models have fewer."""
NEAR = 0.10
"""Relative error up to which an estimate without an interval counts as right."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training of the benchmark."""

    model: FactoryConfig
    data: int
    """Index of its dataset in `MARKETS`."""
    nodes: int
    batch_size: int
    accumulation: int
    steps: int
    """Number of steps, about: a training consists of whole epochs."""


def make(seed: int, number: int) -> Training:
    """Return training ``number`` of a seed: nodes and models take turns, the rest is random."""
    chance = random.Random(f"estimate {seed} {number}")
    factory, arguments, steps = MODELS[number % len(MODELS)]
    return Training(
        model=FactoryConfig(factory=factory, args=dict(arguments)),
        data=chance.randrange(len(MARKETS)),
        nodes=1 + number // len(MODELS) % 3,
        batch_size=chance.choice((16, 32, 64, 128)),
        accumulation=chance.choice((1, 1, 2)),
        steps=round(steps * 2 ** chance.uniform(-1.5, 0.5)),
    )


def write_market(folder: Path, tickers: int, days: int, window: int) -> BuiltDataset:
    """Build a dataset of random walks, by the product's own code."""
    folder.mkdir()
    chance = np.random.default_rng(tickers * days + window)
    dates = np.busday_offset("2015-01-01", np.arange(days), roll="forward")
    prices = 100 * np.exp(np.cumsum(0.01 * chance.standard_normal((days, tickers)), axis=0))
    lines = [",".join([str(day), *(f"{price:.6f}" for price in row)]) for day, row in zip(dates, prices, strict=True)]
    table = folder / "walks.csv"
    table.write_text("\n".join(["date," + ",".join(f"T{number}" for number in range(tickers)), *lines]) + "\n")
    ref = write_prices(price_source(str(table)), str(folder))
    return build_dataset(ref, validate_prices(ref, calendar=None), str(folder), DatasetParams(window=window), None)


class Course:
    """Estimates and runs one training after the other, and keeps the scores of the estimates."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.jobs_uri = str(home / "storage" / "jobs")
        self.manager = LocalClusterManager(home, LaunchSettings(sku=SKU, threads_per_rank=1))
        self.markets = [write_market(home / f"market-{number}", *sizes) for number, sizes in enumerate(MARKETS)]
        self.env = {"DTRAIN_CACHE": str(home / "cache")}
        self.scores: list[Score] = []

    def warm_up(self) -> None:
        """Run one training that does not count: it reads the libraries from disk and makes the tracking database."""
        self.one(
            Training(model=FactoryConfig(factory="tcn"), data=0, nodes=1, batch_size=64, accumulation=1, steps=1),
            "warm-up",
        )
        self.scores.clear()

    def one(self, training: Training, name: str) -> dict[str, Any]:
        """Estimate this training, run it, and return its row: the expected and the actual times."""
        job, sizes = self._job(training, name)
        count = training.nodes
        learned = learn(self.scores, "probe", SKU)
        forecast = self._probe(job, sizes, count, learned)
        expected = forecast.seconds_at(count)
        unlearned = replace(forecast, learned=LearnedCorrection())
        evidence.run_probe(self.manager, job, count, 1, self.env)
        rundir = RunDir(job.run_dir)
        events, nodes = list(rundir.events()), rundir.nodes()
        actual = max(node.ended_at or 0.0 for node in nodes) - min(node.started_at for node in nodes)
        took = read_measured(events, nodes, count, job.training.global_batch_size, keeps_cache=True)
        self._learn(job.job_id, expected, actual, nodes, learned)
        naive = first_epoch_seconds(events) * sizes.epochs
        return {
            "name": job.job_id,
            "nodes": count,
            "batch": job.training.global_batch_size,
            "steps": sizes.work(count).steps,
            "epochs": sizes.epochs,
            "low": round(expected.low, 2),
            "expected": round(expected.expected, 2),
            "high": round(expected.high, 2),
            "actual": round(actual, 2),
            "error_percent": _percent(expected.expected / actual - 1),
            "within": expected.low <= actual <= expected.high,
            "unlearned_error_percent": _percent(unlearned.seconds_at(count).expected / actual - 1),
            "unlearned_within": _holds(unlearned.seconds_at(count), actual),
            "first_epoch_error_percent": _percent(naive / actual - 1),
            "expected_parts": _rounded(asdict(forecast.parts(count))),
            "actual_parts": _rounded(asdict(replace(forecast, measured=(took,)).parts(count))),
        }

    def _job(self, training: Training, job_id: str) -> tuple[JobConfig, Sizes]:
        data = self.markets[training.data]
        job = JobConfig(
            job_id=job_id,
            run_dir=f"{self.jobs_uri}/{job_id}",
            dataset=DatasetRef(uri=data.uri, dataset_id=data.dataset_id),
            model=training.model,
            training=DistributedTrainingConfig(
                world_size=training.nodes,
                batch_size_per_gpu=training.batch_size,
                gradient_accumulation_steps=training.accumulation,
                threads_per_rank=1,
            ),
            tracking=TrackingConfig(mlflow_tracking_uri=f"sqlite:///{self.home}/mlflow.db"),
        )
        sizes = sizes_of(job, data.samples, 1, os.cpu_count())
        steps_per_epoch = replace(sizes, epochs=1).work(training.nodes).steps
        epochs = max(1, round(training.steps / steps_per_epoch))
        job = replace(job, training=replace(job.training, epochs=epochs))
        return job, replace(sizes, epochs=epochs)

    def _probe(self, job: JobConfig, sizes: Sizes, count: int, learned: LearnedCorrection) -> Forecast:
        return evidence.forecast_from_probe(self.manager, job, sizes, count, pace_mark(job, 1), self.env, learned)

    def _learn(
        self, job_id: str, expected: Interval, actual: float, nodes: Sequence[Any], learned: LearnedCorrection
    ) -> None:
        per_second = price_of(SKU).usd_per_hour("dedicated") / 3600
        score = Score(
            at=time.time(),
            job_id=job_id,
            basis="probe",
            sku=SKU,
            seconds=expected,
            usd=expected.scaled(len(nodes) * per_second),
            actual_seconds=actual,
            actual_usd=sum(node.seconds(time.time()) for node in nodes) * per_second,
            learned_factor=learned.factor,
        )
        self.scores.append(score)


def first_epoch_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds from the first generation to the end of the first evaluation, as a progress bar shows them."""
    [formed, *_], [judged, *_] = (read_events(kind, events) for kind in (MembershipEvent, EvaluationEvent))
    return judged.time - formed.time


def summary(rows: Sequence[Mapping[str, Any]], error: str, within: str | None = None) -> dict[str, float]:
    """Return the median error and the coverage over all rows, in percent, of the estimate whose columns are given."""
    errors = [abs(row[error]) for row in rows]
    inside = [row[within] if within else abs(row[error]) <= 100 * NEAR for row in rows]
    return {
        "median_error_percent": round(statistics.median(errors), 1),
        "coverage_90_percent": round(100 * sum(inside) / len(inside), 1),
    }


def _holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


def _percent(share: float) -> float:
    return round(100 * share, 1)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments."""
    parser = options_of("estimate", __doc__)
    parser.add_argument("--trainings", type=int, default=20, help="trainings; models and node counts take turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    parser.add_argument("--beside", type=float, default=0.0, metavar="CORES", help="cores that other work takes (0)")
    parser.add_argument("--budget", type=float, default=1500, metavar="SECONDS", help="begin none after this (1500)")
    options = parser.parse_args(arguments)
    if options.trainings < 1:
        parser.error("--trainings: at least 1")
    if not 0 <= options.beside <= (os.cpu_count() or 1):
        parser.error("--beside: from 0 to the number of cores")
    stop_on_signals()  # so that the running job is cancelled before the end
    began = time.time()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="estimate-") as home, contextlib.ExitStack() as stack:
        course = Course(Path(home))
        course.warm_up()
        if options.beside:
            stack.enter_context(busy_beside(options.beside, options.seed))
        for number in range(options.trainings):
            if rows and time.time() - began > options.budget:
                break
            training = make(options.seed, number)
            rows.append(course.one(training, f"train-{number:02d}-{training.model.factory}"))
            note(json.dumps(rows[-1]))
    result = {
        "trainings": len(rows),
        **({"partial": True} if len(rows) < options.trainings else {}),
        "beside_cores": options.beside,
        **summary(rows, "error_percent", "within"),
        "unlearned": summary(rows, "unlearned_error_percent", "unlearned_within"),
        "first_epoch_times_epochs": summary(rows, "first_epoch_error_percent"),
        "rows": rows,
        "seed": options.seed,
        "seconds": round(time.time() - began, 1),
    }
    tell("estimate", result, options.save, "estimate_beside" if options.beside else "estimate")


if __name__ == "__main__":
    main()
