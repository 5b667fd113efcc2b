"""The parts of a registration: what a version is, and what it says of its training in tags and in the model card. The
MLflow model is packed by `base`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.costs.worth import chance_line, worth_line
from dtrain_dagster.support.formatting import in_markdown
from dtrain_dagster.support.secrets import redact
from trainer.config import FactoryConfig, JobConfig
from trainer.data.manifest import load_manifest
from trainer.elastic.generation_record import generations
from trainer.evaluation.gate import IN_WORDS, POINT_RULE, RULE, Gate
from trainer.observability.mlflow_sink import GATE_TAG, ensure_experiment
from trainer.observability.mlflow_sqlite import make_tables
from trainer.rundir import EVALUATION, RESULT, TRACKING, RunDir
from trainer.spec import REGRESSION, ROWS, WINDOWS
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from mlflow import MlflowClient

JOB_TAG, WEIGHTS_TAG = "job_id", "weights_sha256"
MODEL_PATH = "model"
CARD = "model_card.md"
DESCRIPTION_LIMIT = 5000
"""The number of characters that a registry keeps of a description; the whole card is an artifact of the run."""


PACKED_TAG = "packed_sha256"
"""The version's tag with the digest of all registered files. Nodes report metrics; they change no versions."""
_ADDED = "registered_model_meta"
"""A file that MLflow itself adds to a model that it gives out."""


class RegistryError(ValueError):
    """A refusal of a job's model that cannot be registered. The message says what is missing and the remedy."""


class PackedError(ValueError):
    """A refusal of a registered model that cannot be used. The message names it and says why."""


def folder_digest(folder: Path) -> str:
    """Return the sha256 over the names and the contents of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(item for item in folder.rglob("*") if item.is_file() and item.name != _ADDED):
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def refuse_changed_files(what: str, folder: Path, expected: str | None) -> None:
    """Raise `PackedError` where the files are not the registered ones, or nothing says which were registered."""
    if not expected:
        raise PackedError(
            f"{what} has no tag {PACKED_TAG}: it was registered by an older version, or not by dtrain; register its "
            "job again, or take the alias champion from it"
        )
    if (found := folder_digest(folder)) != expected:
        raise PackedError(
            f"{what}: its files have the digest {found[:12]}…, but {expected[:12]}… was registered: they were "
            "changed since, and are not loaded; register the model again, and check who can write there"
        )


@contextmanager
def explained(what: str, setting: str) -> Iterator[None]:
    """Within the block, turn any error of MLflow, a database, a network or a disk into `RegistryError`."""
    try:
        yield
    except Exception as error:  # each store of artifacts has errors of its own
        said = redact(str(error)).strip().splitlines() or [type(error).__name__]
        raise RegistryError(f"{what} ({said[0][:500]}): a model could not be registered; see {setting}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredModel:
    """A version in the registry."""

    name: str
    version: str
    run_id: str
    """The MLflow run that trained it."""
    created: bool
    """False where the job had been registered before: nothing was written then."""
    tags: Mapping[str, str] = field(default_factory=dict)
    asset_uri: str | None = None
    """Its address, where the registry is not MLflow's own."""

    @property
    def uri(self) -> str:
        """The version's address; in MLflow's registry one that ``mlflow models serve -m`` and
        ``mlflow.pyfunc.load_model`` take."""
        return self.asset_uri or f"models:/{self.name}/{self.version}"


