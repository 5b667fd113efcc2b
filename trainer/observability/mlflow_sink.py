"""The sink that writes a training to MLflow while it runs: its curves, parameters, dataset, source and description.

What a run is made of is decided by pure functions here. What only the orchestrator knows (dollars, reports) is added by
`dtrain_dagster.registry.run_record`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.config import PARTS, DistributedTrainingConfig, JobConfig
from trainer.errors import DamagedError
from trainer.observability.mlflow_sqlite import artifact_location, authorised, make_tables
from trainer.observability.scalars import Scalar, Scalars
from trainer.rundir import EVALUATION, TRACKING, RunDir
from trainer.secrets.azure_token import WORKSPACE, tracking_address

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

METRICS_PER_REQUEST = 200
"""Azure ML takes 250 values at once."""
PARAMS_PER_REQUEST = 100
"""MLflow takes no more parameters at once."""
VALUE_LENGTH = 500
"""Characters of a parameter that every server takes."""
CURVES = (
    "train/loss",
    "train/learning_rate",
    "train/grad_norm",
    "train/samples_per_second",
    "communication/share",
    "cluster/gpu_utilization",
)
"""The curves that a run has besides those of evaluations. All others are in the events and in TensorBoard, and in short
in the run's artifact ``figures.json``."""
DETAILS = frozenset(
    ("samples", "coverage_90", "pinball", "mse_to_zero", "rank_ic", "rank_ic_t", "balanced_accuracy",
     "balanced_accuracy_t", "mse_to_zero_t", "brier", "ece", "mae", "r2")
)  # fmt: skip
"""Scores of stock models that ``evaluation.json`` has, and that no metric is, unless models are compared by it."""
KIND_TAG, KIND = "mlflow.experimentKind", "custom_model_development"
"""By this tag of an experiment MLflow's pages open on its runs; without it they guess what it is of."""
COLUMN_PIXELS = 110
SHARED_VIEW, VIEW = "mlflow.sharedViewState.", "dtrain"
"""What the tag of an experiment begins with that has a view of its list of runs, and the key of ours."""
COLUMNS = [
    f"{part}.`{name}`"
    for part, name in (
        ("params", "model"),
        ("metrics", "valid/loss"),
        ("metrics", "test/loss"),
        ("metrics", "test/margin"),
        ("metrics", "cost/total_usd"),
        ("tags", "gate"),
        ("tags", "nodes"),
    )
]
"""The columns of the list of runs, besides name and date with the state, which it always has."""
COMPARED_BY = ("nll", "log_loss", "rmse", "bits_per_byte", "perplexity", "mse_to_zero", "loss")
"""Scores by which models are compared with baselines: the first one that a model has."""
NOTE_TAG, SOURCE_TAG, TYPE_TAG = (
    "mlflow.note.content",
    "mlflow.source.name",
    "mlflow.source.type",
)
GATE_TAG = "gate"


