"""`dtrain cost ceilings`: what a home may spend; and the promise that every command makes which starts a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any

import click

from dtrain_dagster.cli.common import console, print_json, say
from dtrain_dagster.cli.screen import plain_table
from dtrain_dagster.costs.ceilings import (
    KINDS,
    CeilingError,
    Ceilings,
    describe_most,
    describe_stand,
    explain_unknown,
    read_ceilings,
    read_dollars,
    write_ceilings,
)
from dtrain_dagster.costs.money import usd
from dtrain_dagster.jobs.spending import Judged, SpendingBook, Wanted
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.home import make_home
from dtrain_dagster.support.formatting import dollars

WORD = "ceilings"
"""What is given to `dtrain cost` instead of the name of a job."""
OF_CEILINGS = (*KINDS, "lifts")
"""The options of `dtrain cost` that need it."""


def _read_dollars(context: click.Context, option: click.Parameter, value: str | None) -> Decimal | None:
    try:
        return None if value is None else read_dollars(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def ceiling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options `OF_CEILINGS`."""
    whose = {
        "per_hour": "of all that runs at once, in an hour",
        "per_month": "of all jobs in a calendar month (UTC)",
    }
    command = click.option("--none", "lifts", is_flag=True, help="With ceilings: lift all of them.")(command)
    for name, words in reversed(whose.items()):
        option = f"--{name.replace('_', '-')}"
        command = click.option(option, callback=_read_dollars, metavar="USD", help=f"With ceilings: {words}.")(command)
    return command


def book_of(settings: Settings) -> SpendingBook:
    """Return what the jobs of the settings' home have spent."""
    return SpendingBook(settings.home, settings.jobs_uri, tier_of(settings.tiers[0]))


@contextmanager
def promising(settings: Settings, wanted: Wanted) -> Iterator[None]:
    """Promise what a start may cost for as long as the block needs to launch it, and print how the ceilings stand.
    Raise `CeilingError` where one would be exceeded."""
    with book_of(settings).promised(wanted) as judged:
        say(*ceiling_lines(judged, wanted), err=True)
        yield


def tell_ceilings(settings: Settings, wanted: Wanted) -> None:
    """Print how the ceilings would stand with a start. Raise `CeilingError` where one would be exceeded."""
    judged = book_of(settings).judge(wanted)
    say(*ceiling_lines(judged, wanted), err=True)
    if refusal := judged.refusal:
        raise CeilingError(refusal)


def ceiling_lines(judged: Judged, wanted: Wanted) -> list[str]:
    """Return a line for each ceiling that is set, with what a start adds. Pure."""
    lines = [f"ceiling: {describe_stand(stand, judged.month)}" for stand in judged.stands]
    if lines and wanted.usd is None:
        lines.append("note: what it costs is not known, so an hour of its nodes counts")
    return [*lines, *(f"note: {sentence}" for sentence in explain_unknown(judged.spending))]


def ceilings_command(settings: Settings, as_json: bool, lifts: bool, given: Mapping[str, Decimal | None]) -> None:
    """Set ceilings where some are ``given``, or lift all; then show how they stand."""
    if lifts and any(given.values()):
        raise click.UsageError("--none lifts all ceilings: leave out the others", click.get_current_context())
    if lifts or any(given.values()):
        before = Ceilings() if lifts else read_ceilings(settings.home)
        set_now = {name: value for name, value in given.items() if value is not None}
        write_ceilings(make_home(settings.home), replace(before, **set_now))
    judged = book_of(settings).judge()
    if as_json:
        print_json(ceilings_document(judged))
    elif not judged.ceilings:
        say("no ceiling is set")
    else:
        table = plain_table("ceiling", "dollars", "spent", "promised", "used", right=("dollars", "spent", "promised"))
        table.add_column("most by", style="dim")
        for stand in judged.stands:
            amounts = (dollars(usd(units)) for units in (stand.limit, stand.spent, stand.promised))
            table.add_row(stand.title, *amounts, f"{stand.share:.0%}", describe_most(stand))
        console().print(table, highlight=False)
        say(f"of {judged.month} (UTC); per hour: of what runs now")
        for sentence in explain_unknown(judged.spending):
            say(f"note: {sentence}")


def ceilings_document(judged: Judged) -> dict[str, Any]:
    """Return how the ceilings stand for JSON. Pure."""
    amounts = {kind: getattr(judged.ceilings, kind) for kind in KINDS}
    return {
        "month": judged.month or None,
        "ceilings": {kind: None if value is None else float(value) for kind, value in amounts.items()},
        "stands": [
            {
                "ceiling": stand.kind,
                "usd": usd(stand.limit),
                "spent_usd": usd(stand.spent),
                "promised_usd": usd(stand.promised),
                "by": {name: usd(units) for name, units in stand.by},
            }
            for stand in judged.stands
        ],
        "not_counted": {item.name: item.unknown for item in judged.spending if item.unknown},
    }
