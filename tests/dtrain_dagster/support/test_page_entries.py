"""How much of an asset's page is in sight, and that programs find all of it."""

from __future__ import annotations

from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import best_rows, links
from dtrain_dagster.support.page_entries import FACTS, IN_SIGHT, MORE, fit_page, read_entries

ROWS = [
    {
        "name": "a long word",
        "nll": -1.5,
        "coverage of the interval": 0.9,
        "one_more_column": 2,
        "an_unbroken_name_of_a_column": 1,
    }
] * 3
PAGE: dict[str, Any] = {
    "verdict": "It is good.",
    "dagster/row_count": 3,
    "run_dir": dg.MetadataValue.path("/home/somebody/a/long/path/that/no/browser/breaks"),
    **{f"figure_{number}": number / 2 for number in range(3)},
    "rows": best_rows(ROWS),
    **links(dashboard="http://127.0.0.1:8060/jobs/one"),
    "tags": dg.MetadataValue.json({"dataset_id": "abc"}),
    "charts": dg.MarkdownMetadataValue("![Curves](data:image/svg+xml;base64,)"),
    "words": dg.MarkdownMetadataValue("- one"),
    "table": best_rows(ROWS),
    **{f"further_{number}": number for number in range(20)},
}


def test_ten_entries_are_in_sight_and_the_rest_is_behind_two_links() -> None:
    shown = fit_page(PAGE)
    names = [name for name in shown if not name.startswith("dagster/")]
    assert len(names) == IN_SIGHT + 2
    assert names[:2] == ["verdict", "figure_0"]
    assert names[-2:] == [MORE, FACTS]
    assert "run_dir" not in names
    assert shown["dagster/row_count"] == 3, "Dagster reads it"
    columns = [column.name for column in shown["rows"].schema.columns]
    assert columns == ["name", "nll", "coverage of the interval"], "what there is room for"
    assert "## table\n\n| name | nll | coverage of the interval |" in shown[MORE].value, "with all columns"


def test_programs_find_each_value_by_its_name() -> None:
    read = read_entries(fit_page(PAGE))
    assert read["further_19"] == 19
    assert read["run_dir"].startswith("/home")
    assert read["tags"] == {"dataset_id": "abc"}
    assert read["rows"] == ROWS, "all columns"


def test_a_short_page_is_shown_as_it_is() -> None:
    page = {"verdict": "It is good.", "run_dir": dg.MetadataValue.path("/a")}
    assert fit_page(page) == page
