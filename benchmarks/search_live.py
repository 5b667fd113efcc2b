"""Whether searches that are played agree with one that is run.

`python -m benchmarks.search_live` runs a small search on the local cluster, as `dtrain search` does: processes, a
fleet, bills. Then the same search is played on the curves that it recorded, with `benchmarks.search_policies`.

    same_decisions      trials of the played search with the same values, the same evaluations and the same end, of all
    usd_live            what the cluster billed for the trials
    played_vs_live      dollars of the played search, over those
    trials              each: evaluations and end, live and played
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.host import Workplace, tell
from benchmarks.search import SPACE, base_job
from benchmarks.search_policies import USD_PER_NODE_HOUR, Recorded, play, pool_of
from dtrain_dagster.planning.check_job import samples_of
from dtrain_dagster.search.run import SearchRequest, measure_trial, open_search
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.space import parse_space
from dtrain_dagster.search.trials import Trial, TrialSeconds

NODES = 2


def run_live(folder: Path, settings: SearchSettings, epochs: int) -> tuple[list[Trial], TrialSeconds]:
    """Return the trials of a search that was run in ``folder``, and what it took a trial to take."""
    base = base_job(folder)
    base = replace(base, training=replace(base.training, epochs=epochs))
    workplace = Workplace(folder, base.dataset)
    base.run_dir = f"{folder}/storage/jobs/live"
    request = SearchRequest(
        name="live", space=SPACE, settings=settings, base=base, samples=samples_of(base), budget_usd=None,
        nodes=NODES, usd_per_node_hour=USD_PER_NODE_HOUR,
    )  # fmt: skip

    def measure() -> tuple[TrialSeconds, float]:
        return measure_trial(workplace.manager, request, workplace.env, True, lambda sentence: None)

    search = open_search(folder, request, workplace.manager, workplace.env, measure)
    source = search.run(lambda trials, line: print(line, file=sys.stderr, flush=True))
    return list(source.trials), search.expected


def replayed(trials: list[Trial], expected: TrialSeconds, settings: SearchSettings) -> tuple[list[Trial], float]:
    """Return the trials of the same search played on these, and its dollars. Where it wants an evaluation that there
    is not, or values that were not drawn, it decides otherwise: such a trial ends there, as one without a number."""
    usual = billed_seconds(trials, expected)
    rows = [Recorded(trial.values, padded(trial), pace(trial) or usual.evaluation) for trial in trials]
    pool = pool_of(parse_space(SPACE), rows)
    played = play(pool, expected, settings, actual=usual)
    return list(played.ended), played.usd


def pace(trial: Trial) -> float | None:
    """Return the seconds from one evaluation of a trial to the next, in the middle; None where it had not two."""
    gaps = [after - before for before, after in pairwise(trial.times)]
    return statistics.median(gaps) if gaps else None


def billed_seconds(trials: list[Trial], expected: TrialSeconds) -> TrialSeconds:
    """Return what trials took by their bills: what was paid beyond their evaluations is the start."""
    each = {trial.number: pace(trial) or expected.evaluation for trial in trials}
    starts = [max(0.0, trial.node_seconds - each[trial.number] * len(trial.scores)) for trial in trials]
    training = statistics.median(each.values()) * expected.of
    return TrialSeconds(startup=statistics.median(starts), training=training, of=expected.of, finish=0.0)


def padded(trial: Trial) -> tuple[float, ...]:
    """Return the scores of a trial as if it had gone to its end."""
    return trial.scores + (math.nan,) * (trial.of - len(trial.scores))


def main() -> None:
    """Run, play, and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_live", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    settings = SearchSettings(trials=asked.trials, parallel=NODES, seed=asked.seed)
    with tempfile.TemporaryDirectory(prefix="dtrain-search-") as folder:
        live, expected = run_live(Path(folder), settings, asked.epochs)
    played, usd = replayed(live, expected, settings)
    rows = [
        {
            "evaluations": [len(one.scores), len(other.scores)],
            "ended": [str(one.state), str(other.state)],
            "same": (one.values, one.scores, one.state) == (other.values, other.scores, other.state),
        }
        for one, other in zip(live, played, strict=True)
    ]
    billed = sum(trial.usd for trial in live)
    figures = {
        "same_decisions": f"{sum(bool(row['same']) for row in rows)} of {len(rows)}",
        "usd_live": round(billed, 6),
        "played_vs_live": round(usd / billed, 4),
        "trials": rows,
        "evaluations_of_a_trial": asked.epochs,
        "parallel": NODES,
        "expected_seconds": {"startup": round(expected.startup, 2), "evaluation": round(expected.evaluation, 3)},
    }
    tell("search_live", figures, asked.save)


if __name__ == "__main__":
    main()
