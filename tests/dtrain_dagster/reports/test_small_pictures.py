"""Pictures that Dagster's UI shows in place: short, of one scale, and of nothing where there is nothing."""

from __future__ import annotations

import math

from dtrain_dagster.reports.small_pictures import SHOWN_IN_PLACE, WIDTH, small_bar, small_curves


def test_each_curve_has_its_scale_and_leaves_out_what_is_no_number() -> None:
    falling = [(0.0, 4.0), (1.0, math.nan), (2.0, 2.0), (4.0, 0.0)]
    assert small_curves({"loss": falling, "rise": [(0.0, 0.0), (1.0, 0.5)]}) == (
        "- `█▅▁` loss 4 → 0\n- `▁█` rise 0 → 0.5"
    )


def test_the_largest_ones_are_shown_in_place() -> None:
    long = [(float(step), -1000.5 + math.sin(step)) for step in range(5000)]
    curves = small_curves({"training": long, "validation": long[::500]})
    assert [len(line.split("`")[1]) for line in curves.splitlines()] == [WIDTH, 10]
    bar = small_bar({f"a cause of cost with a long name, which goes on and on {number}": 1.0 for number in range(14)})
    assert bar.splitlines()[-1].endswith(" other 71%")
    assert max(map(len, (curves, bar))) < SHOWN_IN_PLACE


def test_shares_are_in_order() -> None:
    assert small_bar({"a": 1.0, "b": 3.0}) == f"- `{'█' * 18}` b 75%\n- `{'█' * 6}` a 25%"


def test_there_is_no_picture_of_nothing() -> None:
    assert small_curves({"loss": [(1.0, 2.0)], "other": [(0.0, math.inf), (1.0, math.nan)]}) == ""
    assert small_bar({}) == small_bar({"a": 0.0}) == ""


def test_names_from_nodes_cannot_leave_the_picture() -> None:
    assert "](javascript:" not in small_bar({"</svg><script>alert(1)</script>](javascript:alert(1))": 1.0})
