"""The model card: what the model is, its data and cost, how good it is, and what it cannot do. Its text is the template
`card.md.jinja`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
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
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["inert"] = in_markdown
    template = environment.from_string(resources.files(__package__).joinpath("card.md.jinja").read_text("utf-8"))
    is_table, has_distribution = manifest.get("kind", WINDOWS) == ROWS, evaluation["model"].get("nll") is not None
    names = {
        role: [column["name"] for column in manifest["columns"] if column["role"] == role]
        for role in ("feature", "target")
    }
    rule = f"{RULE}; {IN_WORDS[ROWS if is_table else WINDOWS]}" if is_table or has_distribution else POINT_RULE
    trained = provenance.train_seconds
    return template.render(
        name=model_name,
        is_table=is_table,
        has_distribution=has_distribution,
        regression=REGRESSION,
        features=[in_markdown(name, 100) if is_table else f"`{name}`" for name in names["feature"]],
        target=", ".join(in_markdown(name, 100) for name in names["target"]),
        classes=", ".join(in_markdown(name, 100) for name in manifest.get("classes", ())),
        model=_shown(job.model),
        loss=_shown(job.loss),
        rule=rule,
        worth=worth_line(evaluation, provenance.cost_usd_total),
        scores=_scores_of_rows(evaluation) if is_table else _scores(evaluation["model"], evaluation["baselines"]),
        calibration="" if is_table else _calibration(evaluation.get("calibration") or ()),
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


def _shown(part: FactoryConfig) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in part.args.items())
    return f"{part.factory}({arguments})" if arguments else part.factory


_COLUMNS = (("nll", "NLL", ".4f"), ("pinball", "pinball × 10⁴", ".2f"), ("coverage_90", "90 % coverage", ".3f"))


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


def _calibration(fifths: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of coverage by fifths of the predicted scale; "" without any."""
    rows = [
        [str(row["quintile"]), f"{row['sigma_mean']:.4f}", f"{row['nll']:.4f}", f"{row['coverage_90']:.3f}"]
        for row in fifths
    ]
    return _table(["fifth, calm to stormy", "mean σ", "NLL", "90 % coverage"], rows) if rows else ""


def _scores_of_rows(evaluation: Mapping[str, Any]) -> str:
    """Return the table of all figures that the model of a table or a baseline has."""
    judged = {"**this model**": evaluation["model"]}
    judged |= {in_markdown(name, 100): row for name, row in evaluation["baselines"].items()}
    scores = sorted({name for figures in judged.values() for name in figures} - {"samples"})
    return _table(
        ["", *scores], [[name, *(_figure(row.get(score)) for score in scores)] for name, row in judged.items()]
    )


def _figure(value: Any) -> str:
    return format(value, ".4g") if isinstance(value, int | float) else "–"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
