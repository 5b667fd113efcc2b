"""The model card: what the model is, its data and cost, how good it is, and what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.support.formatting import in_markdown
from trainer.config import FactoryConfig, JobConfig
from trainer.evaluation.gate import IN_WORDS, POINT_RULE, RULE, Gate
from trainer.spec import REGRESSION, ROWS, WINDOWS


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
        """Return these facts as tags of a model version; see `versions.register_model`."""
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
    """Return the card in Markdown, from the job's files (``result.json``, ``evaluation.json``, the dataset's
    ``manifest.json``)."""
    if manifest.get("kind", WINDOWS) == ROWS:
        return _card_of_rows(model_name, job, result, evaluation, manifest, provenance, verdict)
    sections = [
        f"# {model_name}",
        _what(job, evaluation, manifest),
        "## How good it is\n\n" + _judgement(evaluation, verdict, provenance.cost_usd_total),
        "## What it cannot do\n\n" + _limits(evaluation, manifest),
        "## Data\n\n" + _data(manifest),
        "## Training\n\n" + _training(job, result, provenance),
        "## How to call it\n\n" + _usage(model_name, evaluation, manifest),
    ]
    return "\n\n".join(sections) + "\n"


def _what(job: JobConfig, evaluation: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    features = [f"`{column['name']}`" for column in manifest["columns"] if column["role"] == "feature"]
    kind = "predictive distribution" if evaluation["model"].get("nll") is not None else "forecast"
    return (
        f"The {kind} of a stock's log return over the next {manifest['horizon']} trading days, from "
        f"{manifest['window']} days of {len(features)} features. Model `{_shown(job.model)}`, loss "
        f"`{_shown(job.loss)}`; standardisation is part of the model, which takes raw features: "
        f"{', '.join(features)}.\n\n"
        "**Intended use**: volatility and intervals for research, and as a worked example of distributed training. "
        "**Not** for trading, and not investment advice."
    )


def _shown(part: FactoryConfig) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in part.args.items())
    return f"{part.factory}({arguments})" if arguments else part.factory


_COLUMNS = (("nll", "NLL", ".4f"), ("pinball", "pinball × 10⁴", ".2f"), ("coverage_90", "90 % coverage", ".3f"))


def _judgement(evaluation: Mapping[str, Any], verdict: Gate, usd: float | None) -> str:
    """Return the verdict, what the dollars have bought, the model beside every baseline, and calibration by fifths of
    the predicted volatility."""
    model, baselines = evaluation["model"], evaluation["baselines"]
    parts = [
        _verdict(verdict, POINT_RULE if model.get("nll") is None else f"{RULE}; {IN_WORDS[WINDOWS]}"),
        *_worth(evaluation, usd),
        f"Test split: {evaluation['windows']:,} windows that end on {evaluation['days']:,} days from "
        f"{in_markdown(evaluation['first_date'], 40)} to {in_markdown(evaluation['last_date'], 40)}.",
        _scores(model, baselines),
    ]
    if evaluation.get("calibration"):
        rows = [
            [str(row["quintile"]), f"{row['sigma_mean']:.4f}", f"{row['nll']:.4f}", f"{row['coverage_90']:.3f}"]
            for row in evaluation["calibration"]
        ]
        header = ["fifth, calm to stormy", "mean σ", "NLL", "90 % coverage"]
        parts += ["By fifth of the predicted scale:", _table(header, rows)]
    return "\n\n".join(parts)


def _verdict(verdict: Gate, rule: str) -> str:
    gate = "passed" if verdict.passed else f"**not passed**: {'; '.join(map(in_markdown, verdict.reasons))}"
    return f"Gate {gate}. A model passes if {rule}."


def _worth(evaluation: Mapping[str, Any], usd: float | None) -> list[str]:
    """Return the paragraph on whether the network has earned its dollars; none where no baseline was judged."""
    worth = worth_line(evaluation, usd)
    return [f"Earned {worth}."] if worth else []


def _scores(model: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of scores. Lower is better except for coverage, which should be 0.900; the gain is the model's,
    with its t-statistic."""
    order = sorted(baselines, key=lambda name: (baselines[name].get("nll") is None, baselines[name].get("nll") or 0.0))
    rows = [["**this model**", *_figures(model), ""]]
    for name in order:
        row = baselines[name]
        gain, t = row.get("model_gain_nll"), row.get("model_gain_t")
        shown = "" if gain is None else f"{gain:+.4f}" + ("" if t is None else f" (t = {t:.1f})")
        rows.append([in_markdown(name, 100), *_figures(row), shown])
    header = ["", *(title for _, title, _ in _COLUMNS), "squared error / zero", "model's gain in NLL"]
    return _table(header, rows)


