"""`dtrain prices`: what is known of prices, where it comes from, and fresh ones from Azure.

Added to `dtrain` by `dtrain_dagster.cli.main`. Each command imports what it needs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli import json_fields
from dtrain_dagster.cli.common import Refusal, console, read_settings, refuses
from dtrain_dagster.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtrain_dagster.costs.prices import Figure, SkuPrice
    from dtrain_dagster.costs.retail import Refreshed
    from dtrain_dagster.costs.spot import SpotMarket


@click.group()
def prices() -> None:
    """Show and refresh the prices of nodes per hour.

    Every figure has a source and a date; none is a bill.
    """


@prices.command("list")
@click.option(
    "--region", "regions", multiple=True, metavar="REGION", help="Region. May be repeated.  [default: DTRAIN_REGION]"
)
@click.option("--all", "everywhere", is_flag=True, help="In every region that is known.")
@json_option(json_fields.listed(json_fields.PRICE))
@refuses
def list_(regions: tuple[str, ...], everywhere: bool, as_json: bool) -> None:
    """List the prices in use, with their sources and dates.

    \b
    Examples:
      dtrain prices list
      dtrain prices list --region westus2 --region centralus
      dtrain prices list --all --json
    """
    from dtrain_dagster.costs.prices import known_regions, price_table

    chosen = known_regions() if everywhere else regions or (read_settings().region,)
    rows = [row for region in chosen for row in price_table(region).values()]
    if as_json:
        print_json([price_document(row) for row in rows])
    else:
        _print_table(rows)


@prices.command()
@click.argument("sku")
@json_option(json_fields.listed(json_fields.PRICE))
@refuses
def show(sku: str, as_json: bool) -> None:
    """Show everything that is known of a SKU, in every region.

    \b
    Examples:
      dtrain prices show Standard_NC24ads_A100_v4
    """
    from dtrain_dagster.cli.terminal import pairs_table
    from dtrain_dagster.costs.prices import known_regions, price_of, price_table

    known = [region for region in known_regions() if sku.casefold() in map(str.casefold, price_table(region))]
    rows = [price_of(sku, region) for region in known] or [price_of(sku)]  # which says what there is
    if as_json:
        print_json([price_document(row) for row in rows])
        return
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
@click.option(
    "--region", "regions", multiple=True, metavar="REGION", help="Region. May be repeated.  [default: DTRAIN_REGION]"
)
@click.option(
    "--sku", "skus", multiple=True, metavar="SKU", help="SKU. May be repeated.  [default: all that are known]"
)
@click.option(
    "--url",
    metavar="URL",
    help="Another address of the price list.  [default: https://prices.azure.com/api/retail/prices]",
)
@click.option(
    "--spot-history",
    is_flag=True,
    help="Also ask Azure Resource Graph, with your login, for 90 days of Spot prices and for eviction rates.",
)
@json_option(json_fields.PRICES_REFRESHED)
@refuses
def refresh(
    regions: tuple[str, ...], skus: tuple[str, ...], url: str | None, spot_history: bool, as_json: bool
) -> None:
    """Ask Azure's public price list for newer prices.

    It needs no account, except for --spot-history. Its prices are kept in DTRAIN_HOME/prices.json, and are used from
    then on if they are newer than those of the package. If something goes wrong, or a price cannot be true, nothing is
    changed. Delete the file to go back to the prices of the package.

    \b
    Examples:
      dtrain prices refresh
      dtrain prices refresh --region westeurope --sku Standard_NC24ads_A100_v4
      dtrain prices refresh --spot-history
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
            raise Refusal(f"{region!r} is not an Azure region; names look like eastus")
    path = refreshed_path(settings.home)
    done = refresh_price_table(path, where, asked, url or RETAIL_URL, ask_market=_market() if spot_history else None)
    if as_json:
        print_json(_refreshed_document(done, str(path)))
        return
    _print_refreshed(done)
    click.echo(f"written to {path}")


