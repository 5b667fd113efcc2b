"""Measure what nodes are paid for after the last step of a training, with this trainer and with an earlier one.

Run `python -m benchmarks.finish --before COMMIT`; both are taken from git, as they were committed, and both must know
the fields that a job of today has. Both train the model `tcn` on the bundled prices, as `trained_checkpoint` does: one
rank on each of ``--nodes`` nodes of the local cluster, tracked in MLflow. Pairs of trainings follow each other, the two
of a pair in random order, so that other work on the machine disturbs them alike. A node is paid for from its start to
the end of its last process.

    finish_ratio            paid node-seconds after the last step, this trainer over the earlier one: geometric mean
                            over pairs, with a 95 % interval (``…_low``, ``…_high``); below 1 this one is cheaper
    start_ratio             the same from the start of each node to the first report of steps: what it costs to do work
                            of the finish there
    outside_ratio           the same for both together
    step_ratio              the same for the seconds of a step (median of a training)
    finish_seconds, …       medians of them: [before, after]
    same_weights            whether all trainings ended with the same weights
    baselines_difference    the largest difference between figures of baselines in the ``evaluation.json`` of a pair;
                            model_difference: of the model
    load                    the load average when each pair began
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.host import Workplace, note, tell
from dtrain_dagster.jobs.progress import follow_job, start_job
from trainer.config import FactoryConfig
from trainer.rundir import EVALUATION, RESULT, RunDir

ROOT = Path(__file__).parents[1]
PARTS = ("start", "finish", "step")
PARTS_OF_BOTH = ("tcn", "student_t")
"""Model and loss: the default of today may be unknown to the other commit."""


def resolve(commit: str) -> str:
    """Return the short hash of a commit. Raise `subprocess.CalledProcessError` where there is none of this name."""
    command = ["git", "rev-parse", "--short", "--verify", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def unpack(commit: str, folder: Path) -> Path:
    """Return a folder with the package ``trainer`` as it was at a commit."""
    packed = subprocess.run(["git", "archive", commit, "trainer"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def train(place: Workplace, name: str, nodes: int, steps: int, path: Path) -> dict[str, Any]:
    """Train with the trainer in ``path``, and return node-seconds before the first report and after the last step, the
    seconds of a step, and what came of it."""
    job = place.job(name, nodes, epochs=10**4, max_steps=steps)
    job.model, job.loss = (FactoryConfig(factory=factory) for factory in PARTS_OF_BOTH)
    rundir = RunDir(job.run_dir)
    start_job(place.manager, job, nodes, 1, place.env | {"PYTHONPATH": str(path)})
    for status, _ in follow_job(place.manager, rundir, job.job_id):
        last = status
    events = [item for item in rundir.events() if item["kind"] == "step"]
    result, evaluation = rundir.read_json(RESULT) or {}, rundir.read_json(EVALUATION) or {}
    if result.get("status") != "succeeded" or not events:
        raise RuntimeError(f"{name} ended as {last.state}: {result.get('error')}")
    usage = place.manager.node_usage(name)
    return {
        "start": sum(events[0]["time"] - stay.started_at for stay in usage),
        "finish": sum(stay.ended_at - events[-1]["time"] for stay in usage),
        "step": statistics.median(item["step_seconds"] for item in events),
        "weights": result["weights_sha256"],
        "baselines": evaluation["baselines"],
        "model": evaluation["model"],
    }


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the geometric mean of after over before, and its 95 % interval. Pure."""
    logs = [math.log(after / before) for before, after in pairs]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference of numbers at the same place; infinite where one is missing. Pure."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return max((largest_difference(one.get(key), other.get(key)) for key in {*one, *other}), default=0.0)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    return 0.0 if one == other else math.inf


def summarize(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the figures of all pairs of trainings (before, after). Pure."""
    figures: dict[str, Any] = {}
    series = {part: [(before[part], after[part]) for before, after in pairs] for part in PARTS}
    series["outside"] = [tuple(run["start"] + run["finish"] for run in pair) for pair in pairs]  # type: ignore[misc]
    for name, values in series.items():
        middle, low, high = ratio(values)
        figures |= {f"{name}_ratio": middle, f"{name}_ratio_low": low, f"{name}_ratio_high": high}
        figures[f"{name}_seconds"] = [statistics.median(column) for column in zip(*values, strict=True)]
    runs = [run for pair in pairs for run in pair]
    figures["same_weights"] = len({run["weights"] for run in runs}) == 1
    for part in ("baselines", "model"):
        figures[f"{part}_difference"] = max(largest_difference(before[part], after[part]) for before, after in pairs)
    return figures


def main() -> None:
    """Run the benchmark, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.finish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the earlier trainer")
    parser.add_argument("--after", default="HEAD", metavar="COMMIT", help="the trainer that is compared with it (HEAD)")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of trainings (6)")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of a training (3)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a training (100)")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/finish.json")
    options = parser.parse_args()
    options.before, options.after = resolve(options.before), resolve(options.after)
    order, pairs, load = random.Random(0), [], []
    with tempfile.TemporaryDirectory(prefix="finish-") as name:
        folder = Path(name)
        os.chdir(folder)  # the trainer of this folder would come before that of PYTHONPATH
        paths = {kind: unpack(getattr(options, kind), folder / kind) for kind in ("before", "after")}
        place = Workplace(folder / "home")
        for number in range(options.pairs):
            load.append(round(os.getloadavg()[0], 2))
            pair = {
                kind: train(place, f"{kind}-{number}", options.nodes, options.steps, paths[kind])
                for kind in order.sample(sorted(paths), 2)
            }
            pairs.append((pair["before"], pair["after"]))
            note(
                f"pair {number}: "
                + ", ".join(f"{part} {pair['before'][part]:.3f} -> {pair['after'][part]:.3f}" for part in PARTS)
            )
    figures = {
        key: [round(each, 4) for each in value] if isinstance(value, list) else round(value, 4)
        if isinstance(value, float) and "difference" not in key else value
        for key, value in summarize(pairs).items()
    }  # fmt: skip
    settings = {name: getattr(options, name) for name in ("before", "after", "pairs", "nodes", "steps")}
    tell("finish", {**settings, **figures, "load": load}, options.save)


if __name__ == "__main__":
    main()
