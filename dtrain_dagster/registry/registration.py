"""A finished training becomes a version in the registry with an alias: the one way for Dagster's asset and the command.

What each step does belongs to the other modules of this room; what is shown of it, to the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.worth import chance_line
from dtrain_dagster.jobs.orders import MODEL_DIGESTS, keep_registration, order_of
from dtrain_dagster.jobs.progress import REGISTRATION, code_version
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.registry.base import Registry
from dtrain_dagster.registry.evaluated import judge_again
from dtrain_dagster.registry.promotion import AliasDecision, choose_alias
from dtrain_dagster.registry.run_model import refuse_change
from dtrain_dagster.registry.smoke_test import Candidate
from dtrain_dagster.registry.versions import (
    PACKED_TAG,
    RegisteredModel,
    TrainingProvenance,
    model_card,
    read_succeeded,
)
from dtrain_dagster.support.formatting import in_markdown
from trainer.config import JobConfig
from trainer.data.manifest import load_manifest
from trainer.evaluation.gate import Gate, gate, judge_by_measure
from trainer.rundir import RunDir
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
    `run_model.RunModelError`, `evaluated.EvaluationError` and `smoke_test.AnswerError` as their modules say."""
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


def script_card(
    name: str,
    job: JobConfig,
    result: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    made: TrainingProvenance,
    verdict: Gate,
) -> str:
    """Return the card of a script's model in Markdown."""
    figures = evaluation.get("model") or {}
    rows = [f"| {in_markdown(key, 100)} | {in_markdown(figures[key], 40)} |" for key in sorted(figures)]
    took = f"{made.node_hours:.4f} node-hours on {made.nodes} node(s){f' ({made.sku})' if made.sku else ''}"
    lines = [
        f"# {name}",
        f"The model `{in_markdown(job.model.args.get('class', ''), 200)}` of the script "
        f"`{in_markdown(job.dataset.uri.partition(':')[2], 200)}`, as a program of torch: it takes samples as the "
        "script's dataset gives them, and returns its outputs as they are.",
        "## How good it is",
        f"The gate passed: {chance_line(evaluation)}." if verdict.passed else f"Not passed: {verdict.reasons[0]}.",
        "\n".join([f"| {evaluation.get('split', 'no')} split | |", "| --- | --- |", *rows]),
        *(f"- {in_markdown(note)}" for note in evaluation.get("notes") or ()),
        "## How it was made",
        f"{result['steps']} steps on {result['world_size']} ranks; {took}; {made.cost_usd}; code {made.code_version}; "
        f"data `{in_markdown(job.dataset.dataset_id, 200)}`; job `{job.job_id}`.",
    ]
    return "\n\n".join(lines) + "\n"