def read_succeeded(rundir: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``result.json`` and ``evaluation.json``. Raise `RegistryError` for a training that did not succeed."""
    result, evaluation = rundir.read_json(RESULT), rundir.read_json(EVALUATION)
    if result is None or evaluation is None or result.get("status") != "succeeded":
        status = f"status {result.get('status')!r}" if result else f"no {RESULT}"
        raise RegistryError(f"{rundir.uri} has {status}: only a training that succeeded can be registered")
    return result, evaluation


RUN_TAGS = (JOB_TAG, "dataset_id", "run_dir", "code_version", "dagster_run_id", GATE_TAG, "sku", "nodes", WEIGHTS_TAG)
"""The tags of a version that its run has, too: by which runs are found and compared."""


def tags_of_run(tags: Mapping[str, str]) -> dict[str, str]:
    """Return those tags of a version that its run gets. Pure."""
    return {name: tags[name] for name in RUN_TAGS if name in tags}


def job_tags(
    rundir: RunDir, result: Mapping[str, Any], evaluation: Mapping[str, Any], job: JobConfig
) -> dict[str, str]:
    """Return the facts of a run directory as tags of the version. ``job``: as it was ordered."""
    of_script = {"script": job.dataset.uri.partition(":")[2], "model": job.model.args.get("class")}
    of_script |= {"loss": job.loss.args.get("class")}
    dataset_id = job.dataset.dataset_id
    if not job.is_of_script:
        of_script, dataset_id = {}, load_manifest(open_storage(job.dataset.uri))["dataset_id"]
    history = generations(rundir.storage)
    sizes = [len(item.members) for item in history] or [result["world_size"]]
    modes = dict.fromkeys("parameter server" if item.topology == "star" else "all-reduce" for item in history)
    training, how = job.training, ", ".join(modes) or "all-reduce"
    values = {
        JOB_TAG: job.job_id,
        "dataset_id": dataset_id,
        "model": job.model.factory,
        "loss": job.loss.factory,
        "world_size": result["world_size"],
        "world_size_history": " → ".join(map(str, sizes)),
        "strategy": f"{training.strategy}, {how} ({result['backend']}, {training.precision})",
        "steps": result["steps"],
        "weights_sha256": result["weights_sha256"],
        "checkpoint": result.get("checkpoint"),
        "checkpoint_uri": f"{rundir.uri}/{result['checkpoint']}" if result.get("checkpoint") else None,
        "run_dir": rundir.uri,
        "best_valid_loss": result.get("best_valid_loss"),
        "test_nll": evaluation["model"].get("nll"),
        "test_loss": evaluation["model"].get("loss"),
        **of_script,
    }
    return {name: f"{value:.6f}" if isinstance(value, float) else str(value) for name, value in values.items() if value}


def tracking_run(client: MlflowClient, rundir: RunDir, tracking_uri: str, experiment: str, job_id: str) -> str:
    """Return the id of the MLflow run for a version: the trainer's where it still exists, else the job's that an
    earlier registration has made, else a new one that is finished at once."""
    from mlflow.exceptions import MlflowException

    run_id = (rundir.read_json(TRACKING) or {}).get("mlflow_run_id")
    if run_id:
        try:
            run = client.get_run(run_id)
            # Nodes name the run, and may name another job's.
            if run.info.lifecycle_stage == "active" and run.data.tags.get(JOB_TAG) == job_id:
                return run_id
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # or is no run's name
                raise
    experiment_id = ensure_experiment(client, experiment, tracking_uri)

    def oldest() -> str:
        known = client.search_runs([experiment_id], f"tags.{JOB_TAG} = '{job_id}'")
        return min(((run.info.start_time or 0, run.info.run_id) for run in known), default=(0, ""))[1]

    if not (first := oldest()):
        made = client.create_run(experiment_id, run_name=job_id, tags={JOB_TAG: job_id}).info.run_id
        first = oldest() or made
        if first != made:  # another process has made one at the same time
            client.delete_run(made)
    client.set_terminated(first)
    return first


def description(card: str) -> str:
    """Return the card, cut at a line's end to `DESCRIPTION_LIMIT` with a note on where the whole card is."""
    if len(card) <= DESCRIPTION_LIMIT:
        return card
    note = f"\n\n… the whole card is `{CARD}` beside the model."
    return card[: DESCRIPTION_LIMIT - len(note)].rsplit("\n", 1)[0] + note


def open_client(tracking_uri: str) -> MlflowClient:
    """Return a client of the tracking server, which is the registry too."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a progress bar is noise in a log
    from mlflow import MlflowClient

    make_tables(tracking_uri)
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProvenance:
    """The facts of a training that only the orchestrator knows."""

    nodes: int
    node_hours: float
    cost_usd: str
    """The dollars in words, with the basis of the price: ``$0.0042, a stand-in price, nothing was billed``."""
    code_version: str
    dagster_run_id: str
    dagster_run_url: str | None = None
    sku: str = ""
    """The SKU of the nodes; several, separated by commas, where they differed."""
    cost_usd_total: float | None = None
    """The same dollars as ``cost_usd``, as a number."""
    launches: int = 1
    """The number of launches of the job, of all of which these figures are."""
    train_seconds: float | None = None
    """Seconds of training; None: those of the result, which are of the last launch."""

    def tags(self) -> dict[str, str]:
        """Return these facts as tags of a model version; see `job_tags`."""
        values = {
            "nodes": self.nodes,
            "node_hours": f"{self.node_hours:.6f}",
            "cost_usd": self.cost_usd,
            "code_version": self.code_version,
            "dagster_run_id": self.dagster_run_id,
            "dagster_run_url": self.dagster_run_url,
            "sku": self.sku,
            "launches": self.launches if self.launches > 1 else None,
            "cost_usd_total": None if self.cost_usd_total is None else f"{self.cost_usd_total:.6f}",
        }
        return {name: str(value) for name, value in values.items() if value}


def model_card(
    model_name: str,
    job: JobConfig,
    result: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    manifest: Mapping[str, Any],
    provenance: TrainingProvenance,
    verdict: Gate,
) -> str:
    """Return the card in Markdown (`card.md.jinja`): what the model is, its data and cost, how good it is, and what it
    cannot do. It is made from the job's files (``result.json``, ``evaluation.json``, the dataset's
    ``manifest.json``)."""
    is_table, has_distribution = manifest.get("kind", WINDOWS) == ROWS, evaluation["model"].get("nll") is not None
    names = {
        role: [column["name"] for column in manifest["columns"] if column["role"] == role]
        for role in ("feature", "target")
    }
    trained = provenance.train_seconds
    return _render(
        "card.md.jinja",
        name=model_name,
        is_table=is_table,
        has_distribution=has_distribution,
        regression=REGRESSION,
        features=[in_markdown(name, 100) if is_table else f"`{name}`" for name in names["feature"]],
        target=", ".join(in_markdown(name, 100) for name in names["target"]),
        classes=", ".join(in_markdown(name, 100) for name in manifest.get("classes", ())),
        model=_shown(job.model),
        loss=_shown(job.loss),
        rule=f"{RULE}; {IN_WORDS[ROWS if is_table else WINDOWS]}" if is_table or has_distribution else POINT_RULE,
        worth=worth_line(evaluation, provenance.cost_usd_total),
        scores=scores_table(evaluation, is_table),
        calibration=() if is_table else evaluation.get("calibration") or (),
        warnings=[check["name"] for check in manifest.get("checks", ()) if not check["passed"]],
        train_seconds=result["train_seconds"] if trained is None else trained,
        job=job,
        result=result,
        evaluation=evaluation,
        manifest=manifest,
        verdict=verdict,
        source=manifest["source"],
        made=provenance,
    )


def script_card(
    model_name: str,
    job: JobConfig,
    result: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    provenance: TrainingProvenance,
    verdict: Gate,
) -> str:
    """Return the card of a script's model in Markdown (`script_card.md.jinja`)."""
    return _render(
        "script_card.md.jinja",
        name=model_name,
        script=job.dataset.uri.partition(":")[2],
        chance=chance_line(evaluation),
        figures=sorted((evaluation.get("model") or {}).items()),
        job=job,
        result=result,
        evaluation=evaluation,
        verdict=verdict,
        made=provenance,
    )


