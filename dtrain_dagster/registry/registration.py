"""A finished training becomes a version in the registry with an alias: the one way for Dagster's asset and the command.

A node's report of its own model is not believed: the figures that the gate reads are made here. Of windows they follow
from the predictions in the run directory and the dataset's own targets. Of rows the weights are asked again, in a
process of their own (`smoke_test.Candidate.forecast`). What each other step does belongs to the other modules of this
room; what is shown of it, to the callers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.orders import MODEL_DIGESTS, keep_registration, order_of
from dtrain_dagster.jobs.progress import REGISTRATION
from dtrain_dagster.jobs.start import code_version
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.registry.base import Registry
from dtrain_dagster.registry.promotion import AliasDecision, choose_alias
from dtrain_dagster.registry.run_model import refuse_change
from dtrain_dagster.registry.smoke_test import Candidate, stored_predictions
from dtrain_dagster.registry.versions import (
    PACKED_TAG,
    RegisteredModel,
    TrainingProvenance,
    model_card,
    read_succeeded,
    script_card,
)
from trainer.data.manifest import load_manifest
from trainer.data.sampler import MOST_JUDGED, spread_positions
from trainer.evaluation.gate import Gate, gate, gate_document, judge_by_measure, score_of
from trainer.evaluation.row_scores import RowScoring
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir
from trainer.spec import ROWS, RowSpec
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from dtrain_dagster.registry.endpoint import EndpointCheck


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A version, and how it came by its alias."""

    model: RegisteredModel
    verdict: Gate
    evaluation: Mapping[str, Any]
    """The figures that the verdict rests on."""
    serving: EndpointCheck
    decision: AliasDecision
    replaced: str | None
    """The version that was champion before."""
    card: str


def register_job(
    models: Registry,
    home: str,
    run_dir: str,
    name: str,
    made: TrainingProvenance,
    *,
    experiment: str,
    cache_dir: str | None = None,
    told: Callable[[str], object] = lambda sentence: None,
) -> Registration:
    """Register the model of a job that succeeded under this name, have a real server answer for it, and give it its
    alias: champion where the gate passes, the server answers with its numbers and it beats the champion on the same
    samples. The model of a script is judged by its measure (`gate.judge_by_measure`). Raise `RegistryError`,
    `run_model.RunModelError`, `EvaluationError` and `smoke_test.AnswerError` as their modules say."""
    rundir = RunDir(run_dir)
    # Nodes write the run directory: it must agree with the order, and is read once.
    trained = Candidate(run_dir, order_of(home, rundir), cache_dir)
    job = trained.job
    result, evaluation = read_succeeded(rundir)
    if job.is_of_script:
        verdict = judge_by_measure(evaluation)
        card = script_card(name, job, result, evaluation, made, verdict)
    else:
        # A node wrote the evaluation: what the gate reads follows from the model and the dataset.
        evaluation = judge_again(trained, evaluation)
        verdict = gate(evaluation)
        manifest = load_manifest(open_storage(job.dataset.uri))
        card = model_card(name, job, result, evaluation, manifest, made, verdict)
    model = models.register_model(trained, name, made.tags(), card, experiment)
    names = (*MODEL_DIGESTS, "program_sha256", "example_sha256", PACKED_TAG)
    digests = {key: model.tags[key] for key in names if key in model.tags}
    # The version may have been there, of the job's name and other weights: its alias must not follow from these.
    refuse_change(run_dir, trained.own.digests, digests)
    if trained.order is not None:
        keep_registration(Path(home), job.job_id, {"name": model.name, "version": model.version, **digests})
    told(f"{model.name} version {model.version}; asking a scoring server for its numbers")
    serving = models.check_serving(trained, model)
    # A model that cannot be served must not become champion, however good it is.
    champion = None
    if serving.passed and verdict.passed:
        champion = models.judge_champion(trained, model)
    served = verdict if serving.passed else Gate(False, (f"serving failed: {serving.message}",))
    decision = choose_alias(served, champion)
    replaced = models.promote(model, decision)
    told(f"{decision.alias}: {decision.reason}")
    rundir.write_json(REGISTRATION, {"name": model.name, "version": model.version, "alias": decision.alias})
    return Registration(
        model=model,
        verdict=verdict,
        evaluation=evaluation,
        serving=serving,
        decision=decision,
        replaced=replaced,
        card=card,
    )


