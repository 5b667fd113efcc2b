"""Pictures that Dagster's UI shows in place: short, well-formed, and of nothing where there is nothing."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from urllib.parse import unquote

import pytest

from dtrain_dagster.reports.small_pictures import (
    SHOWN_IN_PLACE,
    WIDTH,
    small_bar,
    small_curves,
)

LONG = [(float(step), -1000.5 + math.sin(step)) for step in range(5000)]
NAMES = [f"a cause of cost with a long name {number}" for number in range(14)]


def read(markdown: str) -> ElementTree.Element:
    """The SVG in a picture's Markdown, which has to be shown in place."""
    assert 0 < len(markdown) < SHOWN_IN_PLACE
    found = re.fullmatch(r"!\[[^\[\]]*\]\(data:image/svg\+xml,([^\s()<>\"#]+)\)", markdown)
    assert found is not None, markdown
    return ElementTree.fromstring(unquote(found[1]))


def test_the_largest_ones_are_shown_in_place() -> None:
    curves = read(small_curves({"training": LONG, "validation": LONG[::500]}))
    assert len(curves.findall("{*}polyline")) == 2
    bar = read(small_bar({name[:24]: 1.0 + number for number, name in enumerate(NAMES)}))
    widths = [float(path.attrib["d"].rpartition("h")[2]) for path in bar.findall("{*}path")]
    assert sum(widths) == pytest.approx(WIDTH, abs=len(widths))


def test_a_curve_ends_at_its_last_value_and_leaves_out_what_is_no_number() -> None:
    picture = read(small_curves({"loss": [(0.0, 4.0), (1.0, math.nan), (2.0, 2.0), (4.0, 1.0)]}))
    [line] = picture.findall("{*}polyline")
    places = list(map(int, line.attrib["points"].split(",")))
    assert places[0::2] == [0, WIDTH / 2, WIDTH], "the x of three points, over the whole width"
    assert places[1] < places[3] < places[5], "it falls"
    assert "loss 4 → 1" in "".join(picture.itertext())


def test_curves_are_as_high_as_their_values() -> None:
    """A line that hardly moves looks like one: no line has a scale of its own that the picture does not tell."""
    steep, flat = [(0.0, 0.0), (1.0, 4.0)], [(0.0, 0.0), (1.0, 2.0)]
    picture = read(small_curves({"steep": steep, "flat": flat}))
    ends = [int(line.attrib["points"].rpartition(",")[2]) for line in picture.findall("{*}polyline")]
    assert ends == [2, 34]
    three = read(small_curves({name: LONG for name in ("one", "two", "three")}))
    assert len(three.findall("{*}polyline")) == 3


def test_long_names_leave_less_room_and_no_empty_place() -> None:
    """The causes of a training without a probe were too long: the page of its cost had no picture."""
    causes = {name: 1.0 for name in NAMES} | {"waiting for a straggler in a step with a long name": 9.0}
    assert read(small_bar(causes)).findall("{*}path")


def test_there_is_no_picture_of_nothing() -> None:
    assert small_curves({"loss": [(1.0, 2.0)], "other": [(0.0, math.inf), (1.0, math.nan)]}) == ""
    assert small_bar({}) == small_bar({"a": 0.0}) == ""


def test_names_from_nodes_cannot_leave_the_picture() -> None:
    hostile = "</text></svg><script>alert(1)</script>](javascript:alert(1))"
    picture = read(small_bar({hostile: 1.0}))
    assert [child.tag.rpartition("}")[2] for child in picture] == ["path", "text"]
