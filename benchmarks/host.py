"""Parts that benchmarks of whole jobs share: a home with the real dataset, the stock job, and the line of JSON.

The handling of signals, of failed parts and of stolen processor time belongs here, too; nothing is measured here.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.checkpoint import RESULTS, _cpu
from dtrain_dagster.clusters.local.manager import LocalClusterManager
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams, build_dataset
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.validation import validate_prices
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig

CALENDAR = "XNYS"
"""Exchange calendar of the bundled prices."""
_BEFORE = psutil.cpu_times()
"""Processor times of this machine when the benchmark began."""


QUIET_LOAD_PER_CORE = 0.75
"""Load per core, over the last minute, above which a machine that should be quiet has other work."""


def is_busy(load: float, cores: int | None = None) -> bool:
    """Return whether a machine of so many cores (default: this one) had too much other work at this load for seconds
    that are reported."""
    return load > QUIET_LOAD_PER_CORE * (cores or os.cpu_count() or 1)


class Workplace:
    """A home of its own in ``folder``, with a local cluster. Without ``dataset`` it makes shards of the bundled
    prices."""

    def __init__(self, folder: Path, dataset: DatasetRef | None = None, threads_per_rank: int = 1) -> None:
        self.home, self.dataset = folder, dataset or real_dataset(folder)
        self.manager = LocalClusterManager(home=folder, threads_per_rank=threads_per_rank, max_replacements=0)
        self.env = {"DTRAIN_CACHE": str(folder / "cache"), "PYTHONPATH": str(Path(__file__).parents[1])}

    def job(self, job_id: str, ranks: int, **training: Any) -> JobConfig:
        """Return the stock model's job as `trained_checkpoint` trains and tracks it; ``training`` changes its
        settings."""
        settings = DistributedTrainingConfig(world_size=ranks, threads_per_rank=self.manager.settings.threads_per_rank)
        return JobConfig(
            job_id=job_id,
            run_dir=f"{self.manager.folder}/{job_id}",
            dataset=self.dataset,
            training=replace(settings, **training),
            tracking=TrackingConfig(mlflow_tracking_uri=f"sqlite:///{self.home}/mlflow.db", mlflow_run_name=job_id),
        )


def real_dataset(folder: Path) -> DatasetRef:
    """Build a dataset of the bundled prices in ``folder``, with the default parameters."""
    prices = write_prices(price_source("sp500_panel"), f"{folder}/storage")
    validation = validate_prices(prices, CALENDAR)
    built = build_dataset(prices, validation, f"{folder}/storage", DatasetParams(), CALENDAR)
    return DatasetRef(uri=built.uri, dataset_id=built.dataset_id)


def in_parts(parts: Mapping[str, Callable[[], dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all parts of a benchmark, and return their figures and, of those that failed, the reasons: the figures of the
    others are reported all the same. After a part that is stopped by a signal no other one begins."""
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, part in parts.items():
        if "stopped" in failed:
            failed[name] = "it was not begun"
            continue
        try:
            figures |= part()
        except SystemExit:
            failed |= {name: "it was stopped", "stopped": "by a signal, or at the end of its time"}
        except Exception as error:
            note(traceback.format_exc())
            failed[name] = f"{type(error).__name__}: {error}"
    return figures, failed


def stop_on_signals(seconds: float = 0.0) -> None:
    """Make SIGTERM, SIGINT and the end of ``seconds`` (0: never) raise SystemExit. Only the first of them counts: the
    benchmark then reports its figures so far and ends its processes."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)

    def stop(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def stolen_percent(before: Any, after: Any) -> float | None:
    """Return the percentage of the processor time wanted between two ``psutil.cpu_times()`` that the host gave to other
    machines instead; None where the system does not count it. Ranks that wait for each other lose it as often as it is
    taken from any of them."""
    if not hasattr(after, "steal"):
        return None
    spent = {name: getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system", "steal")}
    wanted = sum(spent.values())
    return round(100 * spent["steal"] / wanted, 2) if wanted > 0 else 0.0


def lockstep(ranks: Sequence[Sequence[float]]) -> float:
    """Return the seconds that steps take if each ends on all ranks when it ends on the last of them. ``ranks``: of each
    rank, the seconds of its steps without any waiting."""
    return sum(map(max, zip(*ranks, strict=True)))


def tell(name: str, figures: dict[str, Any], save: bool) -> None:
    """Print the one line on stdout, with date and machine, and ``partial`` where something failed or is missing; if
    ``save``, write it to ``benchmarks/results/<name>.json`` as well."""
    result = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"partial": True} if figures.get("failed") or figures.get("missing") else {}),
        **figures,
        "load_after": round(os.getloadavg()[0], 2),
        "stolen_percent": stolen_percent(_BEFORE, psutil.cpu_times()),
    }
    line = json.dumps(result)
    print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(line + "\n")
