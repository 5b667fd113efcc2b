"""Dollars that a search takes to the score that random search reaches with its whole budget: by `worth`, by successive
halving (ASHA), and without ending trials early.

`python -m benchmarks.search --record FILE` trains a random sample of a space for real (a network for the
digits of scikit-learn as a table of rows; learning rate, weight decay, batch, width, depth and dropout vary), each to
its end, and keeps the learning curves. `python -m benchmarks.search --curves FILE` plays five searches on them, which
differ in the order in which trials come: the decisions are those of `dtrain search`, two trials at once, and all
policies get the same trials in the same order, the same costs and everything that is known at each moment. Only the
clock and the fleet are played, and values are drawn at random for all, so what is compared is the ending of trials
alone. The trainings are recorded one after the other in one process, so that what a start and a finish take is given.

    dollars_vs_random         dollars of `worth` to the score that random search has at the end of its budget, over that
                              budget: mean over seeds
    dollars_vs_random_first   the same, over the dollars at which random search had that score first
    dollars_vs_asha           the same, over the dollars that ASHA takes to it: mean of `worth` over mean of ASHA
    rows                      each seed: the score, and the dollars of each policy over random search's budget; not
                              reached: all recorded trials were used up, and it counts with all their dollars
    repeatable                the same with ``repeatable``, in which trials know less of each other
    recorded_trainings, replayed    how many real trainings the curves are of, and that searches were played on them
    startup_seconds, finish_seconds    of a trial on a node, as given
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import RESULTS
from benchmarks.host import tell
from benchmarks.search_policies import Played, Recorded, play
from dtrain_dagster.search.check_space import job_of_trial
from dtrain_dagster.search.costing import TrialSeconds
from dtrain_dagster.search.pruning import Pruner
from dtrain_dagster.search.sampling import Sampler, draw_values
from dtrain_dagster.search.space import parse_space
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.documents.events import EvaluationEvent, read_events
from trainer.rundir import RunDir

SPACE = {
    "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "training.weight_decay": {"low": 1e-4, "high": 1.0, "log": True},
    "training.batch_size_per_gpu": [16, 32, 64],
    "model.args.width": {"low": 8, "high": 128, "log": True},
    "model.args.layers": {"low": 1, "high": 3},
    "model.args.dropout": {"low": 0.0, "high": 0.6},
}
CURVES = RESULTS / "search_curves.json"
"""The trainings that the saved result is of."""
EPOCHS, PARALLEL, TRIALS, SEEDS = 12, 2, 32, 5
STARTUP_SECONDS, FINISH_SECONDS = 8.0, 1.0


def record(path: Path, count: int, seconds: float) -> None:
    """Train ``count`` trials to their ends, no longer than ``seconds``, and write their curves."""
    from trainer.engine.run_job import run_job

    space, found, began = parse_space(SPACE), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtrain-search-") as folder:
        base = base_job(Path(folder))
        for number in range(count):
            values = draw_values(space, Sampler.RANDOM, 0, number, (), (), 1.0)
            assert values is not None
            job = job_of_trial(base, space, values)
            job.run_dir = f"{folder}/jobs/{number}"
            RunDir(job.run_dir).write_job(job)
            if run_job(job) != 0:
                raise RuntimeError(f"trial {number} failed: {RunDir(job.run_dir).read_json('result.json')}")
            events = [
                item for item in read_events(EvaluationEvent, RunDir(job.run_dir).events()) if item.split == "valid"
            ]
            times = [item.time for item in events]
            each = statistics.median(after - before for before, after in pairwise(times))
            found.append({"values": values, "scores": [item.loss for item in events], "evaluation_seconds": each})
            path.write_text(json.dumps({"epochs": EPOCHS, "trainings": found}))
            if time.monotonic() - began > seconds:
                break
    print(f"{len(found)} trainings in {time.monotonic() - began:.0f} s: {path}", file=sys.stderr)


def base_job(folder: Path) -> JobConfig:
    """Return the job that is varied, with its dataset in ``folder``."""
    import pandas as pd
    from sklearn.datasets import load_digits

    from dtrain_dagster.data.rows import RowParams, build_rows

    digits = load_digits()
    table = pd.DataFrame(digits.data.astype("float32"), columns=[f"p{place}" for place in range(64)])
    table["digit"] = [f"d{digit}" for digit in digits.target]
    table.to_parquet(folder / "digits.parquet")
    built = build_rows(str(folder / "digits.parquet"), str(folder), RowParams(target="digit", valid_fraction=0.3))
    return JobConfig(
        job_id="trial",
        run_dir=f"{folder}/jobs/trial",
        dataset=DatasetRef(uri=built.uri, dataset_id=built.dataset_id),
        model=FactoryConfig(factory="mlp"),
        loss=FactoryConfig(factory="cross_entropy"),
        training=DistributedTrainingConfig(
            world_size=1, epochs=EPOCHS, gradient_accumulation_steps=1, threads_per_rank=1, checkpoint_frequency=10_000
        ),
        tracking=TrackingConfig(tensorboard=False),
    )


def compare(pool: list[Recorded], usual: TrialSeconds, seeds: int, repeatable: bool) -> dict[str, Any]:
    """Return the figures of searches played on recorded trainings."""
    rows = []
    for seed in range(seeds):
        whole = play(pool, usual, Pruner.NONE, seed, PARALLEL, TRIALS, None, False)

        def until(pruner: Pruner, seed: int = seed, target: float = whole.best) -> Played:
            return play(pool, usual, pruner, seed, PARALLEL, len(pool), target, repeatable)

        first, asha, worth = until(Pruner.NONE), until(Pruner.ASHA), until(Pruner.WORTH)
        rows.append(
            {
                "seed": seed,
                "score": whole.best,
                "random_first": first.usd / whole.usd,
                "asha": asha.usd / whole.usd,
                "worth": worth.usd / whole.usd,
                "asha_reached": asha.is_reached,
                "worth_reached": worth.is_reached,
                "evaluations": {"random": whole.evaluations, "asha": asha.evaluations, "worth": worth.evaluations},
            }
        )
    means = {name: statistics.fmean(row[name] for row in rows) for name in ("random_first", "asha", "worth")}
    return {
        "dollars_vs_random": round(means["worth"], 4),
        "dollars_vs_random_first": round(means["worth"] / means["random_first"], 4),
        "dollars_vs_asha": round(means["worth"] / means["asha"], 4),
        "rows": rows,
    }


def main() -> None:
    """Record, or play and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--record", type=Path, metavar="FILE", help="train, and write the learning curves")
    parser.add_argument("--trainings", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=1500.0, help="of recording, at most")
    parser.add_argument("--curves", type=Path, default=CURVES, metavar="FILE", help="what --record wrote")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--startup", type=float, default=STARTUP_SECONDS, help="seconds from a node to a first step")
    parser.add_argument("--finish", type=float, default=FINISH_SECONDS, help="seconds after a last evaluation")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    if asked.record:
        return record(asked.record, asked.trainings, asked.seconds)
    kept = json.loads(asked.curves.read_text())
    pool = [Recorded(item["scores"], item["evaluation_seconds"]) for item in kept["trainings"]]
    each = statistics.fmean(item.evaluation_seconds for item in pool)
    of = len(pool[0].scores)
    usual = TrialSeconds(startup=asked.startup, training=each * of, of=of, finish=asked.finish)
    figures = compare(pool, usual, asked.seeds, repeatable=False)
    again = compare(pool, usual, asked.seeds, repeatable=True)
    figures |= {
        "repeatable": {name: again[name] for name in ("dollars_vs_random", "dollars_vs_asha")},
        "replayed": True,
        "recorded_trainings": len(pool),
        "parallel": PARALLEL,
        "trials_of_random": TRIALS,
        "evaluations_of_a_trial": of,
        "startup_seconds": asked.startup,
        "finish_seconds": asked.finish,
        "evaluation_seconds": round(each, 3),
    }
    tell("search", figures, asked.save)
    return None


if __name__ == "__main__":
    main()
