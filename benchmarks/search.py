"""Dollars that a search takes to the score that random search reaches with its whole budget: by what `dtrain search`
does by itself (`gp`: values by Optuna's Gaussian process, ended early by successive halving), and by halving of random
values (ASHA).

`python -m benchmarks.search --record 96` trains a random sample of a space for real (a network for the digits of
scikit-learn as a table of rows; learning rate, weight decay, batch, width, depth and dropout vary), each to its end,
and keeps the learning curves. `python -m benchmarks.search` plays searches on them, which differ in the order in which
trials come: the decisions are those of `dtrain search`, two trials at once, and all policies have the same trainings to
choose from, the same costs, and begin with the same ones. Random values are the next training of the order; chosen
values are the best one, as the sampler has it, of those that are left. Only the clock and the fleet are played. The
trainings are recorded one after the other in one process, so that what a start and a finish take is given.

    dollars_vs_random         dollars of `gp` to the score that random search has at the end of its budget, over that
                              budget: mean over orders; it promises 0.5
    dollars_vs_asha           dollars of `gp`, over those that ASHA takes to it in random order: mean over mean, with
                              its 95 % interval over orders (bootstrap); all orders are of the same trainings, so it
                              says nothing of other problems; it promises 0.9
    dollars                   of each policy, over random search's budget: mean
    unreached                 orders in which a policy used all trainings up; they count with all their dollars
    rows                      each order: the score, and the dollars of each policy over random search's budget
    recorded_trainings, replayed    how many real trainings the curves are of, and that searches were played on them
    startup_seconds, finish_seconds    of a trial on a node, as given
"""

from __future__ import annotations

import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.host import RESULTS, note, options_of, tell
from dtrain_dagster.costs.money import SECOND, nano_usd
from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Standing
from dtrain_dagster.search.source import RANDOM_FIRST, Draw, TrialSource, as_optuna, ask_for_values, draw_values
from dtrain_dagster.search.space import Space, job_of_trial, parse_space
from dtrain_dagster.search.trials import Pruner, Sampler, SearchSettings, Trial, TrialSeconds
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
"""The trainings, as ``--record`` wrote them."""
POLICIES = {
    "asha": (Sampler.random, Pruner.asha),
    "gp": (Sampler.gp, Pruner.asha),
}
EPOCHS, PARALLEL, TRIALS, ORDERS = 12, 2, 32, 20
RESAMPLES = 10_000
STARTUP_SECONDS, FINISH_SECONDS = 8.0, 1.0
USD_PER_NODE_HOUR = 3.06


def record(count: int) -> None:
    """Train ``count`` trials to their ends, and write their curves."""
    from trainer.engine.run_job import run_job

    space, found, began = parse_space(SPACE), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtrain-search-") as folder:
        base = base_job(Path(folder))
        for number in range(count):
            values = draw_values(space, Sampler.random, 0, number, (), (), 1.0)
            assert values is not None
            job = job_of_trial(base, values)
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
            CURVES.write_text(json.dumps({"epochs": EPOCHS, "trainings": found}))
    note(f"{len(found)} trainings in {time.monotonic() - began:.0f} s: {CURVES}")


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A real training, as it went."""

    values: Mapping[str, Any]

    scores: Sequence[float]
    """The validation loss at each evaluation."""
    evaluation_seconds: float
    """From one evaluation to the next, in the middle."""


class Pool:
    """The trainings that a search can have."""

    def __init__(self, space: Space, rows: Sequence[Recorded]) -> None:
        self.space, self.rows = space, rows
        self.by_values = {mark_of(row.values): row for row in rows}

    def drawer(self, settings: SearchSettings) -> Draw:
        """Return what gives trials their values, each training once: in an order of the seed, or, for the sampler that
        chooses by what is known, the one that this sampler finds best of those that are left."""
        order = [self.rows[place] for place in np.random.default_rng(settings.seed).permutation(len(self.rows))]

        def draw(number: int, known: Sequence[Trial], running: Sequence[Trial]) -> Mapping[str, Any] | None:
            taken = {mark_of(trial.values) for trial in [*known, *running]}
            left = [row.values for row in order if mark_of(row.values) not in taken]
            if settings.sampler is not Sampler.gp or not left:
                return left[0] if left else None
            sampler = OneOf(self.space, left, settings.seed)
            ask_for_values(self.space, sampler, known, running, settings.sign)
            return left[sampler.chosen]

        return draw


class OneOf(optuna.samplers.GPSampler):
    """Optuna's Gaussian process, which chooses among given values instead of from the whole space."""

    def __init__(self, space: Space, left: Sequence[Mapping[str, Any]], seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=RANDOM_FIRST)
        self.chosen = 0
        """The place of the values that it chose; the first while it does not know enough."""
        self._left = [as_optuna(space, Trial(number=0, values=values, of=1), 0.0) for values in left]

    def _optimize_acqf(self, acqf: Any, best_params: Any) -> Any:
        """Return the given values with the best acquisition: the method that Optuna has for another optimizer."""
        places = acqf.search_space.get_normalized_params(self._left)
        self.chosen = int(np.argmax(acqf.eval_acqf_no_grad(places)))
        return places[self.chosen]


def mark_of(values: Mapping[str, Any]) -> str:
    """Return what tells values apart."""
    return json.dumps(dict(values), sort_keys=True)


@dataclass(slots=True)
class Played:
    """What a policy did until it reached a score, or came to its last trial."""

    usd: float = 0.0
    is_reached: bool = False
    best: float = float("inf")


