"""Measure what a warm start brings, and how many years should choose the epoch: the stock model, trained for each year.

Run `python -m benchmarks.walk_forward --years 2000:2022`. Every year is trained twice on the bundled prices, as
`walk_forward/trained_checkpoint` trains it but in this process alone: one rank of one thread computes the batches of
three. The first year of warm starts has none before it. Trainings that are finished stay in ``--folder``, so that a run
that was stopped goes on where it was; with --seconds it stops by itself, and tells what it has. With several
--valid-years each year is trained once for each of them, from fresh weights only:

    python -m benchmarks.walk_forward --years 2003:2022 --valid-years 2,1,3 --folder FOLDER --seconds 7200

    gain_vs_ridge, t_vs_ridge    of fresh starts over the ridge regression of the same year, in nats, and its Newey-West
                                 t over all years; likewise for HAR-X and EWMA
    warm_gain, warm_t            by how much warm starts are better than fresh ones, over the years that have both
    chosen_at                    by year, the share of the training after which the weights were chosen: fresh, warm
    by_year                      the same gains by year, and the seconds of both trainings
    by_valid_years               for each number of validation years: gain and t over ridge (whose penalty they choose,
                                 too), over the first number that was named, and chosen_at

The result is written to ``benchmarks/results/walk_forward.json`` with --save.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host import CALENDAR, note, stop_on_signals, tell
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sharding import DatasetParams
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.year_split import VALID_YEARS, YearSplit, build_year
from dtrain_dagster.registry.evaluated import stored_predictions
from dtrain_dagster.registry.walk_forward import YearScores, gain_over, judge_years
from dtrain_dagster.registry.year_scores import score_predictions
from dtrain_dagster.reports.walk_forward_charts import walk_forward_figure
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.data.shards import DataShardManager
from trainer.engine.run_job import train_job
from trainer.model.allowed_factories import usual_parts
from trainer.rundir import RESULT, RunDir
from trainer.spec import WINDOWS

SHOWN = ("ridge", "har_x", "ewma")


def train_year(folder: Path, split: YearSplit, dataset: DatasetRef, before: RunDir | None) -> RunDir:
    """Train a year unless that was done, from fresh weights or those of the year ``before``; return its run
    directory."""
    name = f"{split.year}-valid{split.valid_years}-{'fresh' if before is None else 'warm'}"
    rundir = RunDir(str(folder / "jobs" / name))
    if (rundir.read_json(RESULT) or {}).get("status") == "succeeded":
        return rundir
    start: dict[str, Any] = {}
    if before is not None:
        saved = before.read_json("model/model.json")
        assert saved is not None
        start = {"start_from": before.uri, "start_sha256": saved["file_sha256"]}
    model, loss = usual_parts(WINDOWS, None)
    job = JobConfig(
        job_id=name,
        run_dir=rundir.uri,
        dataset=dataset,
        model=FactoryConfig(factory=model),
        loss=FactoryConfig(factory=loss),
        training=DistributedTrainingConfig(threads_per_rank=1, **start),
        tracking=TrackingConfig(tensorboard=False),
    )
    code, result = train_job(job)
    if code:
        raise RuntimeError(f"{job.job_id}: {result.get('error')}")
    return rundir


def score_both(split: YearSplit, dataset: DatasetRef, runs: dict[str, RunDir]) -> dict[str, YearScores]:
    """Return the daily figures of a year's trainings."""
    shards = DataShardManager(dataset.uri, expected_id=dataset.dataset_id)
    found = {"fresh": score_predictions(split.year, stored_predictions(runs["fresh"], shards), shards)}
    if "warm" in runs:
        own = score_predictions(split.year, stored_predictions(runs["warm"], shards), shards, baselines={})
        found["warm"] = replace(own, baselines=found["fresh"].baselines)
    return found


@dataclass(frozen=True, slots=True)
class ValidYears:
    """The years that were trained with one number of validation years."""

    scores: list[YearScores] = field(default_factory=list)
    runs: list[RunDir] = field(default_factory=list)


def valid_figures(tried: Mapping[int, ValidYears]) -> dict[str, Any]:
    """Return the figures by number of validation years, over the test years that all of them have."""
    shared = min(len(each.scores) for each in tried.values())
    first, found = next(iter(tried.values())), {}
    for count, each in tried.items():
        report = judge_years(each.scores[:shared])["all"]
        own, other, windows = (
            np.concatenate([getattr(year, name) for year in years.scores[:shared]])
            for years, name in ((each, "nll"), (first, "nll"), (each, "windows"))
        )
        over_first = gain_over(own, other, windows, 5)
        results = [run.read_json(RESULT) or {} for run in each.runs[:shared]]
        found[str(count)] = {
            "nll": report["nll"],
            "coverage_90": report["coverage_90"],
            "gain_vs_ridge": report["gains"]["ridge"]["nats"],
            "t_vs_ridge": report["gains"]["ridge"]["t"],
            "gain_vs_first": over_first.nats,
            "t_vs_first": over_first.t,
            "chosen_at": [round(result["best_step"] / result["steps"], 2) for result in results],
        }
    return found


