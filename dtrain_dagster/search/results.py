"""What a search has found, what each improvement has cost, and the files in which that is kept.

<home>/searches/<name>/search.json   what was asked for, and what a trial takes; written before the first trial
<home>/searches/<name>/result.json   all trials, dollars and improvements; written at the end
<home>/searches/<name>/best.json     settings of the best trial, for `dtrain train --settings` and a launchpad
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain_dagster.search.space import SpaceError, job_of_trial, shown_values
from dtrain_dagster.search.trials import SearchSettings, Trial, TrialState, best_trial
from dtrain_dagster.support.formatting import dollars
from trainer.config import PARTS, JobConfig

FOLDER = "searches"
SEARCH, RESULT, BEST = "search.json", "result.json", "best.json"


def search_names(home: Path) -> list[str]:
    """Return the names of the searches of this home, the newest first."""
    found = [path.parent for path in (Path(home) / FOLDER).glob(f"*/{SEARCH}")]
    return [path.name for path in sorted(found, key=lambda path: (path / SEARCH).stat().st_mtime, reverse=True)]


def search_folder(home: Path, name: str) -> Path:
    """Return the folder of a search."""
    return home / FOLDER / name


def kept_search(home: Path, name: str) -> dict[str, Any] | None:
    """Return what was kept of a search when it began; None where there is none. Raise `SpaceError` for one of an older
    version."""
    found = _read(search_folder(home, name) / SEARCH, "choose another name, or remove the folder")
    if found is not None and "measured_by" not in found:
        raise SpaceError(
            f"search {name} was begun by an older version, which kept less of it: begin it again under another name "
            f"(`dtrain search --show {name}` still shows what it has found)"
        )
    return found


def kept_result(home: Path, name: str) -> dict[str, Any]:
    """Return what a search has found (`result_document`). Raise `SpaceError` where it is not over."""
    found = _read(search_folder(home, name) / RESULT, "repeat the search, which writes it anew")
    if found is None:
        raise SpaceError(f"search {name} has no result yet: `dtrain status {name}` says how it goes")
    return found


def _read(path: Path, remedy: str) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SpaceError(f"{path} is damaged: {error}; {remedy}") from None
    return found if isinstance(found, dict) else None


def improvements(trials: Sequence[Trial], sign: float) -> list[dict[str, Any]]:
    """Return each trial that was the best of those that had ended until then, in order of time. ``usd``: the bills of
    all of these; ``gained``: how much better than the best before, None for the first; ``usd_since``: dollars since
    then. A trial that was never evaluated counts from the beginning."""
    found: list[dict[str, Any]] = []
    usd = 0.0
    for trial in sorted(trials, key=lambda trial: (trial.times[-1:], trial.number)):
        if not trial.state.is_final:
            continue
        usd += trial.usd
        score, before = trial.best(sign), found[-1] if found else None
        if score is None or (before and sign * score >= sign * before["score"]):
            continue
        gained = sign * (before["score"] - score) if before else None
        since = usd - (before["usd"] if before else 0.0)
        found.append({"trial": trial.number, "score": score, "usd": usd, "gained": gained, "usd_since": since})
    return found


def settings_document(name: str, settings: SearchSettings, trial: Trial, base: JobConfig) -> dict[str, Any]:
    """Return the content of a file of settings for the trial, as `dtrain_dagster.planning.tuned_settings` reads it:
    what differs from the job that was varied, and the evidence."""
    job, drawn = job_of_trial(base, trial.values), trial.values
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
        "improvements": improvements(trials, sign),
        **extra,
    }


def summary(result: Mapping[str, Any]) -> list[str]:
    """Return the result in sentences: the verdict, the dollars, the improvements, and how the best is used. Pure."""
    best, planned = result["best"], result["planned"]
    counts = ", ".join(f"{count} {state}" for state, count in result["counts"].items())
    measured = f", with the {dollars(result['measuring_usd'])} of measuring one" if result["measuring_usd"] else ""
    paid = (
        f"{len(result['trials'])} trials ({counts}) cost {dollars(result['usd'])}{measured}; the plan was at most "
        f"{dollars(planned['at_most_usd'])}, with {dollars(planned['expected_usd'])} expected"
    )
    if best is None:
        reason = next((row["reason"] for row in result["trials"] if row["reason"]), "")
        why = f" ({reason})" if reason else ""
        return [f"no trial was evaluated{why}: see `dtrain logs` of one for why", paid]
    found = f"best: trial {best['trial']}, {result['metric']} {best['score']:.6g} with {shown_values(best['values'])}"
    use = result.get("command") or f"dtrain train … --settings {result['settings_file']}"
    return [found, paid, *improvement_lines(result), f"use it: {use}"]


def improvement_lines(result: Mapping[str, Any]) -> list[str]:
    """Return each improvement with its price. Pure."""
    return [
        f"trial {item['trial']}: {result['metric']} {item['score']:.6g}, better by {item['gained']:.3g} for "
        f"{dollars(item['usd_since'])}"
        for item in result["improvements"][1:]
    ]


def trial_line(trial: Trial, sign: float) -> str:
    """Return how a trial has ended, in a line. Pure."""
    best = trial.best(sign)
    score = "no score" if best is None else f"{best:.6g}"
    why = f": {trial.reason}" if trial.reason else ""
    return (
        f"trial {trial.number} {trial.state}, {score} after {len(trial.scores)}/{trial.of} evaluations, "
        f"{dollars(trial.usd)} ({shown_values(trial.values)}){why}"
    )
