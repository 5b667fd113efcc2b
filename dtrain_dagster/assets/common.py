"""What all assets share: owners, code version, and what metadata is made of.

Assets that pass a value on have no return annotation: Dagster takes a bare ``MaterializeResult`` for one without a
value, and a parametrised one does not go together with check specs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.costs.plan import TrainingPlan, parse_plan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.progress import PLAN
from dtrain_dagster.resources import GPUClusterResource
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.monitoring.step_model import Strategy
    from dtrain_dagster.planning.optimizer import Optimization

OWNERS = ["team:ml-platform"]
CODE_VERSION = "1"
"""Raise it when an asset's meaning changes: Dagster then marks what was made before as out of date."""


def hardware_mark(cluster: GPUClusterResource, gpu_type: str) -> str:
    """What the id of a short run says of the nodes that it measures: "-nc6sv3"; nothing where all are this machine."""
    if cluster.kind == "local":
        return ""
    return "-" + price_of(gpu_type).sku.removeprefix("Standard_").replace("_", "").lower()


def round_figures(value: Any) -> Any:
    """A figure as metadata shows it; anything else as it is."""
    return round(value, 6) if isinstance(value, float) else value


def read_finished(rundir: RunDir, name: str) -> dict[str, Any]:
    """A document of a job that has succeeded. `dagster.Failure` where it is missing: the folder was changed since."""
    document = rundir.read_json(name)
    if document is None:
        raise dg.Failure(f"{rundir.uri} has no {name}: its job did not finish; materialize trained_checkpoint again")
    return document


def plan_of(rundir: RunDir, cost_estimate: TrainingPlan) -> TrainingPlan:
    """The plan that a job carried out: `cost_estimate` may have been made again since, for another training. It counts
    where the run directory has no plan. `dagster.Failure` where it has one that cannot be read."""
    try:
        document = rundir.read_json(PLAN)
        return parse_plan(document, f"{rundir.uri}/{PLAN}") if document is not None else cost_estimate
    except ValueError as error:
        raise dg.Failure(f"{rundir.uri}/{PLAN} cannot be read: {error}", allow_retries=False) from error


def strategy_table(strategies: Iterable[Strategy]) -> str:
    """What to change as a Markdown table, in the order given, with what it is expected to gain."""
    rows = [
        "| what | change | samples/s | per dollar | step | wire then | mind |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in strategies:
        speed = f"{item.gain:+.0%} ({item.samples_per_second:,.0f})"
        step = f"{1000 * item.step_seconds:.3g} ms | {item.communication_share:.0%}"
        rows.append(f"| **{item.name}** | {item.change} | {speed} | {item.cost_gain:+.0%} | {step} | {item.note} |")
    return "\n".join(rows) if len(rows) > 2 else "Nothing that these figures speak for."


def optimization_table(found: Optimization) -> str:
    """What the next run should be given, as Markdown, and what nothing can be said of."""
    rows = [f"| **{item.title}** | {item.setting} | {item.sentence} |" for item in found.recommendations]
    head = ["| what | change | what it would do |", "|---|---|---|"]
    text = ["\n".join([*head, *rows]) if rows else "Nothing that these figures speak for."]
    if found.not_known:
        text.append("Nothing is recommended for:\n" + "\n".join(f"- {line}" for line in found.not_known))
    return "\n\n".join(text)


def table_schema(rows: list[dg.TableRecord]) -> dg.TableSchema:
    """The columns of the first row; text where a value is not a number."""
    kinds = {int: "int", float: "float"}
    first = rows[0].data if rows else {}
    return dg.TableSchema(
        columns=[dg.TableColumn(name, kinds.get(type(value), "string")) for name, value in first.items()]
    )
