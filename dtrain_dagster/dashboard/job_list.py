"""The page of all jobs: a table that the server makes, live ones first, of the jobs that its address asks for.

A page asks for itself every two seconds, and takes over the rows where they have changed. Who sorts or compares jobs
does that in MLflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from urllib.parse import quote, urlencode

import jinja2

from dtrain_dagster.dashboard.job_index import Listing
from dtrain_dagster.dashboard.page import static
from dtrain_dagster.jobs.facts import DAMAGED, JobFacts
from dtrain_dagster.support.formatting import dollars, format_duration

ROWS = 100
"""The rows of a page, until more are asked for."""
STATES = ("running", "queued", "failed", DAMAGED, "cancelled", "succeeded")


def jobs_page(dashboard_url: str, text: str) -> str:
    """Return the address of the list of the jobs that have this text in their names, such as that of their fleet. Pure.
    It is no query: the guard refuses those in links from pages of other servers."""
    return f"{dashboard_url.rstrip('/')}/find/{quote(text, safe='')}"


def chosen(rows: Sequence[JobFacts], text: str, state: str) -> list[JobFacts]:
    """Return the rows in ``state`` ("" for any) that have all words of a text, those of live jobs first. Pure."""
    words = text.lower().split()
    found = [
        row
        for row in rows
        if state in ("", row.state) and all(word in f"{row.job_id} {row.model} {row.words}".lower() for word in words)
    ]
    return sorted(found, key=lambda row: not row.running)


def list_page(listing: Listing, text: str, state: str, most: int) -> str:
    """Return the page. ``most``: how many rows it has at most. Pure."""
    found = chosen(listing.rows, text, state)
    usd = [row.usd for row in found if row.usd is not None]
    return _template().render(
        rows=found[:most],
        found=len(found),
        paid=dollars(sum(usd)) if usd else "",
        text=text,
        state=state,
        states=STATES,
        running=sum(row.running for row in listing.rows),
        unread=listing.unread if listing.version else max(1, listing.unread),  # else none was looked for yet
        total=len(listing.rows),
        more=f"/?{urlencode({'q': text, 'state': state, 'n': most + ROWS})}" if len(found) > most else "",
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"dollars": dollars, "moment": _moment, "took": format_duration, "many": "{:,}".format}
    return environment.from_string(static("jobs.html"))


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
