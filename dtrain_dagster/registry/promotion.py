"""The choice of the champion: decisions, and the comparison on the same windows that they rest on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtrain_dagster.registry.smoke_test import Candidate, answers, as_registered, stored_predictions
from trainer.data.sampler import spread_positions
from trainer.evaluation.gate import Gate
from trainer.evaluation.row_scores import RowScoring
from trainer.isolation.runner import Isolated, IsolationError
from trainer.rundir import EVALUATION

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Alias = Literal["champion", "challenger"]
MAX_WINDOWS = 50_000
"""The most test windows or rows of a comparison of candidate and champion, spread evenly over the split."""
CHAMPION_SECONDS = 300.0
"""The longest time of the champion's forecasts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The scores of candidate and champion on the same windows, rows or samples; lower is better, unless it says so."""

    champion_version: str
    metric: str
    """Such as ``NLL`` or ``log-loss``; empty where they cannot be compared."""
    candidate: float | None
    champion: float | None
    windows: int
    """The number of windows, or of rows."""
    note: str
    """The reason why they cannot be compared, or a remark on the comparison; may be empty."""
    unit: str = "windows"
    higher_is_better: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasDecision:
    """The alias that a version gets, and the reason."""

    alias: Alias
    reason: str


def choose_alias(verdict: Gate, champion: Comparison | None) -> AliasDecision:
    """Return ``champion`` only for a model that passed the gate and beats the current champion on the same windows.

    The argument ``champion`` is None where there is none yet. Where the two cannot be compared, the gate decides, and
    the reason says so.
    """
    if not verdict.passed:
        return AliasDecision(alias="challenger", reason="the gate did not pass: " + "; ".join(verdict.reasons))
    if champion is None:
        return AliasDecision(alias="champion", reason="the gate passed, and there is no other champion")
    rival = f"champion (version {champion.champion_version})"
    if champion.candidate is None or champion.champion is None:
        return AliasDecision(
            alias="champion",
            reason=f"the gate passed; it was not compared with the {rival}, because {champion.note}",
        )
    # Compared as shown: a difference in the sixth digit is rounding, not skill.
    candidate, other = round(champion.candidate, 5), round(champion.champion, 5)
    better = candidate > other if champion.higher_is_better else candidate < other
    verb = "beats" if better else "does not beat"
    reason = (
        f"the gate passed; {champion.metric} {champion.candidate:.5f} {verb} the {rival}'s {champion.champion:.5f} on "
        f"the same {champion.windows:,} test {champion.unit}"
    )
    if champion.note:
        reason += f" ({champion.note})"
    return AliasDecision(alias="champion" if better else "challenger", reason=reason)


def compare(trained: Candidate, version: str, own: Path, its: Path) -> Comparison:
    """Score the champion, ``version``, on the test windows of a job, against the predictions that its training wrote;
    or on the test rows, against what its weights answer. ``own`` and ``its``: the folders of the candidate's and the
    champion's files. The champion answers with the code it was registered with, in a process of its own. Where its
    input means something else, or it does not load, the comparison says why. Raise `AnswerError` for predictions of
    another dataset."""
    if trained.job.is_of_script:
        return compare_measures(version, *(json.loads((folder / EVALUATION).read_text()) for folder in (own, its)))
    mine, champions = _metadata(own), _metadata(its)
    if difference := input_difference(mine, champions):
        return _incomparable(version, difference)
    champion = Isolated(folder=its, kind="mlflow", seconds=CHAMPION_SECONDS)
    if "task" in mine:
        return _compare_rows(trained, version, champions, champion)
    shards = trained.data
    judged = spread_positions(shards.count("test"))
    positions = spread_positions(len(judged), MAX_WINDOWS)
    windows, target = shards.gather(shards.end_rows("test", judged[positions]))
    stored = stored_predictions(trained.rundir, shards, ("mu", "sigma", "nu"))
    written = {name: values[positions] for name, values in stored.items()}
    try:
        forecasts = champion.predict(windows.numpy())
    except IsolationError as error:
        return _incomparable(version, f"it could not be loaded: {error}")
    truth = target.double().numpy()
    for metric, score in (("NLL", _nll), ("squared error", _squared_error)):
        candidates, others = score(written, truth), score(forecasts, truth)
        if candidates is not None and others is not None:
            return Comparison(
                champion_version=version,
                metric=metric,
                candidate=candidates,
                champion=others,
                windows=len(positions),
                note=overlap_note(champions, shards.manifest["splits"]["test"]["first"]),
            )
    return _incomparable(version, "one forecasts a distribution or a point, and the other does neither")