class MLflowSink:
    """A sink that writes the scalars as MLflow metrics, and the configuration as parameters."""

    def __init__(self, job: JobConfig, rundir: RunDir) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # by default a dead server costs four minutes
        from mlflow.tracking import MlflowClient

        assert job.tracking.mlflow_tracking_uri is not None
        self._uri = tracking_address(authorised(job.tracking.mlflow_tracking_uri))
        self._on_azure = WORKSPACE in self._uri
        self._rundir = rundir
        make_tables(self._uri)
        self._client = MlflowClient(tracking_uri=self._uri)
        self.run_id = self._begin(job)
        self._scalars = Scalars()

    def _begin(self, job: JobConfig) -> str:
        """Return the run of this job: the one it had before, or a new one."""
        if known := self._rundir.read_json(TRACKING):
            self._client.update_run(known["mlflow_run_id"], status="RUNNING")
            return str(known["mlflow_run_id"])
        run_id = begin_run(self._client, self._uri, job)
        self._rundir.write_json(TRACKING, {"mlflow_run_id": run_id})
        return run_id

    def write(self, events: list[dict[str, Any]]) -> None:
        """Send those scalars of these events that people read; an ``end`` event adds the figures of the test split, and
        ends the run."""
        from mlflow.entities import Metric

        metrics = []
        for step, name, value, at in self._scalars.of(events):
            if is_shown(name):
                metrics.append(Metric(metric_name(name, self._on_azure), value, int(at * 1000), step))
        if any(item["kind"] == "end" and item["status"] == "succeeded" for item in events) and not self._on_azure:
            metrics += self._write_test()
        for at in range(0, len(metrics), METRICS_PER_REQUEST):
            self._client.log_batch(self.run_id, metrics=metrics[at : at + METRICS_PER_REQUEST])
        for item in events:
            if item["kind"] == "end":
                finished = {"succeeded": "FINISHED", "stopped": "KILLED", "budget": "KILLED"}.get(
                    item["status"], "FAILED"
                )
                self._client.set_terminated(self.run_id, status=finished)

    def _write_test(self) -> list[Metric]:
        """Write the verdict on the test split as tags, and return its figures. On Azure ML registration writes them."""
        from mlflow.entities import Metric, RunTag

        try:
            evaluation = self._rundir.read_json(EVALUATION) or {}
        except DamagedError:
            return []  # whoever reads it for more than a page says so
        self._client.log_batch(self.run_id, tags=[RunTag(*tag) for tag in verdict_tags(evaluation).items()])
        now, step = int(time.time() * 1000), self._scalars.step
        return [Metric(name, value, now, step) for name, value in figures_of_test(evaluation).items()]

    def close(self) -> None:
        """Do nothing: no connection is kept open."""


def begin_run(client: MlflowClient, tracking_uri: str, job: JobConfig) -> str:
    """Return the id of a new run of a job, with its parameters, dataset, source and description; or of one that a
    process made which was killed before it recorded it."""
    from mlflow.entities import Param

    on_azure = WORKSPACE in tracking_uri
    experiment_id = ensure_experiment(client, job.tracking.mlflow_experiment, tracking_uri)
    where, manifest = {"job_id": job.job_id, "run_dir": job.run_dir}, _manifest_of(job)
    tags = {**tags_of(job, manifest), **where, **job.tracking.tags}
    if on_azure and os.environ.get("MLFLOW_RUN_ID"):  # the run of the Azure ML job that this process is in
        tags["mlflow.parentRunId"] = os.environ["MLFLOW_RUN_ID"]  # a job's end does not end this run: it may go on
    name = job.tracking.mlflow_run_name or job.job_id
    # A run that was not recorded names this very run directory, since others may have called a job the same, and is
    # empty, since this may be another job.
    left = [
        run
        for run in client.search_runs([experiment_id], f"tags.job_id = '{job.job_id}'", max_results=10)
        if where.items() <= run.data.tags.items() and run.info.status == "RUNNING" and not run.data.metrics
    ]
    run = left[0] if left else client.create_run(experiment_id, tags=tags, run_name=name)
    known = run.data.params  # cannot be changed
    params = [Param(key, value) for key, value in params_of(job).items() if key not in known]
    for at in range(0, len(params), PARAMS_PER_REQUEST):
        client.log_batch(run.info.run_id, params=params[at : at + PARAMS_PER_REQUEST])
    if not on_azure and not (run.inputs and run.inputs.dataset_inputs):  # Azure ML keeps none
        client.log_inputs(run.info.run_id, datasets=[_dataset_input(job, manifest)])
    return str(run.info.run_id)


