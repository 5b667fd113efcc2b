"""A job that really ran: a small market written as a dataset, trained for a few steps by the trainer itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.engine.run_job import run_job
from trainer.rundir import RunDir

WINDOW, HORIZON, TICKERS, DAYS = 12, 5, 4, 700
PACED_MODEL = """
import os, time
from torch import nn
from trainer.runtime.launch import Launch
class Paced(nn.Linear):
    def forward(self, x):
        time.sleep(0.2 if Launch.read(os.environ).number == 1 else 0.0)
        return super().forward(x.flatten(1))
def make(spec, outputs):
    return Paced(spec.window * len(spec.features), outputs)
"""
"""A module of a user's own, for trainings that are looked at while they run, without taking cores: ``make`` gives a
model that waits in each step of a job's first launch."""
FEATURES = (
    "scaled_return",
    "log_return",
    "log_rv_1",
    "log_rv_5",
    "log_rv_22",
    "index_return",
    "index_log_rv_5",
    "index_log_rv_22",
)


def trailing(values: np.ndarray, days: int) -> np.ndarray:
    """Mean of the last ``days`` values up to each; the first ones over as many as there are."""
    sums = np.cumsum(np.r_[np.zeros(days), values])
    return (sums[days:] - sums[:-days]) / days


def write_dataset(folder: Path, seed: int = 0, horizon: int = HORIZON) -> Path:
    """Random walks whose volatility changes, as one shard with its manifest."""
    random = np.random.default_rng(seed)
    slow = np.cumsum(random.standard_normal((TICKERS, DAYS)) * 0.1, axis=1) * 0.5
    returns = 0.01 * np.exp(slow - slow.mean(axis=1, keepdims=True)) * random.standard_normal((TICKERS, DAYS))
    index = returns.mean(axis=0)
    dates = np.datetime64("2010-01-01") + np.arange(DAYS)
    columns: dict[str, list[np.ndarray]] = {}
    for r in returns:
        ewma = np.full(DAYS, r[0] ** 2)
        for day in range(1, DAYS):
            ewma[day] = 0.94 * ewma[day - 1] + 0.06 * r[day] ** 2
        rv = {days: 0.5 * np.log(trailing(r**2, days) + 1e-8) for days in (1, 5, 22)}
        index_rv = {days: 0.5 * np.log(trailing(index**2, days) + 1e-8) for days in (5, 22)}
        ahead = np.r_[trailing(r, horizon)[horizon:] * horizon, np.zeros(horizon)]
        values = {
            "scaled_return": r / np.exp(rv[22]),
            "log_return": r,
            **{f"log_rv_{days}": rv[days] for days in (1, 5, 22)},
            "index_return": index,
            **{f"index_log_rv_{days}": index_rv[days] for days in (5, 22)},
            "adj_close": 100 * np.exp(np.cumsum(r)),
            "ewma_variance": ewma,
            "target_log_rv": np.r_[rv[5][5:], np.zeros(5)],
            "target_return": ahead,
        }
        for name, column in values.items():
            columns.setdefault(name, []).append(column)
    names = [f"T{number}" for number in range(TICKERS)]
    flat = {name: np.concatenate(parts) for name, parts in columns.items()}
    wide = {"adj_close": np.float64}
    table = pa.table(
        {"ticker": np.repeat(names, DAYS), "date": pa.array(np.tile(dates, TICKERS).astype("datetime64[D]"))}
        | {name: column.astype(wide.get(name, np.float32)) for name, column in flat.items()}
    )
    path = folder / "data" / "shard-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(table, path, compression="zstd", row_group_size=DAYS)
    bounds = {"train": (0, 420), "valid": (420, 560), "test": (560, DAYS)}
    ends = {split: [max(first, 22 + WINDOW), last - horizon] for split, (first, last) in bounds.items()}
    in_train = np.concatenate([np.arange(*ends["train"]) + DAYS * number for number in range(TICKERS)])

    def norm(name: str) -> dict[str, float]:
        return {"mean": float(flat[name][in_train].mean()), "std": float(flat[name][in_train].std())}

    roles = {name: "feature" for name in FEATURES} | {"adj_close": "price", "target_return": "target"}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {
        "schema_version": 1,
        "dataset_id": digest[:16],
        "created_at": "2026-01-01T00:00:00Z",
        "source": {
            "name": "walks",
            "title": "Random walks",
            "licence": "public domain",
            "notes": "drawn, not observed",
            "sha256": digest,
            "origin": "tests",
            "is_synthetic": True,
            "rows": TICKERS * DAYS,
            "tickers": TICKERS,
            "first_date": str(dates[0]),
            "last_date": str(dates[-1]),
        },
        "calendar": None,
        "window": WINDOW,
        "horizon": horizon,
        "columns": [
            {"name": "ticker", "type": "string", "role": "key", "description": ""},
            {"name": "date", "type": "date32", "role": "key", "description": ""},
            *({"name": n, "type": "float", "role": roles.get(n, "auxiliary"), "description": ""} for n in flat),
        ],
        "splits": {
            s: {"first": str(dates[first]), "last": str(dates[last - 1])} for s, (first, last) in bounds.items()
        },
        "normalisation": {
            "fitted_on": "train",
            "features": {name: norm(name) for name in FEATURES},
            "target": norm("target_return"),
        },
        "samples": {split: TICKERS * (last - first) for split, (first, last) in ends.items()},
        "checks": [{"name": "stale", "passed": False, "severity": "warning", "description": "", "metadata": {}}],
        "shards": [
            {
                "path": "data/shard-00000-of-00001.parquet",
                "sha256": digest,
                "bytes": path.stat().st_size,
                "rows": TICKERS * DAYS,
                "first_date": str(dates[0]),
                "last_date": str(dates[-1]),
                "tickers": names,
                "segments": [
                    {
                        "ticker": name,
                        "rows": [DAYS * number, DAYS * (number + 1)],
                        "samples": {s: [DAYS * number + a, DAYS * number + b] for s, (a, b) in ends.items()},
                    }
                    for number, name in enumerate(names)
                ],
            }
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return folder


def train(
    home: Path,
    dataset: Path,
    job_id: str,
    model: str = "tcn",
    loss: str = "student_t",
    steps: int = 30,
    tracking_uri: str | None = None,
    learning_rate: float = 2e-3,
) -> str:
    """Train in this process, as a world of one; the run directory."""
    rundir = RunDir(str(home / "jobs" / job_id))
    job = JobConfig(
        job_id=job_id,
        run_dir=rundir.uri,
        dataset=DatasetRef(uri=str(dataset)),
        model=FactoryConfig(factory=model),
        loss=FactoryConfig(factory=loss),
        training=DistributedTrainingConfig(
            world_size=1, max_steps=steps, warmup_steps=5, threads_per_rank=1, learning_rate=learning_rate
        ),
        tracking=TrackingConfig(tensorboard=False, mlflow_tracking_uri=tracking_uri),
    )
    rundir.write_job(job)
    assert run_job(job) == 0, rundir.read_json("result.json")
    return rundir.uri