def _render(template: str, **values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["inert"] = in_markdown
    text = resources.files(__package__).joinpath(template).read_text("utf-8")
    return environment.from_string(text).render(values)


def _shown(part: FactoryConfig) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in part.args.items())
    return f"{part.factory}({arguments})" if arguments else part.factory


MOST_FIGURE = 1e300
"""A whole number in JSON may be too large for a float; no score is near this."""
_OF_WINDOWS = ("nll", "pinball", "coverage_90", "mse_to_zero", "model_gain_nll", "model_gain_t")
"""The figures of windows that the card shows; of rows it has all."""


def scores_table(evaluation: Mapping[str, Any], is_table: bool) -> str:
    """Return the table of the figures that the model or a baseline has, in Markdown."""
    judged = {"**this model**": evaluation["model"]}
    judged |= {in_markdown(name, 100): row for name, row in evaluation["baselines"].items()}
    known = {name for figures in judged.values() for name in figures}
    names = sorted(known - {"samples"}) if is_table else [name for name in _OF_WINDOWS if name in known]
    rows = [["", *(in_markdown(name, 100) for name in names)], ["---"] * (len(names) + 1)]
    rows += [[who, *(_figure(figures.get(name)) for name in names)] for who, figures in judged.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _figure(value: object) -> str:
    """Return a figure that a node has written, to five digits; "–" for what is none."""
    return f"{value:.5g}" if isinstance(value, int | float) and abs(value) < MOST_FIGURE else "–"