def provenance_of(
    rundir: RunDir,
    usage: Sequence[NodeUsage],
    nodes: int,
    cost: tuple[float | None, str],
    run_id: str = "",
    run_url: str | None = None,
) -> TrainingProvenance:
    """Return a version's record of its making. ``usage``: all that was paid for it; ``nodes``: of its last launch;
    ``cost``: of `jobs.totals.cost_of`; ``run_id``, ``run_url``: of the Dagster run."""
    took = sum_launches(usage)
    return TrainingProvenance(
        nodes=nodes,
        node_hours=took.node_hours,
        launches=max(1, took.launches),
        train_seconds=read_phase_totals(rundir, rundir.events()).get("training"),
        cost_usd=cost[1],
        cost_usd_total=cost[0],
        sku=", ".join(sorted({node.sku for node in usage})),
        code_version=code_version(),
        dagster_run_id=run_id,
        dagster_run_url=run_url,
    )


FIGURES = ("windows", "days", "first_date", "last_date", "model", "halves", "baselines")
"""The figures of windows that the gate and the model card read."""
TOLERANCE, LEAST = 1e-3, 1e-6
"""The relative and the absolute tolerance of the model's score: other kernels in single precision. The absolute one of
an error of numbers is in deviations of the target."""


class EvaluationError(ValueError):
    """A contradiction between a node's report and its model. The message names the figure."""


def judge_again(trained: Candidate, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's report with the figures of model and baselines as they come to here, and the verdict that
    follows. Raise `EvaluationError` where it says another score of the model, `AnswerError` for predictions that are
    none, and `run_model.RunModelError` for a model that does not answer."""
    spec = trained.own.spec
    is_table = isinstance(spec, RowSpec)
    found = _judge_rows(trained, evaluation) if is_table else _judge_windows(trained, evaluation)
    score = score_of(found)
    # Of a larger split of rows the node has judged all, and these are a part.
    if score is not None and not (is_table and trained.data.count("test") > MOST_JUDGED):
        given, least = evaluation.get("model"), LEAST * (spec.target_std if score == "rmse" else 1.0)
        said, figure = given.get(score) if isinstance(given, Mapping) else None, found["model"][score]
        if not isinstance(said, int | float) or not math.isclose(said, figure, rel_tol=TOLERANCE, abs_tol=least):
            raise EvaluationError(
                f"{trained.run_dir}/{EVALUATION} says model.{score} = {str(said)[:60]}, and from the model and the "
                f"dataset follows {str(figure)[:60]}: one of the files was changed after the training; nothing is "
                "registered. Train again, and check who can write there"
            )
    return found | {"gate": gate_document(found)}


def _judge_windows(trained: Candidate, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    from trainer.evaluation.window_report import Predictions, build_report, judge_baselines

    shards = trained.data
    rows = shards.end_rows("test", spread_positions(shards.count("test")))
    stored = stored_predictions(trained.rundir, shards, ("loss", "mu", "sigma", "nu"))
    target = shards.column(shards.spec.target, rows).astype(np.float64)  # the dataset's own, whatever nodes wrote
    predictions = Predictions(rows, target, *(values.astype(np.float64) for values in stored.values()))
    days = shards.dates(predictions.row).astype("datetime64[D]")
    try:
        with np.errstate(all="ignore"):
            found = build_report(predictions, days, judge_baselines(shards, "test"), shards.spec.horizon)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"{trained.run_dir}/{PREDICTIONS} cannot be judged ({error}): train again") from error
    return {**evaluation, **{name: found[name] for name in FIGURES}}


def _judge_rows(trained: Candidate, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with the figures of model, baselines and canary as they come to here. Other figures of the
    model stay the node's."""
    import numpy as np

    from trainer.evaluation.evaluate import SharedWork
    from trainer.evaluation.row_comparison import compare_rows

    data = trained.data
    scoring, positions, forecast = RowScoring(data.spec), spread_positions(data.count("test")), trained.forecast
    found: dict[str, Any] = {**evaluation, "kind": ROWS, "task": data.spec.task}
    scores, figures = np.full(len(positions), math.nan), dict.fromkeys(("log_loss", "rmse"))
    if forecast is not None:
        truth = data.samples("test", positions)[1].numpy()
        scores, figures = scoring.score(forecast, truth), scoring.figures(scoring.sums(forecast, truth))
    found["model"] = {**evaluation["model"], **figures}
    baselines, canary = compare_rows(data, scores, SharedWork())
    return found | {"baselines": baselines, "canaries": {"shuffled_targets": canary}}
