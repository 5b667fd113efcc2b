"""Rows of a table come back from what is stored of them, and go there again as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.model.raw_rows import date_category, date_days, date_number, raw_columns, stored_rows
from trainer.spec import DATE_CATEGORIES, DATE_NUMBERS, RawColumn, RowSpec

DATES = np.array(["2024-02-29T23:30:00", "1969-12-31T00:00:00", "NaT", "2000-01-03T07:30:00"], dtype="datetime64[us]")


def spec_of(raw: dict[str, RawColumn], dates: tuple[str, ...] = ()) -> RowSpec:
    """Columns of mean 3 and deviation 2; of dates the given parts, with all their values."""
    stored: list[tuple[str, str, tuple[str, ...]]] = []
    for name, column in raw.items():
        stored.append((name, "", ("blue", "red") if column.type == "string" else ()))
        values = {"month": range(1, 13), "weekday": range(1, 8), "hour": range(24)}
        if column.type == "datetime":
            stored += [(name, part, tuple(map(str, values.get(part, ())))) for part in dates]
    return RowSpec(
        dataset_id="d",
        features=tuple(f"{name}.{part}" if part else name for name, part, _ in stored),
        categories=tuple(values for *_, values in stored),
        has_missing=tuple(raw[name].missing and not values for name, _, values in stored),
        feature_mean=tuple(0.0 if values else 3.0 for *_, values in stored),
        feature_std=tuple(1.0 if values else 2000.0 for *_, values in stored),
        target="y", task="regression", classes=(), target_mean=0.0, target_std=1.0,
        raw=tuple(raw.values()), sources=tuple(name for name, *_ in stored), parts=tuple(part for _, part, _ in stored),
    )  # fmt: skip


def column(kind: str, missing: bool = False) -> RawColumn:
    return RawColumn(name=kind, type=kind, missing=missing)


def test_the_parts_of_a_date() -> None:
    assert date_number(DATES, "year").tolist()[:2] == [2024, 1969]
    assert date_number(DATES, "day").tolist()[:2] == [29, 31]
    assert date_category(DATES, "month").tolist() == ["2", "12", None, "1"]
    assert date_category(DATES, "weekday").tolist() == ["4", "3", None, "1"], "a Thursday, a Wednesday, a Monday"
    assert date_category(DATES, "hour").tolist() == ["23", "0", None, "7"]
    assert date_days(DATES)[1] == -1
    assert np.isnan([date_days(DATES)[2], date_number(DATES, "year")[2]]).all()


@pytest.mark.parametrize("parts", [(), ("month", "weekday"), (*DATE_NUMBERS, *DATE_CATEGORIES)])
def test_rows_go_there_and_back(parts: tuple[str, ...]) -> None:
    given: dict[str, Any] = {
        "number": np.array([1.5, np.nan, 3, 4]),
        "integer": np.array([1, 2, 3, 4]),
        "boolean": np.array([True, None, False, True], dtype=object),
        "string": np.array(["red", None, "blue", "red"], dtype=object),
        "datetime": DATES,
    }
    raw = {kind: column(kind, kind not in ("integer", "string")) for kind in given}
    spec = spec_of(raw, parts)
    rows = stored_rows(spec, given)
    back = raw_columns(spec, rows)
    for name, values in given.items():
        assert [str(value) for value in back[name]] == [str(value) for value in values], name
    again = stored_rows(spec, back)
    assert np.array_equal(again, rows, equal_nan=True)


def test_a_date_that_storage_rounds_over_midnight_stays_on_its_day() -> None:
    spec = spec_of({"datetime": column("datetime")}, (*DATE_NUMBERS, *DATE_CATEGORIES))
    late = np.arange("2024-01-01T23:59:58", "2027-01-01", 86_400, dtype="datetime64[s]").astype("datetime64[us]")
    rows = stored_rows(spec, {"datetime": late})
    mean, std = np.array(spec.feature_mean), np.array(spec.feature_std)
    rounded = ((rows - mean) / std).astype(np.float32).astype(np.float64) * std + mean
    assert (np.floor(rounded[:, 0]) != np.floor(rows[:, 0])).any(), "some were rounded over it"
    again = stored_rows(spec, raw_columns(spec, rounded))
    assert np.array_equal(again[:, 1:], rows[:, 1:]), "year, day, month, day of the week, hour"
    assert np.abs(again[:, 0] - rows[:, 0]).max() < 30 / 86_400


def test_what_a_category_does_not_have_sets_nothing_and_extra_columns_are_ignored() -> None:
    spec = spec_of({"string": column("string"), "number": column("number", missing=True)})
    rows = stored_rows(spec, {"string": np.array(["green", "red"], dtype=object), "more": np.zeros(2)})
    assert rows[:, 0].tolist() == [0, 2]
    assert np.isnan(rows[:, 1]).all(), "an optional column that is not there"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": [1.0]}, "lacks the column 'string': give number, string, datetime"),
        (
            {"number": [1.0], "string": [1.0], "datetime": DATES[:1]},
            "the column 'string' holds float64, and is a string",
        ),
        ({"number": [1.0], "string": ["a"], "datetime": [1.0]}, "the column 'datetime' holds float64"),
        ({"number": ["1"], "string": ["a"], "datetime": DATES[:1]}, "the column 'number' holds <U1, and is a number"),
    ],
)
def test_other_columns_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    raw = {name: column(name) for name in ("number", "string", "datetime")}
    with pytest.raises(ValueError, match=message):
        stored_rows(spec_of(raw), {name: np.asarray(values) for name, values in given.items()})