def ensure_experiment(client: MlflowClient, name: str, tracking_uri: str) -> str:
    """Return the id of the experiment of this name, which is made where it is missing. Its kind is stated, unless a
    person has chosen another one, or the server is Azure ML, whose pages do not ask. Raise MlflowException where it was
    deleted: MLflow keeps its name."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            found = client.get_experiment(client.create_experiment(name, artifact_location(tracking_uri)))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process may have made it at the same time
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise MlflowException(
            f"the MLflow experiment {name!r} was deleted: bring it back (mlflow experiments restore --experiment-id "
            f"{found.experiment_id}), or name another one (experiment in DTRAIN_OPTIONS)"
        )
    if WORKSPACE not in tracking_uri:
        prepare_list(client, found.experiment_id, found.tags)
    return str(found.experiment_id)


def prepare_list(client: MlflowClient, experiment_id: str, known: Mapping[str, str]) -> None:
    """State an experiment's kind, unless a person has chosen another one, and the columns of its list of runs, as
    MLflow's button *Share* does: the page shows them under ``?viewStateShareKey=`` and the key. ``known``: its tags."""
    from mlflow.exceptions import MlflowException

    columns = json.dumps(
        {"selectedColumns": COLUMNS, "columnOrder": COLUMNS, "columnWidths": dict.fromkeys(COLUMNS, COLUMN_PIXELS)}
    )
    wanted = {KIND_TAG: known.get(KIND_TAG, KIND), f"{SHARED_VIEW}{VIEW}": columns}
    for name, value in wanted.items():
        if known.get(name) != value:
            try:
                client.set_experiment_tag(experiment_id, name, value)
            except MlflowException:  # another process may have set it at the same time
                client.set_experiment_tag(experiment_id, name, value)


READ_PARAMS = (
    "world_size", "epochs", "max_steps", "batch_size_per_gpu", "gradient_accumulation_steps", "learning_rate",
    "schedule", "warmup_steps", "weight_decay", "clip_norm", "precision", "seed", "strategy",
)  # fmt: skip
"""The fields of a training by which runs are compared, whatever they are."""


def params_of(job: JobConfig) -> dict[str, str]:
    """Return the parameters of a job: data, model, loss and their arguments, `READ_PARAMS` of the training, and its
    other fields where they are not as they begin; ``job.json`` in the run's artifacts has all. Pure."""
    values: dict[str, Any] = {"dataset": job.dataset.uri}
    values |= {f"dataset.{name}": value for name, value in job.dataset.args.items()}
    for part in PARTS:
        if (config := getattr(job, part)) is not None:
            values |= {part: config.factory, **{f"{part}.{name}": value for name, value in config.args.items()}}
    usual = asdict(DistributedTrainingConfig())
    fields = asdict(job.training)
    values |= {name: value for name, value in fields.items() if name in READ_PARAMS or value != usual[name]}
    return {name: _in_words(value) for name, value in values.items()}


def _in_words(value: Any) -> str:
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict | list | tuple) else str(value)
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 1]}…"


