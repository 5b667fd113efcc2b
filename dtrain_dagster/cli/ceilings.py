"""`dtrain cost ceilings`: what a home may spend; and the promise that every command makes which starts a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import click

from dtrain_dagster.cli.common import print_json, say
from dtrain_dagster.costs.ceilings import PER_MONTH, CeilingError, Stand, read_dollars, write_ceiling
from dtrain_dagster.costs.money import usd
from dtrain_dagster.jobs.spending import SpendingBook, Wanted
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.home import make_home

WORD = "ceilings"
"""What is given to `dtrain cost` instead of the name of a job."""
OF_CEILINGS = (PER_MONTH, "lifts")
"""The options of `dtrain cost` that need it."""


def _read_dollars(context: click.Context, option: click.Parameter, value: str | None) -> Decimal | None:
    try:
        return None if value is None else read_dollars(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def ceiling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options `OF_CEILINGS`."""
    command = click.option("--none", "lifts", is_flag=True, help="With ceilings: lift it.")(command)
    words = "With ceilings: of all jobs in a calendar month (UTC)."
    return click.option("--per-month", callback=_read_dollars, metavar="USD", help=words)(command)


def book_of(settings: Settings) -> SpendingBook:
    """Return what the jobs of the settings' home have spent."""
    return SpendingBook(settings.home, settings.jobs_uri, tier_of(settings.tiers[0]))


@contextmanager
def promising(settings: Settings, wanted: Wanted) -> Iterator[None]:
    """Promise what a start may cost for as long as the block needs to launch it, and print how much of the ceiling is
    used. Raise `CeilingError` where it would be exceeded."""
    with book_of(settings).promised(wanted) as stand:
        say(*ceiling_lines(stand, wanted), err=True)
        yield


def tell_ceilings(settings: Settings, wanted: Wanted) -> None:
    """Print how much of the ceiling a start would use. Raise `CeilingError` where it would be exceeded."""
    if stand := book_of(settings).judge(wanted):
        say(*ceiling_lines(stand, wanted), err=True)
        if refusal := stand.refusal:
            raise CeilingError(refusal)


def ceiling_lines(stand: Stand | None, wanted: Wanted) -> list[str]:
    """Return what the ceiling, if one is set, means for a start. Pure."""
    if stand is None:
        return []
    lines = [f"ceiling: {stand.text}"]
    if wanted.usd is None:
        lines.append("note: what it costs is not known, so an hour of its nodes counts")
    return [*lines, *(f"note: {sentence}" for sentence in stand.not_counted)]


def ceilings_command(settings: Settings, as_json: bool, lifts: bool, per_month: Decimal | None) -> None:
    """Set the ceiling where one is given, or lift it; then show how much of it is used."""
    if lifts and per_month is not None:
        raise click.UsageError("--none lifts the ceiling: leave out --per-month", click.get_current_context())
    if lifts or per_month is not None:
        write_ceiling(make_home(settings.home), per_month)
    stand = book_of(settings).judge()
    if as_json:
        print_json(ceilings_document(stand))
    elif stand is None:
        say("no ceiling is set")
    else:
        say(f"{stand.text}{stand.most}", *(f"note: {sentence}" for sentence in stand.not_counted))


def ceilings_document(stand: Stand | None) -> dict[str, Any]:
    """Return how much of the ceiling is used for JSON. Pure."""
    if stand is None:
        return {"month": None, PER_MONTH: None}
    return {
        "month": stand.month,
        PER_MONTH: float(stand.per_month),
        "spent_usd": usd(stand.spent),
        "promised_usd": usd(stand.promised),
        "by": {name: usd(units) for name, units in stand.by.items()},
        "not_counted": {item.name: item.unknown for item in stand.spending if item.unknown},
    }