def compare_measures(version: str, own: Mapping[str, Any], its: Mapping[str, Any]) -> Comparison:
    """Compare the measures that two scripts' reports have of the same test samples. Pure."""
    mine, champions = own.get("chance") or {}, its.get("chance") or {}
    for name, why in (("figure", "by another figure"), ("mode", "in another mode"), ("samples", "on other samples")):
        if mine.get(name) != champions.get(name) or not mine.get(name):
            return _incomparable(version, f"it was judged {why}")
    return Comparison(
        champion_version=version,
        metric=mine["figure"],
        candidate=mine["value"],
        champion=champions["value"],
        windows=int(own["model"]["samples"]),
        note="as their trainings reported them",
        unit="samples",
        higher_is_better=mine["mode"] == "max",
    )


def _compare_rows(trained: Candidate, version: str, its: Mapping[str, Any], champion: Isolated) -> Comparison:
    data = trained.data
    judged = spread_positions(data.count("test"))
    places = spread_positions(len(judged), MAX_WINDOWS)
    positions = judged[places]

    def ask(rows: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        return champion.predict(as_registered(data.spec, rows))

    try:
        other = answers(ask, data, positions)
    except IsolationError as error:
        return _incomparable(version, f"it gave no forecasts of these rows: {error}")
    if trained.forecast is None or other is None:
        return _incomparable(version, "one of the two forecasts neither classes nor a number")
    scoring, truth = RowScoring(data.spec), data.samples("test", positions)[1].numpy()
    foreign = (
        "the champion was trained on another dataset, which may hold rows that are tested here; then the comparison "
        "favours it"
    )
    return Comparison(
        champion_version=version,
        metric="squared error over variance" if scoring.is_number else "log-loss",
        candidate=float(scoring.score(trained.forecast[places], truth).mean()),
        champion=float(scoring.score(other, truth).mean()),
        windows=len(positions),
        note="" if its.get("dataset_id") == data.spec.dataset_id else foreign,
        unit="rows",
    )


def input_difference(own: Mapping[str, Any], its: Mapping[str, Any]) -> str:
    """Return why two models cannot take the same windows or rows or forecast different things; "" where they agree. Two
    models of tables take rows by the names of the columns: the candidate's have to be those that the champion needs."""
    by_name = bool(own.get("inputs"))
    if by_name and not its.get("inputs"):
        return "it was registered by an older version: train and register it again"
    for name in ("window", *(() if by_name else ("features",)), "target", "horizon", "task", "classes"):
        if own.get(name) != its.get(name):
            return f"its {name} is {its.get(name)!r}, not {own.get(name)!r}"
    known = {column["name"]: column for column in own["inputs"]} if by_name else {}
    for column in its["inputs"] if by_name else ():
        mine = known.get(column["name"], {})
        if not mine and not column["missing"]:
            return f"it needs the column {column['name']!r}, which these rows do not have"
        if mine and not _is_taken(mine, column):
            return f"its column {column['name']!r} is a {_told(column)}, and here a {_told(mine)}"
    return ""


def _is_taken(given: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Return whether a model that asks for one column takes another. Pure."""
    if given["missing"] and not asked["missing"] and asked["type"] != "string":
        return False
    return given["type"] == asked["type"] or (given["type"], asked["type"]) == ("integer", "number")


def _told(column: Mapping[str, Any]) -> str:
    return f"{column['type']} that may be missing" if column["missing"] else column["type"]


def _incomparable(version: str, why: str) -> Comparison:
    return Comparison(champion_version=version, metric="", candidate=None, champion=None, windows=0, note=why)


def overlap_note(its: Mapping[str, Any], test_first: str) -> str:
    """Return a warning where the champion was fitted or chosen on days that are now tested, else ""."""
    seen = its.get("valid_last") or its.get("train_last")
    if seen is None or str(seen) < test_first:
        return ""
    return f"the champion saw days up to {seen} in training or validation, so this comparison favours it"


def _metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that registration wrote beside the signature."""
    from mlflow.models import Model

    return Model.load(str(folder)).metadata or {}


def _nll(columns: Mapping[str, NDArray], target: NDArray) -> float | None:
    """Return the mean NLL; None for columns without a distribution. A missing ``nu`` means a normal distribution."""
    import numpy as np
    import torch

    from trainer.model.losses import student_t_nll

    if "sigma" not in columns or not np.isfinite(columns["sigma"]).all():
        return None
    nu = columns.get("nu", np.full_like(columns["sigma"], np.inf))
    mu, sigma, shape, y = (
        torch.from_numpy(np.asarray(each, dtype=np.float64)) for each in (columns["mu"], columns["sigma"], nu, target)
    )
    return float(student_t_nll(mu, sigma, shape, y).mean())


def _squared_error(columns: Mapping[str, NDArray], target: NDArray) -> float | None:
    import numpy as np

    point = columns.get("prediction", columns.get("mu"))
    return None if point is None or not np.isfinite(point).all() else float(np.mean((point - target) ** 2))
