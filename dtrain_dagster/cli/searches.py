"""`dtrain searches`: what the searches of this home have found. A search is run by `dtrain_dagster.cli.search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli.common import Refusal, console, read_settings, refuses, say
from dtrain_dagster.cli.job_names import LATEST, complete_searches, resolve_name
from dtrain_dagster.cli.json_fields import KEPT_SEARCH, SEARCH_RESULT, also, listed
from dtrain_dagster.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from dtrain_dagster.search.kept import KeptSearch


@click.command()
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_searches)
@json_option({**listed(KEPT_SEARCH), **also(SEARCH_RESULT, "with NAME")})
@refuses
def searches(name: str | None, as_json: bool) -> None:
    """Show what the searches of this home have found.

    Without NAME it lists them, newest first; with NAME it shows the trials of one. NAME may be `latest`, or the
    beginning of a name.

    \b
    Examples:
      dtrain searches
      dtrain searches latest
      dtrain searches latest --json | jq -r .settings_file
    """
    from dtrain_dagster.cli.search import summary, trials_table
    from dtrain_dagster.search.kept import read_search, search_names
    from dtrain_dagster.search.space import SpaceError

    settings = read_settings()
    names = search_names(settings.home)
    if name is None:
        found = []
        for each in names:
            try:
                found.append(read_search(settings.home, each))
            except SpaceError as error:  # of one search: the others are listed
                say(f"{each} is left out: {error}", err=True)
        _print_all(found, as_json)
        return
    if name == LATEST and names and LATEST not in names:
        name = names[0]
    kept = read_search(settings.home, resolve_name(name, names, "search", "dtrain searches"))
    if kept.result is None:
        raise Refusal(f"search {kept.name} is {kept.state}, and has no result yet: `dtrain fleet status {kept.name}`")
    if as_json:
        print_json(kept.result)
        return
    console().print(trials_table(kept.result["trials"], kept.result["metric"]), highlight=False)
    for sentence in summary(kept.result):
        say(sentence)


def _print_all(found: list[KeptSearch], as_json: bool) -> None:
    from dtrain_dagster.cli.status import time_of
    from dtrain_dagster.cli.tables import Column, print_fitted
    from dtrain_dagster.support.formatting import dollars

    rows = [search_row(kept) for kept in found]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say("no searches yet; `dtrain search --dataset latest --space space.json` begins one")
        return
    columns = (
        *(Column("SEARCH"), Column("STATE"), Column("STARTED", rank=2), Column("TRIALS", right=True, rank=3)),
        *(Column("METRIC", rank=1), Column("BEST", right=True), Column("COST", right=True)),
    )
    cells = [
        [
            *(row["name"], row["state"], time_of(row["began_at"], with_seconds=False), str(row["trials"])),
            row["metric"] or "",
            "" if row["best_score"] is None else f"{row['best_score']:.6g}",
            "" if row["usd"] is None else dollars(row["usd"]),
        ]
        for row in rows
    ]
    print_fitted(console(), columns, cells)


def search_row(kept: KeptSearch) -> dict[str, Any]:
    """Return a search as an item of the list, with the fields of `dtrain_dagster.cli.json_fields.KEPT_SEARCH`. Pure."""
    result = kept.result or {}
    best = result.get("best") or {}
    return {
        "name": kept.name,
        "state": kept.state,
        "began_at": kept.began_at,
        "trials": kept.jobs,
        "metric": result.get("metric"),
        "best_trial": best.get("trial"),
        "best_score": best.get("score"),
        "usd": result.get("usd"),
        "settings_file": result.get("settings_file"),
    }
