"""`dtrain cost`: what a job or a fleet has cost and what for, and the prices of nodes, with their sources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from dtrain_dagster.cli.ceilings import OF_CEILINGS, WORD, ceiling_options, ceilings_command
from dtrain_dagster.cli.common import (
    Refusal,
    cluster_of,
    console,
    json_option,
    manager_of,
    print_json,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.job_names import find_job_or_fleet, named_argument
from dtrain_dagster.cli.screen import plain_table, print_fitted
from dtrain_dagster.clusters.azure_ml.bill import Marks, Reconciliation, read_usage, reconcile
from dtrain_dagster.costs import export
from dtrain_dagster.costs.ledger import Ledger, Row, ledger
from dtrain_dagster.costs.money import SECOND, digits_of, shown, total_shown, usd
from dtrain_dagster.costs.plan import PLAN, probe_usage_of
from dtrain_dagster.costs.prices import (
    Figure,
    SkuPrice,
    known_regions,
    price_of,
    price_table,
    price_words,
    refreshed_path,
    region_of,
)
from dtrain_dagster.costs.prices import skus as known_skus
from dtrain_dagster.costs.retail import RETAIL_URL, refresh_price_table
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.jobs.totals import LaunchTotals, sum_launches
from dtrain_dagster.search.results import kept_search
from dtrain_dagster.settings.cluster_kinds import TIERS, tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.rundir import JOB, LAUNCH, RESULT

OF_JOBS, OF_PRICES = ("usage_export",), ("skus", "regions", "refresh")
"""The options that need a name, and those that go without one."""


@click.command()
@named_argument(required=False)
@click.option(
    "--usage-export",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compare a job with what Azure has billed: a cost details export (CSV or .csv.gz, classic or FOCUS).",
)
@click.option(
    "--sku",
    "skus",
    multiple=True,
    metavar="SKU",
    help="Prices of this SKU, in every region that is known. May be repeated.  [default: all that are known]",
)
@click.option(
    "--region",
    "regions",
    multiple=True,
    metavar="REGION",
    help="Prices in this region. May be repeated.  [default: DTRAIN_REGION]",
)
@click.option("--refresh", is_flag=True, help="Ask Azure's public price list for newer prices; it needs no account.")
@ceiling_options
@json_option()
@refuses
def cost(name: str | None, as_json: bool, **options: Any) -> None:
    """Show what a job or a fleet has cost, and what for.

    Dollars are node-time at list price. On the local cluster they stand in for a SKU's, and nothing is billed.

    Without a name it shows the prices in use, with their sources and dates; none is a bill. Those of --refresh are kept
    in DTRAIN_HOME/prices.json, and are used from then on if they are newer than those of the package. If something goes
    wrong, or a price cannot be true, nothing is changed. Delete the file to go back to the prices of the package.

    `dtrain cost ceilings` shows and sets what all jobs of this home may cost in a month. Whatever starts a job then
    refuses one that would exceed it, by what was spent and is promised to running jobs. Nothing that runs is ended.

    \b
    Examples:
      dtrain cost latest
      dtrain cost latest --usage-export export.csv.gz
      dtrain cost
      dtrain cost --sku Standard_NC24ads_A100_v4
      dtrain cost --region westus2 --region centralus
      dtrain cost --refresh
      dtrain cost ceilings --per-month 500
      dtrain cost ceilings --none
    """
    own = OF_CEILINGS if name == WORD else OF_JOBS if name else OF_PRICES
    foreign = [option for option in (*OF_JOBS, *OF_PRICES, *OF_CEILINGS) if option not in own and options.pop(option)]
    if foreign:
        [option] = [each for each in cost.params if each.name == foreign[0]]
        needs = {**dict.fromkeys(OF_JOBS, "needs the name of a job"), **dict.fromkeys(OF_CEILINGS, "is of ceilings")}
        why = needs.get(foreign[0], "is of prices: leave out the name")
        raise click.UsageError(f"{option.opts[0]} {why}", click.get_current_context())
    settings = read_settings()
    if name == WORD:
        ceilings_command(settings, as_json, **options)
        return
    if name is None:
        (_refresh if options.pop("refresh") else _show_prices)(settings, as_json, **options)
        return
    name, is_fleet = find_job_or_fleet(settings, name)
    if is_fleet:
        _show_fleet(settings, name, as_json)
    else:
        _show_job(settings, name, as_json, **options)


class Bill(NamedTuple):
    """What a job has cost, and what for; with the probes that its plan rests on."""

    tracker: CostTracker
    ledger: Ledger
    took: LaunchTotals
    running: bool
    plan: Mapping[str, Any]


def bill_of(settings: Settings, job_id: str, is_probe: bool = False) -> Bill:
    """Return the bill of a job. ``is_probe``: as the probe of others. Raise `PriceError` where no price is known."""
    manager, rundir = manager_of(settings), run_dir(settings, job_id)
    running, plan = not manager.job_status(job_id).state.is_final, rundir.read_json(PLAN) or {}
    usage = [*(replace(item, is_probe=is_probe) for item in manager.node_usage(job_id)), *probe_usage_of(plan)]
    tier = tier_of(plan.get("tier", settings.tiers[0]))
    tracker = CostTracker(settings.cluster_name, usage, tier)
    found = ledger(tracker.nodes, rundir.events(strict=True), running, is_script=not rundir.storage.exists(JOB))
    return Bill(tracker, found, sum_launches(usage, tier), running, plan)


def _show_fleet(settings: Settings, name: str, as_json: bool) -> None:
    """Print what all jobs of a fleet have cost together; of a search with the probe that measured a trial."""
    records, search = FleetRecords(settings.home, name), kept_search(settings.home, name) or {}
    bills = {job_id: bill_of(settings, job_id, is_probe=True) for job_id in search.get("measured_by", ())}
    begun = [standing.job_id for standing in records.standings() if standing.launches]
    bills |= {job_id: bill_of(settings, job_id) for job_id in begun}
    whole = Ledger(entries=tuple(entry for bill in bills.values() for entry in bill.ledger.entries), notes=())
    if as_json:
        causes = {name.value: {"node_seconds": row.seconds, "usd": row.usd} for name, row in whole.causes().items()}
        print_json({
            "node_seconds": whole.microseconds / SECOND,
            "usd": usd(whole.units),
            "budget_usd": records.limits().budget_usd + float(search.get("before_usd", 0.0)),
            "causes": causes,
            "jobs": {
                job_id: {"node_seconds": bill.ledger.microseconds / SECOND, "usd": usd(bill.ledger.units)}
                for job_id, bill in bills.items()
            },
        })  # fmt: skip
        return
    console().print(ledger_table("cause", _causes(whole)), highlight=False)
    say("")
    console().print(ledger_table("job", [(job_id, bill.ledger, "") for job_id, bill in bills.items()]), highlight=False)


def _show_job(settings: Settings, job_id: str, as_json: bool, usage_export: Path | None) -> None:
    cluster, rundir = cluster_of(settings)[0], run_dir(settings, job_id)
    bill = bill_of(settings, job_id)
    words = bill.plan.get("price_words", price_words(cluster.sku, settings.kind.buys_nodes))
    reconciled = None
    if usage_export is not None:
        where = cluster.azure_options().workspace_id if settings.cluster == "azure_ml" else ""
        marks = Marks(job_id, rundir.read_json(LAUNCH) or {}, where)
        rows = read_usage(usage_export.read_bytes(), str(usage_export))
        reconciled = reconcile(bill.tracker, rows, marks)
    expected = ((bill.plan.get("estimate") or {}).get("usd") or {}).get("expected")
    if as_json:
        epochs = (rundir.read_json(RESULT) or {}).get("epochs") or 0.0
        more: dict[str, Any] = {"running": bill.running, "launches": asdict(bill.took)}
        if reconciled is not None:
            more["reconciliation"] = json.loads(json.dumps(asdict(reconciled), default=float))
        metrics = bill.tracker.metrics(epochs, expected + bill.tracker.probe_usd if expected else 0.0)
        print_json(export.cost_document(bill.tracker, bill.ledger, metrics, words, **more))
    else:
        _print(bill, words, expected)
        if reconciled is not None:
            _print_reconciled(reconciled)


def _causes(found: Ledger) -> list[tuple[str, Ledger | Row, str]]:
    return [(cause.value, row, cause.meaning) for cause, row in found.causes().items()]


def ledger_table(
    title: str, rows: Sequence[tuple[str, Ledger | Row, str]], total: str = "all", words: str = ""
) -> Table:
    """Return time and dollars by cause or by job, and their sum, in a row called ``total``: dollars and shares of time
    add up to it. ``rows``: name, what it took, and what that was for. Pure."""
    units, times = ([getattr(row, name) for _, row, _ in rows] for name in ("units", "microseconds"))
    digits, whole = digits_of(sum(units)), sum(times)
    table = plain_table(title, "node-time", "share", "dollars", right=("node-time", "share", "dollars"))
    table.add_column("what for", style="dim")
    shares = shown([time * 100 for time in times], 1, unit=max(1, whole))
    for (name, _, meaning), time, amount, share in zip(rows, times, shown(units, digits), shares, strict=True):
        took = f"{time / SECOND:.1f} s" if time < 60 * SECOND else format_duration(time / SECOND)
        table.add_row(name, took, f"{share} %", f"${amount:,}", meaning)
    table.add_section()
    table.add_row(total, format_duration(whole / SECOND), "100 %", f"${total_shown(units, digits):,}", words)
    return table


def _print(bill: Bill, words: str, expected: float | None) -> None:
    tracker, took = bill.tracker, bill.took
    total = "so far" if bill.running else "the bill"
    console().print(ledger_table("cause", _causes(bill.ledger), total, words), highlight=False)
    nodes = len({node.node_id for node in tracker.nodes})
    said = f"{nodes} node(s), {took.node_hours_words} in {took.words}"
    probe = f", and {dollars(tracker.probe_usd)} for its probe" if tracker.probe_usd else ""
    say(said + (f"; estimated: {dollars(expected)}{probe}" if expected else ""))
    if took.last and took.last.usd is not None:
        say(f"of these dollars the last launch took {dollars(took.last.usd)}")
    for note in (*tracker.notes, *bill.ledger.notes):
        say(f"note: {note}")


def _print_reconciled(result: Reconciliation) -> None:
    figures = ("billed", "ours", "difference")
    table = plain_table("day", "meter", *figures, "why", right=figures)
    table.title = "against the provider's export"
    for row in result.rows:
        ours = f"${row.ours_usd:,}" if row.ours_usd is not None else "–"
        table.add_row(row.day, row.meter, f"${row.billed_usd:,}", ours, f"${row.difference_usd:+,}", row.why)
    console().print(table, highlight=False)
    say(*result.summary)


def _show_prices(settings: Settings, as_json: bool, skus: tuple[str, ...], regions: tuple[str, ...]) -> None:
    asked = known_regions() if skus and not regions else regions or (settings.region,)
    if skus:
        known = [
            (sku, region)
            for sku in skus
            for region in asked
            if sku.casefold() in map(str.casefold, price_table(region))
        ]
        rows = [price_of(sku, region) for sku, region in known] or [price_of(skus[0])]  # which says what there is
    else:
        rows = [row for region in asked for row in price_table(region).values()]
    if as_json:
        print_json([price_document(row) for row in rows])
        return
    _print_table(rows)


def _refresh(settings: Settings, as_json: bool, skus: tuple[str, ...], regions: tuple[str, ...]) -> None:
    """Ask for newer prices, keep them in the home, and print what has changed."""
    by_name = {sku.casefold(): sku for sku in known_skus()}
    unknown = [sku for sku in skus if sku.casefold() not in by_name]
    if unknown:
        raise Refusal(
            f"the GPUs and memory of {', '.join(unknown)} are not known, and the price list does not state them; "
            f"known are {', '.join(by_name.values())}"
        )
    asked = [by_name[sku.casefold()] for sku in skus] or list(by_name.values())
    where = [region_of(region) for region in regions or (settings.region,)]
    for region in where:
        if not region.isalnum():
            raise Refusal(f"{region!r} is not an Azure region; names look like eastus")
    done = refresh_price_table(refreshed_path(), where, asked, RETAIL_URL)
    found = [
        {
            "region": item.region,
            "sku": item.sku,
            "tier": item.tier,
            "before_usd_per_hour": item.before.usd_per_hour if item.before else None,
            "usd_per_hour": item.after.usd_per_hour,
        }
        for item in done.changes
    ]
    if as_json:
        print_json({"file": str(refreshed_path()), "changes": found, "notes": list(done.notes)})
        return
    changed = [row for row in found if row["before_usd_per_hour"] != row["usd_per_hour"]]
    say(f"{len(found)} prices were found, {len(changed)} of them new or changed")
    for row in changed:
        before = row["before_usd_per_hour"]
        known = "" if before is None else f", before {before:.4g}"
        say(f"{row['region']} {row['sku']} {row['tier']}: {row['usd_per_hour']:.4g}{known}")
    say(*done.notes, f"written to {refreshed_path()}")


def price_document(row: SkuPrice) -> dict[str, Any]:
    """Return a SKU in a region for JSON. Pure."""
    document = asdict(replace(row, figures=dict(row.figures)))
    document["usd_per_hour"] = document.pop("figures")
    return document


def _print_table(rows: Sequence[SkuPrice]) -> None:
    """Print a line per SKU and region; behind each price the number of its source, which follows below."""
    sources: dict[tuple[str, str, str], int] = {}
    tiers = [tier.replace("_", "\n").upper() for tier in TIERS]
    titles = ("SKU", "REGION", *tiers, "RETIRED", "GPUS", "SPEED", "GIB")
    cells = [
        (
            row.sku,
            row.region,
            *(_cell(row.figures.get(tier), sources) for tier in TIERS),
            row.retired_on or "",
            f"{row.gpus} × {row.gpu}",
            f"{row.speed:g}",
            str(row.gpu_memory_gib),
        )
        for row in rows
    ]
    say("US dollars per node and hour; – means not offered or not known")
    print_fitted(console(), titles, cells, right=(*tiers, "SPEED", "GIB"), always=2 + len(tiers))
    say("where they come from:")
    for (recorded_on, how, source), number in sources.items():
        say(f"  [{number}] {recorded_on}, {how}: {source}")


def _cell(figure: Figure | None, sources: dict[tuple[str, str, str], int]) -> str:
    if figure is None:
        return "–"
    number = sources.setdefault((figure.recorded_on, figure.how, figure.source), len(sources) + 1)
    return f"{figure.usd_per_hour:.4g} [{number}]"
