"""Parts that all assets share: owners, the options of a launchpad, and helpers that build metadata.

The page of an asset is in the order in which one reads: the verdict in a sentence, a picture, three figures, the ten
best rows, links, and the rest. Dagster shows metadata in the order in which it is given;
`dtrain_dagster.support.page_entries` says how much of it is in sight.

Assets that pass a value on have no return annotation: Dagster takes a bare ``MaterializeResult`` for one without a
value, and a parametrised one does not go together with check specs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.costs.prices import PriceError, hardware_of
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.settings.environment import SettingsError
from dtrain_dagster.support.formatting import in_markdown
from dtrain_dagster.support.secrets import SecretError
from trainer.config import ConfigError
from trainer.data.manifest import DatasetError
from trainer.setting_errors import describe_errors

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""Pydantic's names of a number's bounds, and their words."""
MOST_ROWS = 10
"""The most rows of a table on a page."""
MOST_UNBROKEN = 30
"""The most letters of an address that a page shows in one line at a width of 1280 pixels. Browsers break addresses at
hyphens."""
_NO_TARGET = re.compile(r"[<>\\\s]")
"""What may not be in the target of a Markdown link."""
OWNERS = ["team:ml-platform"]


class LaunchpadOptions(dg.Config):
    """The options of an asset in the launchpad. Dagster shows a field's description, here its docstring, and the values
    of an enum; bounds of numbers it neither shows nor checks, so they are added to the descriptions, and checked when
    the step begins."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    def __init__(self, **options: Any) -> None:
        """Raise `dagster.Failure`, with a line for each wrong field, for values that cannot be used."""
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise dg.Failure(describe_errors(error, type(self), "launchpad"), allow_retries=False) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            said, bounds = (field.description or "").strip().rstrip("."), describe_bounds(field)
            if bounds and not said.endswith(f"({bounds})"):  # it is inherited with its description
                field.description = f"{said} ({bounds})."


def describe_bounds(field: FieldInfo) -> str:
    """Return the bounds of a number in words, "" where it has none. Pure."""
    bounds = ((words, getattr(item, name, None)) for item in field.metadata for name, words in _BOUNDS.items())
    return ", ".join(f"{words} {limit:g}" for words, limit in bounds if limit is not None and limit < math.inf)


@contextmanager
def refusing_mistakes() -> Iterator[None]:
    """Turn an error that a user has to mend into a `dagster.Failure` with its message, which is not tried again."""
    try:
        yield
    except (ConfigError, DatasetError, DataError, PriceError, ClusterError, SettingsError, SecretError) as error:
        raise dg.Failure(str(error), allow_retries=False) from None


def hardware_mark(cluster: GPUClusterResource, gpu_type: str) -> str:
    """Return the part of a short run's id that names the measured nodes, such as "-nc6sv3"; "" where
    they are this machine."""
    if cluster.traits.is_this_machine:
        return ""
    name = hardware_of(gpu_type).sku.removeprefix("Standard_").replace("_", "").lower()
    return "-" + re.sub(r"[^a-z0-9.-]", "-", name)


def round_figures(value: Any) -> Any:
    """Return a figure as metadata shows it, and anything else unchanged."""
    return round(value, 6) if isinstance(value, float) else value


def table_schema(rows: list[dg.TableRecord]) -> dg.TableSchema:
    """Return the columns of the first row; a value that is not a number makes a text column."""
    kinds = {int: "int", float: "float"}
    first = rows[0].data if rows else {}
    return dg.TableSchema(
        columns=[dg.TableColumn(name, kinds.get(type(value), "string")) for name, value in first.items()]
    )


def head_of_page(verdict: str, picture: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page begins with. ``picture``: Markdown of `dtrain_dagster.reports.small_pictures`, or "". Figures
    that are None are left out."""
    head: dict[str, Any] = {"verdict": verdict}
    if picture:
        head["picture"] = dg.MarkdownMetadataValue(picture)
    return head | {name: value for name, value in figures.items() if value is not None}


def page_of(head: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page with what it begins with, and below it the rest that is not there yet."""
    return {**head, **{name: value for name, value in rest.items() if name not in head}}


def best_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> dg.TableMetadataValue:
    """Return the first rows as a table. ``columns``: those that are shown, the most telling first; all, where none are
    given."""
    shown = [{name: row[name] for name in columns or row if name in row} for row in rows[:MOST_ROWS]]
    records = [dg.TableRecord(row) for row in shown]
    return dg.TableMetadataValue(records, table_schema(records))


def with_rest(rows: Sequence[Mapping[str, Any]], name: str, sums: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return at most `MOST_ROWS` rows, the last of which is the sum of all that have no row of their own. ``name``: the
    column that says so; ``sums``: those that are added up."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    kept, rest = rows[: MOST_ROWS - 1], rows[MOST_ROWS - 1 :]
    others: dict[str, Any] = dict.fromkeys(rows[0], "")
    others |= {name: f"{len(rest)} others"} | {column: sum(row[column] for row in rest) for column in sums}
    return [*kept, others]


def sentences(lines: Sequence[str]) -> dg.MarkdownMetadataValue:
    """Return lines as a list that the UI shows in place, "none" for no lines. It hides lists as JSON behind a link."""
    return dg.MarkdownMetadataValue("\n".join(f"- {in_markdown(line)}" for line in lines) or "none")


def links(**addresses: str) -> dict[str, dg.MetadataValue]:
    """Return the addresses that are pages of the web, as links that can be clicked. One with a piece of more than
    `MOST_UNBROKEN` letters, which the UI would show in full and not break, has its name as its text."""
    return {
        name: link_to(name, address)
        for name, address in addresses.items()
        if address.startswith(("https://", "http://"))  # no javascript: in a link of the UI
    }


def link_to(name: str, address: str) -> dg.MetadataValue:
    """Return a link to an address of the web, see `links`. Pure."""
    is_short = max(map(len, address.split("-"))) <= MOST_UNBROKEN
    if is_short or _NO_TARGET.search(address):
        return dg.MetadataValue.url(address)
    return dg.MarkdownMetadataValue(f"[{name.replace('_', ' ')}](<{address}>)")
