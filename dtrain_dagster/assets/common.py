"""Parts that all assets share: owners, code version, and helpers that build metadata.

Assets that pass a value on have no return annotation: Dagster takes a bare ``MaterializeResult`` for one without a
value, and a parametrised one does not go together with check specs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.costs.plan import PLAN, TrainingPlan, parse_plan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.resources import GPUClusterResource
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.monitoring.step_model import Strategy
    from dtrain_dagster.planning.optimizer import Optimization

OWNERS = ["team:ml-platform"]
CODE_VERSION = "1"
"""The version of the assets' code. Raise it when an asset's meaning changes: Dagster then marks older results as out of
date."""


def hardware_mark(cluster: GPUClusterResource, gpu_type: str) -> str:
    """Return the part of a short run's id that names the measured nodes, such as "-nc6sv3"; "" on a local cluster."""
    if cluster.kind == "local":
        return ""
    return "-" + price_of(gpu_type).sku.removeprefix("Standard_").replace("_", "").lower()


def round_figures(value: Any) -> Any:
    """Return a figure as metadata shows it, and anything else unchanged."""
    return round(value, 6) if isinstance(value, float) else value


def read_finished(rundir: RunDir, name: str) -> dict[str, Any]:
    """Return a document of a job that has succeeded. Raise `dagster.Failure` where it is missing: the folder was
    changed."""
    document = rundir.read_json(name)
    if document is None:
        raise dg.Failure(f"{rundir.uri} has no {name}: its job did not finish; materialize trained_checkpoint again")
    return document


def plan_of(rundir: RunDir, cost_estimate: TrainingPlan) -> TrainingPlan:
    """Return the plan that a job carried out. `cost_estimate` may since have been made again for another training; it
    counts only where the run directory has no plan. Raise `dagster.Failure` where the plan there cannot be read."""
    try:
        document = rundir.read_json(PLAN)
        return parse_plan(document, f"{rundir.uri}/{PLAN}") if document is not None else cost_estimate
    except ValueError as error:
        raise dg.Failure(f"{rundir.uri}/{PLAN} cannot be read: {error}", allow_retries=False) from error


def strategy_table(strategies: Iterable[Strategy]) -> str:
    """Return the strategies as a Markdown table, in the order given, with the gain that each is expected to bring."""
    rows = [
        "| what | change | samples/s | per dollar | step | network then | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in strategies:
        speed = f"{item.gain:+.0%} ({item.samples_per_second:,.0f})"
        step = f"{1000 * item.step_seconds:.3g} ms | {item.communication_share:.0%}"
        rows.append(f"| **{item.name}** | {item.change} | {speed} | {item.cost_gain:+.0%} | {step} | {item.note} |")
    return "\n".join(rows) if len(rows) > 2 else "Nothing that these figures speak for."


def optimization_table(found: Optimization) -> str:
    """Return the recommendations for the next run as Markdown, and the settings for which none can be made."""
    rows = [f"| **{item.title}** | {item.setting} | {item.sentence} |" for item in found.recommendations]
    head = ["| what | change | what it would do |", "|---|---|---|"]
    text = ["\n".join([*head, *rows]) if rows else "Nothing that these figures speak for."]
    if found.not_known:
        text.append("Nothing is recommended for:\n" + "\n".join(f"- {line}" for line in found.not_known))
    return "\n\n".join(text)


def table_schema(rows: list[dg.TableRecord]) -> dg.TableSchema:
    """Return the columns of the first row; a value that is not a number makes a text column."""
    kinds = {int: "int", float: "float"}
    first = rows[0].data if rows else {}
    return dg.TableSchema(
        columns=[dg.TableColumn(name, kinds.get(type(value), "string")) for name, value in first.items()]
    )
