"""What a search has found, and what each improvement has cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from dtrain_dagster.search.check_space import job_of_trial, shown_values
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.trials import Trial, TrialState, best_trial
from dtrain_dagster.support.formatting import dollars
from trainer.config import PARTS, JobConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """A trial that was the best of the search so far, as good as it was before another one was better."""

    trial: int
    score: float
    usd: float
    """Dollars of all trials until then."""
    gained: float | None
    """How much better than the best before; None for the first one."""
    usd_since: float
    """Dollars since the best before."""

    @property
    def usd_per_gain(self) -> float | None:
        """Return the dollars for an improvement by 1, at the price of this one."""
        return self.usd_since / self.gained if self.gained else None


def improvements(trials: Sequence[Trial], sign: float) -> list[Improvement]:
    """Return the improvements in order of time."""
    seen = sorted(
        (time, trial.number, score)
        for trial in trials
        for time, score in zip(trial.times, trial.scores, strict=True)
        if score == score  # not a NaN
    )
    found: list[Improvement] = []
    for time, number, score in seen:
        before = found[-1] if found else None
        if before is not None and sign * score >= sign * before.score:
            continue
        if before is not None and before.trial == number:  # it only went on to improve
            found.pop()
            before = found[-1] if found else None
        usd = spent_until(trials, time)
        found.append(
            Improvement(
                trial=number,
                score=score,
                usd=usd,
                gained=None if before is None else sign * (before.score - score),
                usd_since=usd - (before.usd if before else 0.0),
            )
        )
    return found


def spent_until(trials: Sequence[Trial], time: float) -> float:
    """Return the dollars of all trials until a time. The bill of each is spread evenly from one evaluation's length
    before its first evaluation to its last one."""
    total = 0.0
    for trial in trials:
        if not trial.times:
            total += trial.usd if trial.state.is_final else 0.0
            continue
        gaps = [after - before for before, after in pairwise(trial.times)]
        begin, end = trial.times[0] - (max(gaps) if gaps else 1.0), trial.times[-1]
        total += trial.usd * min(1.0, max(0.0, (time - begin) / max(1e-9, end - begin)))
    return total


def settings_document(
    name: str, space: Space, settings: SearchSettings, trial: Trial, base: JobConfig
) -> dict[str, Any]:
    """Return the content of a file of settings for the trial, as `dtrain_dagster.planning.tuned_settings` reads it:
    what differs from the job that was varied, and the evidence."""
    job = job_of_trial(base, space, trial.values)
    drawn = space.fields_of(trial.values)
    training = {field.partition(".")[2]: value for field, value in drawn.items() if field.startswith("training.")}
    parts = {part: asdict(getattr(job, part)) for part in PARTS if any(field.startswith(f"{part}.") for field in drawn)}
    evidence = {
        "search": name, "trial": trial.number, "metric": settings.metric, "score": trial.best(settings.sign),
        "evaluations": len(trial.scores), "of": trial.of, "dataset_id": base.dataset.dataset_id,
        "world_size": base.training.world_size, **{part: asdict(base)[part] for part in PARTS},
        "complete": trial.state is TrialState.COMPLETE, "values": dict(trial.values),
    }  # fmt: skip
    return {"training": training, **parts, "evidence": evidence}


def as_row(trial: Trial, sign: float) -> dict[str, Any]:
    """Return a trial as a row for people and for JSON."""
    return {
        "trial": trial.number,
        "state": str(trial.state),
        "score": trial.best(sign),
        "evaluations": f"{len(trial.scores)}/{trial.of}",
        "usd": trial.usd,
        "node_seconds": round(trial.node_seconds, 1),
        "values": dict(trial.values),
        "reason": trial.reason,
    }


def best_first(trials: Sequence[Trial], sign: float) -> list[Trial]:
    """Return the trials by their best score, those without one last."""

    def place(trial: Trial) -> tuple[bool, float, int]:
        score = trial.best(sign)
        return score is None, 0.0 if score is None else sign * score, trial.number

    return sorted(trials, key=place)


def result_document(
    trials: Sequence[Trial], settings: SearchSettings, before_usd: float, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole result of a search as plain data."""
    sign = settings.sign
    best = best_trial(trials, sign)
    counts = {str(state): sum(trial.state is state for trial in trials) for state in TrialState}
    return {
        "metric": settings.metric,
        "best": None if best is None else as_row(best, sign),
        "trials": [as_row(trial, sign) for trial in trials],
        "counts": {name: count for name, count in counts.items() if count},
        "usd": before_usd + sum(trial.usd for trial in trials),
        "measuring_usd": before_usd,
        "improvements": [{**asdict(item), "usd_per_gain": item.usd_per_gain} for item in improvements(trials, sign)],
        **extra,
    }


def summary(result: Mapping[str, Any]) -> list[str]:
    """Return the result in sentences. Pure."""
    counts = ", ".join(f"{count} {state}" for state, count in result["counts"].items())
    planned = result["planned"]
    measured = f", with the {dollars(result['measuring_usd'])} of measuring one" if result["measuring_usd"] else ""
    lines = [
        f"{len(result['trials'])} trials ({counts}) cost {dollars(result['usd'])}{measured}; the plan was at most "
        f"{dollars(planned['at_most_usd'])}, with {dollars(planned['expected_usd'])} expected"
    ]
    for item in result["improvements"][1:]:
        lines.append(
            f"  trial {item['trial']}: {result['metric']} {item['score']:.6g}, better by {item['gained']:.3g} for "
            f"{dollars(item['usd_since'])}"
        )
    if (best := result["best"]) is not None:
        lines.append(
            f"best: trial {best['trial']}, {result['metric']} {best['score']:.6g} with {shown_values(best['values'])}"
        )
        use = result.get("command") or f"dtrain train … --settings {result['settings_file']}"
        lines.append(f"use it: {use}")
    else:
        lines.append("no trial was evaluated: see `dtrain logs` of one for why")
    return lines
