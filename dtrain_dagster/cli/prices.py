"""`dtrain prices`: what is known of prices, where it comes from, and fresh ones from Azure.

Added to `dtrain` by `dtrain_dagster.cli.main`. Each command imports what it needs, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import Refusal, console, read_settings, refuses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtrain_dagster.costs.prices import Figure, SkuPrice
    from dtrain_dagster.costs.retail import Refreshed


@click.group()
def prices() -> None:
    """Show and refresh the prices of nodes per hour.

    Every figure has a source and a date; none is a bill.
    """


@prices.command("list")
@click.option("--region", "regions", multiple=True, metavar="REGION", help="May be repeated.  [default: DTRAIN_REGION]")
@click.option("--all", "everywhere", is_flag=True, help="In every region that is known.")
@refuses
def list_(regions: tuple[str, ...], everywhere: bool) -> None:
    """List the prices in use, with their sources and dates."""
    from dtrain_dagster.costs.prices import known_regions, price_table

    chosen = known_regions() if everywhere else regions or (read_settings().region,)
    _print_table([row for region in chosen for row in price_table(region).values()])


@prices.command()
@click.argument("sku")
@refuses
def show(sku: str) -> None:
    """Show everything that is known of a SKU, in every region."""
    from dtrain_dagster.cli.terminal import pairs_table
    from dtrain_dagster.costs.prices import known_regions, price_of, price_table

    known = [region for region in known_regions() if sku.casefold() in map(str.casefold, price_table(region))]
    rows = [price_of(sku, region) for region in known] or [price_of(sku)]  # which says what there is
    first = rows[0]
    gpus = f"{first.gpus} × {first.gpu}, {first.gpu_memory_gib} GiB and {first.gpu_watts} W each"
    facts = {
        "SKU": first.sku,
        "GPUs": gpus,
        "host": f"{first.vcpus} vCPUs, {first.memory_gib} GiB" + (", InfiniBand" if first.infiniband else ""),
        "retired on": first.retired_on or "no such date is known",
        "speed": f"{first.speed:g} × Standard_NC6s_v3: {first.speed_note}",
    }
    console().print(pairs_table(list(facts.items())), highlight=False)
    click.echo()
    _print_table(rows)


@prices.command()
@click.option("--region", "regions", multiple=True, metavar="REGION", help="May be repeated.  [default: DTRAIN_REGION]")
@click.option("--sku", "skus", multiple=True, metavar="SKU", help="May be repeated.  [default: all that are known]")
@click.option("--url", help="Another address of the price list.  [default: https://prices.azure.com/api/retail/prices]")
@refuses
def refresh(regions: tuple[str, ...], skus: tuple[str, ...], url: str | None) -> None:
    """Ask Azure's public price list for newer prices.

    It needs no account. Its prices are kept in DTRAIN_HOME/prices.json, and are used from then on if they are newer
    than those of the package. If something goes wrong, or a price cannot be true, nothing is changed. Delete the file
    to go back to the prices of the package.

    \b
    Examples:
      dtrain prices refresh
      dtrain prices refresh --region westeurope --region swedencentral --sku Standard_NC24ads_A100_v4
    """
    from dtrain_dagster.costs.prices import refreshed_path, region_of
    from dtrain_dagster.costs.prices import skus as known_skus
    from dtrain_dagster.costs.retail import RETAIL_URL, refresh_price_table

    settings = read_settings()
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
            raise Refusal(f"{region!r} is no region of Azure; names are like eastus")
    path = refreshed_path(settings.home)
    _print_refreshed(refresh_price_table(path, where, asked, url or RETAIL_URL))
    click.echo(f"written to {path}")


def _print_table(rows: Sequence[SkuPrice]) -> None:
    """One line per SKU and region; behind each price the number of its source, which follows below."""
    from dtrain_dagster.costs.prices import TIERS

    table = _table(
        "REGION", "SKU", "GPUS", "GIB", *[tier.replace("_", " ").upper() for tier in TIERS], "SPEED", "RETIRED"
    )
    sources: dict[tuple[str, str, str], int] = {}
    for row in rows:
        cells = [_cell(row.figures.get(tier), sources) for tier in TIERS]
        make = f"{row.gpus} × {row.gpu}"
        table.add_row(
            row.region, row.sku, make, str(row.gpu_memory_gib), *cells, f"{row.speed:g}", row.retired_on or ""
        )
    console().print(table, highlight=False)
    click.echo("US dollars per node and hour; – is not offered or not known. Where they come from:")
    for (recorded_on, how, source), number in sources.items():
        click.echo(f"  [{number}] {recorded_on}, {how}: {source}")


def _cell(figure: Figure | None, sources: dict[tuple[str, str, str], int]) -> str:
    if figure is None:
        return "–"
    number = sources.setdefault((figure.recorded_on, figure.how, figure.source), len(sources) + 1)
    return f"{figure.usd_per_hour:.4g} [{number}]"


def _print_refreshed(done: Refreshed) -> None:
    changed = [item for item in done.changes if not item.before or item.before.usd_per_hour != item.after.usd_per_hour]
    click.echo(f"{len(done.changes)} prices were found, {len(changed)} of them new or changed")
    if changed:
        table = _table("REGION", "SKU", "TIER", "BEFORE", "AS OF", "NOW")
        for item in changed:
            before = (f"{item.before.usd_per_hour:.4g}", item.before.recorded_on) if item.before else ("–", "")
            table.add_row(item.region, item.sku, item.tier, *before, f"{item.after.usd_per_hour:.4g}")
        console().print(table, highlight=False)
    for note in done.notes:
        click.echo(note)


def _table(*titles: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        is_text = title in ("REGION", "SKU", "GPUS", "TIER", "AS OF", "RETIRED")
        table.add_column(title, no_wrap=True, justify="left" if is_text else "right")
    return table