def _market() -> Callable[[str, Sequence[str]], SpotMarket]:
    """Return the function that asks Azure Resource Graph, with the login of this machine. Raise `Refusal` where there
    is none."""
    from dtrain_dagster.costs.spot_market import fetch_market
    from trainer.secrets.azure_token import TOKEN_SCOPE, credential

    logging.getLogger("azure.identity").setLevel(logging.CRITICAL)  # it lists all kinds of login; ours is one sentence
    try:
        token = str(credential().get_token(TOKEN_SCOPE).token)
    except ImportError:
        raise Refusal("--spot-history needs Azure's libraries: pip install 'dtrain[azure]'") from None
    except Exception as error:  # whatever the many kinds of login raise
        raise Refusal(f"--spot-history needs a login to Azure, such as by `az login`: {type(error).__name__}") from None
    return partial(fetch_market, token=token)


def price_document(row: SkuPrice) -> dict[str, Any]:
    """Return a SKU in a region for JSON, with the fields of `dtrain_dagster.cli.json_fields.PRICE`. Pure."""
    from dataclasses import asdict

    figures = {
        tier: asdict(figure) | {"spread": asdict(figure.spread) if figure.spread else None}
        for tier, figure in row.figures.items()
    }
    names = [name for name in json_fields.PRICE if name.partition(".")[0] != "usd_per_hour"]
    return {**{name: getattr(row, name) for name in names}, "usd_per_hour": figures}


def _refreshed_document(done: Refreshed, path: str) -> dict[str, Any]:
    changes = [
        {
            **{"region": item.region, "sku": item.sku, "tier": item.tier},
            "before_usd_per_hour": item.before.usd_per_hour if item.before else None,
            "usd_per_hour": item.after.usd_per_hour,
        }
        for item in done.changes
    ]
    return {"file": path, "changes": changes, "notes": list(done.notes)}


def _print_table(rows: Sequence[SkuPrice]) -> None:
    """Print a line per SKU and region; behind each price the number of its source, which follows below. What is the
    same in all lines is said once."""
    from dtrain_dagster.cli.tables import Column, print_fitted
    from dtrain_dagster.settings.tiers import TIERS

    regions, skus = {row.region for row in rows}, {row.sku for row in rows}
    columns = [
        *([Column("REGION")] if len(regions) > 1 else []),
        *([Column("SKU")] if len(skus) > 1 or len(regions) == 1 else []),
        Column("GPUS", rank=2), Column("GIB", right=True, rank=4),
        *(Column(tier.replace("_", "\n").upper(), right=True) for tier in TIERS),
        Column("SPEED", right=True, rank=3), Column("RETIRED", rank=1),
    ]  # fmt: skip
    sources: dict[tuple[str, str, str], int] = {}
    cells = [
        [
            *([row.region] if len(regions) > 1 else []),
            *([row.sku] if len(skus) > 1 or len(regions) == 1 else []),
            f"{row.gpus} × {row.gpu}",
            str(row.gpu_memory_gib),
            *(_cell(row.figures.get(tier), sources) for tier in TIERS),
            f"{row.speed:g}",
            row.retired_on or "",
        ]
        for row in rows
    ]
    where = f" in {next(iter(regions))}" if len(regions) == 1 else ""
    click.echo(f"US dollars per node and hour{where}; – means not offered or not known")
    print_fitted(console(), columns, cells)
    click.echo("where they come from:")
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
        from dtrain_dagster.cli.tables import Column, print_fitted

        columns = (
            *(Column("REGION"), Column("SKU"), Column("TIER"), Column("BEFORE", right=True)),
            *(Column("AS OF", rank=1), Column("NOW", right=True)),
        )
        cells = []
        for item in changed:
            before = (f"{item.before.usd_per_hour:.4g}", item.before.recorded_on) if item.before else ("–", "")
            cells.append([item.region, item.sku, item.tier, *before, f"{item.after.usd_per_hour:.4g}"])
        print_fitted(console(), columns, cells)
    for note in done.notes:
        click.echo(note)