def tags_of(job: JobConfig, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags that a run begins with, besides those of ``tracking.tags``: dataset, source and description.
    Pure."""
    ranks, dataset_id = job.training.world_size, str(job.dataset.dataset_id or manifest.get("dataset_id", ""))
    note = (
        f"{job.model.factory} by {job.loss.factory} on {dataset_id or job.dataset.uri}, "
        f"{ranks} rank{'s' if ranks > 1 else ''}.\n\nRun directory: `{job.run_dir}`"
    )
    return {
        "dataset_id": dataset_id,
        SOURCE_TAG: job.dataset.uri.partition(":")[2] if job.is_of_script else "python -m trainer",
        TYPE_TAG: "JOB",
        NOTE_TAG: note,
    }


def metric_name(name: str, on_azure: bool) -> str:
    """Return the name of a scalar as a metric. MLflow draws ``system/…`` on a page of their own, and groups others by
    what stands before the slash; Azure ML takes no slashes. Pure."""
    if on_azure:
        return name.replace("/", ".")
    return f"system/{name}" if name.startswith("cluster/") else name


def is_shown(name: str) -> bool:
    """Return whether a scalar of this name becomes a metric: `CURVES`, and the figures of each split that are not
    `DETAILS`. Pure."""
    split, _, figure = name.partition("/")
    return name in CURVES or split == "logged" or (split in ("valid", "test") and figure not in DETAILS)


def figures_of_test(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the test split that become metrics: loss and score of the model, and by how much its score
    is better than that of the best baseline. Pure."""
    model = _numbers(evaluation.get("model"))
    score, best = _best_baseline(evaluation)
    names = [name for name in model if name == score or is_shown(f"test/{name}")]
    found = {f"test/{name}": model[name] for name in names}
    return found | ({"test/margin": best[1] - model[score]} if best else {})


def verdict_tags(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdict on the test split as tags: of the gate, and which baseline is the best. Pure."""
    gate, (_, best) = evaluation.get("gate"), _best_baseline(evaluation)
    tags = {"best_baseline": best[0]} if best else {}
    return tags | (gate_tag(gate.get("passed") is True) if isinstance(gate, Mapping) else {})


def gate_tag(passed: bool) -> dict[str, str]:
    """Return the gate's verdict as a tag. Pure."""
    return {GATE_TAG: "passed" if passed else "not passed"}


def _best_baseline(evaluation: Mapping[str, Any]) -> tuple[str, tuple[str, float] | None]:
    """Return the score by which the model is compared, and the best baseline with its score; None where there is
    none."""
    model = _numbers(evaluation.get("model"))
    score = next((name for name in COMPARED_BY if name in model), "")
    rows = {name: _numbers(figures) for name, figures in (evaluation.get("baselines") or {}).items()}
    scores = [(name, row[score]) for name, row in rows.items() if score in row]
    return score, min(scores, key=lambda item: item[1], default=None)


def _numbers(figures: Any) -> dict[str, float]:
    usable = {name: value for name, value in (figures or {}).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in usable.items() if not isinstance(value, bool)}


def summarise(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each curve of a training in short: its last value and step, least, greatest, mean, and number of points.
    Pure. An event that cannot be read, since nodes write them, adds nothing."""
    found: dict[str, dict[str, float]] = {}
    for step, name, value, _ in _readable(events):
        row = found.setdefault(name, {"least": value, "greatest": value, "mean": 0.0, "points": 0})
        row["points"] += 1
        row["mean"] += (value - row["mean"]) / row["points"]
        row |= {"last": value, "step": step, "least": min(row["least"], value), "greatest": max(row["greatest"], value)}
    return dict(sorted(found.items()))


def _readable(events: Iterable[dict[str, Any]]) -> Iterator[Scalar]:
    scalars = Scalars()
    for item in events:
        with suppress(KeyError, TypeError, ValueError, AttributeError, DamagedError):
            yield from scalars.of([item])


def _manifest_of(job: JobConfig) -> Mapping[str, Any]:
    """Return the manifest of a job's dataset; {} where it has none that can be read, of which the training tells."""
    from trainer.data.manifest import DatasetError, load_manifest
    from trainer.storage.open import open_storage

    if job.is_of_script or job.dataset.factory is not None:
        return {}
    try:
        return load_manifest(open_storage(job.dataset.uri))
    except (DatasetError, DamagedError, OSError, ValueError):
        return {}


def _dataset_input(job: JobConfig, manifest: Mapping[str, Any]) -> DatasetInput:
    """Return the dataset as MLflow's page shows it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return DatasetInput(Dataset(**dataset_of(job, manifest)), [InputTag("mlflow.data.context", "training")])


def dataset_of(job: JobConfig, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of MLflow's dataset for a job's. Pure."""
    source = manifest.get("source", {})
    columns = [
        {"name": column["name"], "type": str(column.get("type", "")), "required": True}
        for column in manifest.get("columns", ())
    ]
    profile = {f"samples_{split}": count for split, count in manifest.get("samples", {}).items()}
    dataset_id = str(job.dataset.dataset_id or manifest.get("dataset_id") or job.dataset.uri)
    return {
        "name": str(source.get("name") or dataset_id)[:VALUE_LENGTH],
        "digest": dataset_id[:36],  # as many as MLflow keeps
        "source_type": "local" if "://" not in job.dataset.uri else job.dataset.uri.partition("://")[0],
        "source": json.dumps({"uri": job.dataset.uri}),
        "schema": json.dumps({"mlflow_colspec": columns}),
        "profile": json.dumps(profile),
    }