def _figures(row: Mapping[str, Any]) -> list[str]:
    shown = []
    for name, _, form in _COLUMNS:
        value = row.get(name)
        shown.append("–" if value is None else format(value * 1e4 if name == "pinball" else value, form))
    ratio = row.get("mse_to_zero")
    return [*shown, "–" if ratio is None else f"{ratio:.4f}"]


def _limits(evaluation: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Return the evaluation's own computed sentences, and the limits that no evaluation shows."""
    lines = [in_markdown(note) for note in evaluation["notes"]]
    source = manifest["source"]
    lines += ["It knows daily prices and nothing else: no news, no order book, no costs of trading."]
    if source.get("is_synthetic"):
        lines.append("The prices are synthetic: nothing here says anything about a market.")
    if source.get("notes"):
        lines.append(f"Of the data: {source['notes']}")
    lines.append("A forecast for a stock, a period or a market that is not like these is extrapolation.")
    return "\n".join(f"- {line}" for line in lines)


def _data(manifest: Mapping[str, Any]) -> str:
    source, splits, samples = manifest["source"], manifest["splits"], manifest["samples"]
    warnings = [check["name"] for check in manifest.get("checks", ()) if not check["passed"]]
    lines = [
        f"{source['title']}: {source['tickers']} tickers, {source['rows']:,} rows, {source['first_date']} to "
        f"{source['last_date']}; dataset `{manifest['dataset_id']}`.",
        f"Licence: {source['licence']}. It binds every user of this model.",
        f"Checks that warned: {', '.join(warnings) or 'none'}.",
    ]
    rows = [[name, split["first"], split["last"], f"{samples[name]:,}"] for name, split in splits.items()]
    return "\n".join(f"- {line}" for line in lines) + "\n\n" + _table(["split", "first", "last", "windows"], rows)


def _training(job: JobConfig, result: Mapping[str, Any], provenance: TrainingProvenance) -> str:
    training = job.training
    link = f" ({provenance.dagster_run_url})" if provenance.dagster_run_url else ""
    trained = result["train_seconds"] if provenance.train_seconds is None else provenance.train_seconds
    over = f" over {provenance.launches} launches" if provenance.launches > 1 else ""
    lines = [
        f"Job `{job.job_id}` on {provenance.nodes} nodes, {result['world_size']} ranks, "
        f"{result['steps']:,} steps, {result['epochs']:.2f} epochs, {trained:.0f} s of training{over}.",
        f"{provenance.node_hours:.4f} node-hours, {provenance.cost_usd}.",
        f"Global batch {training.global_batch_size}, learning rate {training.learning_rate:g} "
        f"({training.schedule}, {training.lr_scaling} scaling), {training.precision}, seed {training.seed}.",
        f"Weights {in_markdown(result['weights_sha256'], 16)}…, the same on all ranks; checkpoint "
        f"{in_markdown(result.get('checkpoint') or 'none', 200)}.",
        f"Code `{provenance.code_version}`; Dagster run `{provenance.dagster_run_id}`{link}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _usage(model_name: str, evaluation: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Return how to load and call the model; the request's body is the model's own example."""
    features = sum(column["role"] == "feature" for column in manifest["columns"])
    if evaluation["model"].get("nll") is not None:
        answer = (
            "`mu`, `sigma` (scale), `nu` (degrees of freedom; absent for a normal distribution) and the quantiles "
            f"`q05`, `q25`, `q50`, `q75`, `q95` of the {manifest['horizon']}-day log return r. A price P becomes "
            "P·exp(r)"
        )
    else:
        answer = "`prediction`"
    return f"""\
Input: `(n, {manifest["window"]}, {features})` float32, oldest day first. Output per window: {answer}.

```python
model = mlflow.pyfunc.load_model("models:/{model_name}@champion")
forecast = model.predict(windows)  # pandas.DataFrame
```

Until a version is champion, name one by its number, `models:/{model_name}/1`.

```sh
export MLFLOW_TRACKING_URI=…
mlflow models serve -m models:/{model_name}@champion --env-manager local --host 127.0.0.1 --port 5001
mlflow artifacts download -u models:/{model_name}@champion/serving_input_example.json -d .
curl http://127.0.0.1:5001/invocations -H 'Content-Type: application/json' -d @serving_input_example.json
```"""


def _card_of_rows(
    model_name: str,
    job: JobConfig,
    result: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    manifest: Mapping[str, Any],
    provenance: TrainingProvenance,
    verdict: Gate,
) -> str:
    """Return the card of a model of a table."""
    source, samples = manifest["source"], manifest["samples"]
    features = [in_markdown(column["name"], 100) for column in manifest["columns"] if column["role"] == "feature"]
    [target] = [in_markdown(column["name"], 100) for column in manifest["columns"] if column["role"] == "target"]
    classes = ", ".join(in_markdown(name, 100) for name in manifest["classes"])
    units = [(in_markdown(column["name"], 100), column["unit"]) for column in manifest["columns"] if "unit" in column]
    dates = "".join(f", {name} as {in_markdown(unit, 100)}" for name, unit in units)
    answer = "`prediction`" + ("" if manifest["task"] == REGRESSION else ", the code of a class, and `probability_0` …")
    judged = {"**this model**": evaluation["model"], **evaluation["baselines"]}
    scores = sorted({name for figures in judged.values() for name in figures} - {"samples"})
    rows = [
        [name if name.startswith("**") else in_markdown(name, 100), *(_figure(figures.get(score)) for score in scores)]
        for name, figures in judged.items()
    ]
    sections = [
        f"# {model_name}",
        f"A forecast of {target} ({manifest['task']}{f': {classes}' if classes else ''}) from {len(features)} columns: "
        f"{', '.join(features)}. Model `{_shown(job.model)}`, loss `{_shown(job.loss)}`; standardisation is part of "
        "the model.",
        f"## How good it is\n\n{_verdict(verdict, f'{RULE}; {IN_WORDS[ROWS]}')}\n\n"
        + "".join(f"{worth}\n\n" for worth in _worth(evaluation, provenance.cost_usd_total))
        + _table(["", *scores], rows),
        "## What it cannot do\n\n"
        + "\n".join(
            f"- {line}"
            for line in (
                *map(in_markdown, evaluation["notes"]),
                "A forecast for rows that are not like these is extrapolation.",
            )
        ),
        f"## Data\n\n{in_markdown(source['title'], 200)}; dataset `{manifest['dataset_id']}`; rows: "
        + ", ".join(f"{name} {count:,}" for name, count in samples.items())
        + ".",
        "## Training\n\n" + _training(job, result, provenance),
        f"## How to call it\n\nInput: `(n, {len(features)})` float64, the columns above in their order, categories as "
        f"the codes that the model's metadata lists{dates}. Output per row: {answer}.\n\n```python\n"
        f'model = mlflow.pyfunc.load_model("models:/{model_name}@champion")  # or /1, a version\n'
        "forecast = model.predict(rows)  # pandas.DataFrame\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _figure(value: Any) -> str:
    return format(value, ".4g") if isinstance(value, int | float) else "–"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