def play(pool: Pool, usual: TrialSeconds, settings: SearchSettings, draw: Draw, target: float | None = None) -> Played:
    """Play a search of the pool's trainings until it has a score of ``target`` or better (None: to its end).
    ``usual``: what a trial takes; ``draw``: see `TrialSource`."""
    of, going = usual.of, dict[str, Recorded]()

    def make_job(number: int, values: Mapping[str, Any]) -> tuple[FleetJob, int]:
        job = FleetJob(job_id=f"{number:04d}", node_seconds=usual.training)
        going[job.job_id] = pool.by_values[mark_of(values)]
        return job, of

    source = TrialSource(pool.space, settings, make_job, draw=draw)
    played, running, waiting = Played(), dict[str, tuple[float, list[EvaluationEvent]]](), list[tuple[float, str]]()
    paid, now = 0.0, 0.0

    def end(job_id: str, state: FleetState, at: float) -> None:
        nonlocal paid
        began, told = running.pop(job_id)
        paid += at - began
        units = round((at - began) * SECOND) * nano_usd(USD_PER_NODE_HOUR)
        job = FleetJob(job_id=job_id, node_seconds=at - began)
        ended = Standing(job=job, number=0, state=state, paid_units=units, node_seconds=at - began)
        source.on_end(ended, tuple(told))

    while True:
        while (job := source.next_job()) is not None:
            running[job.job_id] = (now, [])
            heapq.heappush(waiting, (now + usual.startup + going[job.job_id].evaluation_seconds, job.job_id))
        if not waiting:
            break
        now, job_id = heapq.heappop(waiting)
        row = going[job_id]
        told = running[job_id][1]
        if len(told) == of:
            end(job_id, FleetState.SUCCEEDED, now)
            continue
        score = row.scores[len(told)]
        told.append(EvaluationEvent(time=now, split="valid", step=len(told) + 1, loss=score))
        played.best = min(played.best, score)
        if target is not None and score <= target:
            played.is_reached = True
            break
        if source.judge(job_id, tuple(told)):
            end(job_id, FleetState.ENDED, now)
        elif len(told) == of:
            heapq.heappush(waiting, (now + usual.finish, job_id))
        else:
            heapq.heappush(waiting, (now + row.evaluation_seconds, job_id))
    paid += sum(now - began for began, _ in running.values())
    played.usd = paid * USD_PER_NODE_HOUR / 3600
    return played


def compare(pool: Pool, usual: TrialSeconds, seeds: int) -> dict[str, Any]:
    """Return the figures of searches played on recorded trainings."""

    def settings(sampler: Sampler, pruner: Pruner, seed: int, trials: int) -> SearchSettings:
        return SearchSettings(trials=trials, parallel=PARALLEL, sampler=sampler, pruner=pruner, seed=seed)

    rows = []
    for seed in range(seeds):
        every = settings(Sampler.random, Pruner.none, seed, TRIALS)
        whole = play(pool, usual, every, pool.drawer(every))
        row: dict[str, Any] = {"seed": seed, "score": whole.best, "unreached": []}
        for name, (sampler, pruner) in POLICIES.items():
            one = settings(sampler, pruner, seed, len(pool.rows))
            got = play(pool, usual, one, pool.drawer(one), whole.best)
            row[name] = round(got.usd / whole.usd, 4)
            row["unreached"] += [] if got.is_reached else [name]
        rows.append(row)
        note(f"order {seed}: {row}")
    return summary(rows) | {"rows": rows}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of searches with different seeds. Pure."""
    usd = {name: np.array([row[name] for row in rows]) for name in POLICIES}
    chosen = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    drawn = usd["gp"][chosen].mean(1) / usd["asha"][chosen].mean(1)
    return {
        "dollars_vs_random": round(float(usd["gp"].mean()), 4),
        "dollars_vs_asha": round(float(usd["gp"].mean() / usd["asha"].mean()), 4),
        "dollars_vs_asha_interval": [round(float(value), 4) for value in np.percentile(drawn, [2.5, 97.5])],
        "dollars": {name: round(float(values.mean()), 4) for name, values in usd.items()},
        "unreached": {name: sum(name in row["unreached"] for row in rows) for name in POLICIES},
    }


def main() -> None:
    """Record, or play and print one line of JSON."""
    parser = options_of("search", __doc__)
    parser.add_argument("--record", type=int, metavar="TRAININGS", help=f"train so many, and write {CURVES.name}")
    parser.add_argument("--orders", type=int, default=ORDERS, help=f"orders of trials ({ORDERS})")
    options = parser.parse_args()
    if options.record:
        return record(options.record)
    kept = json.loads(CURVES.read_text())
    trainings = [Recorded(item["values"], item["scores"], item["evaluation_seconds"]) for item in kept["trainings"]]
    pool = Pool(parse_space(SPACE), trainings)
    each = statistics.fmean(item.evaluation_seconds for item in trainings)
    of = len(trainings[0].scores)
    usual = TrialSeconds(startup=STARTUP_SECONDS, training=each * of, of=of, finish=FINISH_SECONDS)
    figures = compare(pool, usual, options.orders)
    figures |= {
        "replayed": True,
        "recorded_trainings": len(trainings),
        "parallel": PARALLEL,
        "trials_of_random": TRIALS,
        "evaluations_of_a_trial": of,
        "startup_seconds": STARTUP_SECONDS,
        "finish_seconds": FINISH_SECONDS,
        "evaluation_seconds": round(each, 3),
    }
    tell("search", figures, options.save)
    return None


if __name__ == "__main__":
    main()
