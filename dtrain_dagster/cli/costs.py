"""The command of `dtrain` that shows the costs of a job by cause."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli import json_fields
from dtrain_dagster.cli.common import Refusal, cluster_of, console, read_settings, refuses, run_dir, say
from dtrain_dagster.cli.job_names import find_job, job_argument
from dtrain_dagster.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from dtrain_dagster.costs.ledger import Ledger
    from dtrain_dagster.costs.tracker import CostTracker
    from dtrain_dagster.jobs.totals import LaunchTotals


@click.command()
@job_argument()
@click.option("--csv", "as_csv", is_flag=True, help="The ledger as CSV.")
@json_option(json_fields.COST, "Print one JSON document: nodes, periods, ledger.")
@click.option(
    "--usage-export",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compare with what Azure has billed: a cost details export (CSV or .csv.gz, classic or FOCUS).",
)
@refuses
def cost(job_id: str, as_csv: bool, as_json: bool, usage_export: Path | None) -> None:
    """Show what a job has cost, and what each dollar paid for.

    Dollars are node-time at list price. On the local cluster they stand in for a SKU's, and nothing is billed.

    \b
    Examples:
      dtrain cost latest
      dtrain cost train-6f66 --csv > ledger.csv
      dtrain cost latest --usage-export export.csv.gz
    """
    from dtrain_dagster.clusters.azure_ml.bill import UsageError
    from dtrain_dagster.costs import export
    from dtrain_dagster.costs.carbon import job_footprint
    from dtrain_dagster.costs.ledger import ledger
    from dtrain_dagster.costs.plan import PLAN, probe_usage_of
    from dtrain_dagster.costs.prices import PriceError, price_words
    from dtrain_dagster.costs.tracker import CostTracker
    from dtrain_dagster.jobs.totals import sum_launches
    from dtrain_dagster.settings.tiers import tier_of
    from trainer.rundir import JOB, RESULT

    if as_csv and as_json:
        raise Refusal("--csv or --json, not both")
    settings = read_settings()
    cluster = cluster_of(settings)[0]
    manager = cluster.manager()
    job_id = find_job(settings, job_id)
    running = not manager.job_status(job_id).state.is_final
    rundir = run_dir(settings, job_id)
    plan = rundir.read_json(PLAN) or {}
    words = plan.get("price_words", price_words(cluster.sku, settings.kind.buys_nodes))
    try:
        usage = [*manager.node_usage(job_id), *probe_usage_of(plan)]
        events = list(rundir.events(strict=True))
        tracker = CostTracker(settings.cluster_name, usage, tier_of(plan.get("tier", settings.tiers[0])))
        found = ledger(tracker.nodes, events, running, is_script=not rundir.storage.exists(JOB))
        energy = job_footprint(usage, events, is_local=settings.kind.is_this_machine)
        took = sum_launches(usage, tier_of(plan.get("tier", settings.tiers[0])))
        where = cluster.azure_options().workspace_id if usage_export and settings.cluster == "azure_ml" else ""
        reconciled = _reconciled(usage_export, tracker, job_id, rundir, where) if usage_export else None
    except (PriceError, UsageError) as error:
        raise Refusal(str(error)) from None
    expected = ((plan.get("estimate") or {}).get("usd") or {}).get("expected")
    if as_csv:
        click.echo(export.to_csv(export.ledger_rows(found)), nl=False)
    elif as_json:
        epochs = (rundir.read_json(RESULT) or {}).get("epochs") or 0.0
        more: dict[str, Any] = {"running": running, "energy": asdict(energy), "launches": asdict(took)}
        if reconciled is not None:
            more["reconciliation"] = reconciled.as_dict()
        metrics = tracker.metrics(epochs, expected + tracker.probe_usd if expected else 0.0)
        print_json(export.cost_document(tracker, found, metrics, words, **more))
    else:
        _print(tracker, found, took, words, expected, running)
        carbon = "" if energy.kg_co2e is None else f", {energy.kg_co2e:.3g} kg CO2e ({energy.source})"
        say(f"{energy.kwh:.3g} kWh{carbon}: {energy.basis}")
        if reconciled is not None:
            _print_reconciled(reconciled)


def _reconciled(path: Path, tracker: CostTracker, job_id: str, rundir: Any, workspace_id: str) -> Any:
    from dtrain_dagster.clusters.azure_ml.bill import marks_of, read_usage, reconcile
    from trainer.rundir import LAUNCH

    rows = read_usage(path.read_bytes(), str(path))
    marks = marks_of(job_id, rundir.read_json(LAUNCH) or {}, workspace_id)
    return reconcile(tracker, rows, marks, datetime.now(UTC).date())


def _print(
    tracker: CostTracker, found: Ledger, took: LaunchTotals, words: str, expected: float | None, running: bool
) -> None:
    from rich.table import Table

    from dtrain_dagster.costs import export
    from dtrain_dagster.costs.money import SECOND, digits_of, total_shown
    from dtrain_dagster.support.formatting import dollars, format_duration

    digits = digits_of(found.units)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cause")
    for name in ("node-time", "share", "dollars"):
        table.add_column(name, justify="right")
    table.add_column("what for", style="dim")
    for row in export.ledger_rows(found, digits):
        time = (
            f"{row['node_seconds']:.1f} s" if row["node_seconds"] < 60 else format_duration(float(row["node_seconds"]))
        )
        table.add_row(row["cause"], time, f"{row['percent']} %", f"${row['usd']:,}", row["meaning"])
    table.add_section()
    total = f"${total_shown([found.units], digits):,}"
    table.add_row(
        "so far" if running else "the bill", format_duration(found.microseconds / SECOND), "100 %", total, words
    )
    console().print(table, highlight=False)
    nodes = len({node.node_id for node in tracker.nodes})
    said = f"{nodes} node(s), {took.node_hours_words} in {took.words}"
    probe = f", and {dollars(tracker.probe_usd)} for its probe" if tracker.probe_usd else ""
    say(said + (f"; estimated: {dollars(expected)}{probe}" if expected else ""))
    if took.last and took.last.usd is not None:
        say(f"of these dollars the last launch took {dollars(took.last.usd)}")
    for note in (*tracker.notes, *found.notes):
        say(f"note: {note}")


def _print_reconciled(result: Any) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title="against the provider's export")
    for name in ("day", "meter", "billed", "ours", "difference", "why"):
        table.add_column(name, justify="right" if name in ("billed", "ours", "difference") else "left")
    for row in result.rows:
        ours = f"${row.ours_usd:,}" if row.ours_usd is not None else "–"
        table.add_row(row.day, row.meter, f"${row.billed_usd:,}", ours, f"${row.difference_usd:+,}", row.why)
    console().print(table, highlight=False)
    for line in result.summary:
        say(line)