def figures_of(years: Sequence[dict[str, YearScores]], runs: Sequence[dict[str, RunDir]]) -> dict[str, Any]:
    """Return the benchmark's figures of these years."""
    report = judge_years([year["fresh"] for year in years])
    figures: dict[str, Any] = {"years": report["years"], "nll": report["all"]["nll"]}
    for name in SHOWN:
        gain = report["all"]["gains"][name]
        figures |= {f"gain_vs_{name}": gain["nats"], f"t_vs_{name}": gain["t"]}
    figures |= {"coverage_90": report["all"]["coverage_90"], "years_won": report["years_won"]}
    figures["by_regime"] = {
        regime: {name: part["gains"][name] for name in SHOWN} for regime, part in report["by_regime"].items()
    }
    figures["by_year"] = {
        year: {name: part["gains"][name]["nats"] for name in SHOWN} for year, part in report["by_year"].items()
    }
    figures["chosen_at"], pairs = {}, [year for year in years if "warm" in year]
    for year, own in zip(years, runs, strict=True):
        row = figures["by_year"][str(year["fresh"].year)]
        results = {kind: run.read_json(RESULT) or {} for kind, run in own.items()}
        shares = {kind: round(item["best_step"] / item["steps"], 2) for kind, item in results.items()}
        figures["chosen_at"][str(year["fresh"].year)] = shares
        row["seconds"] = {kind: round(item["train_seconds"], 1) for kind, item in results.items()}
        if "warm" in year:
            row["warm"] = gain_over(year["warm"].nll, year["fresh"].nll, year["warm"].windows, 5).nats
    if pairs:
        warm, fresh = (np.concatenate([year[kind].nll for year in pairs]) for kind in ("warm", "fresh"))
        gain = gain_over(warm, fresh, np.concatenate([year["warm"].windows for year in pairs]), 5)
        figures |= {"warm_gain": gain.nats, "warm_t": gain.t, "warm_years": len(pairs)}
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk_forward", description=__doc__.split("\n\n")[0])
    parser.add_argument("--years", default="2000:2022", help="first and last test year")
    parser.add_argument("--valid-years", default=str(VALID_YEARS), help="such as 2, or 2,1,3: each is tried")
    parser.add_argument("--folder", type=Path, required=True, help="where datasets, jobs and scores are kept")
    parser.add_argument("--no-warm", action="store_true", help="fresh starts only")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this long; 0: never")
    parser.add_argument("--picture", type=Path, help="also draw the years of fresh starts, as PNG")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    first, last = map(int, options.years.split(":"))
    counts = [int(count) for count in options.valid_years.split(",")]
    folder, began = options.folder, time.monotonic()
    stop_on_signals(options.seconds)
    prices = write_prices(price_source("sp500_panel"), f"{folder}/storage")
    years: list[dict[str, YearScores]] = []
    runs: list[dict[str, RunDir]] = []
    tried = {count: ValidYears() for count in counts}
    stopped = ""
    try:
        before: RunDir | None = None
        for year in range(first, last + 1):
            for count in counts:
                split = YearSplit(year=year, valid_years=count)
                built = build_year(prices, f"{folder}/storage", split, DatasetParams(), CALENDAR)
                dataset = DatasetRef(uri=built.uri, dataset_id=built.dataset_id)
                mine = {"fresh": train_year(folder, split, dataset, None)}
                if before is not None and not options.no_warm and len(counts) == 1:
                    mine["warm"] = train_year(folder, split, dataset, before)
                scores = score_both(split, dataset, mine)
                tried[count].scores.append(scores["fresh"])
                tried[count].runs.append(mine["fresh"])
                if count == counts[0]:
                    before = mine.get("warm", mine["fresh"])
                    years.append(scores)
                    runs.append(mine)
            own = figures_of(years[-1:], runs[-1:])
            note(f"{json.dumps([own['by_year'], own['chosen_at']])}, {time.monotonic() - began:.0f} s")
    except SystemExit:
        stopped = f"before {first + len(years)}"
    if not years:
        note("no year was finished")
        return 1
    figures = figures_of(years, runs)
    if len(counts) > 1 and all(each.scores for each in tried.values()):
        figures["by_valid_years"] = valid_figures(tried)
    if options.picture:
        walk_forward_figure([year["fresh"] for year in years], SHOWN).savefig(options.picture, dpi=110)
    tell("walk_forward", {**({"missing": stopped} if stopped else {}), **figures}, options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
