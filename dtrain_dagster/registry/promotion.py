"""The choice of the champion: decisions, and the comparison on the same windows that they rest on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    import pandas as pd
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
    data, is_table = trained.data, "task" in mine
    champion = Isolated(folder=its, kind="mlflow", seconds=CHAMPION_SECONDS)
    judged = spread_positions(data.count("test"))
    places = spread_positions(len(judged), MAX_WINDOWS)
    try:
        found = (_score_rows if is_table else _score_windows)(trained, champion, judged, places)
    except IsolationError as error:
        return _incomparable(version, f"it gave no forecasts of these samples: {error}")
    if found is None:
        return _incomparable(version, "one of the two forecasts something else than the other")
    metric, candidates, others = found
    return Comparison(
        champion_version=version,
        metric=metric,
        candidate=candidates,
        champion=others,
        windows=len(places),
        note=overlap_note(mine, champions, "" if is_table else data.manifest["splits"]["test"]["first"]),
        unit="rows" if is_table else "windows",
    )


def _score_windows(
    trained: Candidate, champion: Isolated, judged: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[str, float, float] | None:
    """Return the metric, and the scores of candidate and champion on windows; None where they have none in common."""
    shards = trained.data
    windows, target = shards.gather(shards.end_rows("test", judged[places]))
    stored = stored_predictions(trained.rundir, shards, ("mu", "sigma", "nu"))
    written = {name: values[places] for name, values in stored.items()}
    forecasts, truth = champion.predict(windows.numpy()), target.double().numpy()
    for metric, score in (("NLL", _nll), ("squared error", _squared_error)):
        candidates, others = score(written, truth), score(forecasts, truth)
        if candidates is not None and others is not None:
            return metric, candidates, others
    return None


def _score_rows(
    trained: Candidate, champion: Isolated, judged: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[str, float, float] | None:
    """Return the same of rows."""
    data, inputs = trained.data, _metadata(champion.folder)["inputs"]
    other = answers(
        lambda rows: champion.predict(as_taken(as_registered(data.spec, rows), inputs)), data, judged[places]
    )
    if trained.forecast is None or other is None:
        return None
    scoring, truth = RowScoring(data.spec), data.samples("test", judged[places])[1].numpy()
    metric = "squared error over variance" if scoring.is_number else "log-loss"
    scores = [float(scoring.score(each, truth).mean()) for each in (trained.forecast[places], other)]
    return metric, scores[0], scores[1]


def as_taken(rows: pd.DataFrame, inputs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows for a champion with these ``inputs``: whole numbers as doubles where it takes doubles, into which
    MLflow converts none."""
    double = {each["name"] for each in inputs if each["missing"] or each["type"] == "number"}
    return rows.astype({name: "float64" for name in rows if name in double and rows[name].dtype.kind == "i"})


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


def input_difference(own: Mapping[str, Any], its: Mapping[str, Any]) -> str:
    """Return why two models cannot take the same windows or rows or forecast different things; "" where they agree, as
    far as their metadata says. Whether it can take the columns of these rows, a model of a table finds out itself, by
    its signature; but any object would pass for text there."""
    by_name = bool(own.get("inputs"))
    if by_name and not its.get("inputs"):
        return "it was registered by an older version: train and register it again"
    for name in ("window", *(() if by_name else ("features",)), "target", "horizon", "task", "classes"):
        if own.get(name) != its.get(name):
            return f"its {name} is {its.get(name)!r}, not {own.get(name)!r}"
    types = {column["name"]: column["type"] for column in own["inputs"]} if by_name else {}
    for column in its["inputs"] if by_name else ():
        if (column["type"] == "string") != (types.get(column["name"], column["type"]) == "string"):
            return f"its column {column['name']!r} is of type {column['type']}, and here {types[column['name']]}"
    return ""


def _incomparable(version: str, why: str) -> Comparison:
    return Comparison(champion_version=version, metric="", candidate=None, champion=None, windows=0, note=why)


def overlap_note(own: Mapping[str, Any], its: Mapping[str, Any], test_first: str = "") -> str:
    """Return a warning where the champion was fitted or chosen on days that are now tested, or on another dataset of
    rows, else "". ``test_first``: the first day that is tested, of windows."""
    seen = its.get("valid_last") or its.get("train_last")
    if test_first and seen is not None and str(seen) >= test_first:
        return f"the champion saw days up to {seen} in training or validation, so this comparison favours it"
    if not test_first and its.get("dataset_id") != own.get("dataset_id"):
        return (
            "the champion was trained on another dataset, which may hold rows that are tested here; then the "
            "comparison favours it"
        )
    return ""


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
