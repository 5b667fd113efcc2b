"""A trace as a flame graph and a timeline: what is added up, what is left out, and what is no trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtrain_dagster.dashboard.flame import MOST_FRAMES, picture_of
from dtrain_dagster.dashboard.profiles import TraceError, TracePictures, list_traces
from trainer.rundir import RunDir


def operation(name: str, began: Any, took: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": thread, "ts": began, "dur": took, **more}


STEPS = [
    operation("step#1", 0, 1000),
    operation("forward", 0, 400),
    operation("mm", 100, 300),
    operation("step#2", 2000, 3000),
    operation("forward", 2000, 1000),
    operation("mm", 2100, 200),
    operation("all-reduce", 2500, 1500, thread=2),
    operation("PyTorch Profiler (0)", 0, 9000, cat="Trace"),
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "network"}},
]


def test_what_has_the_same_callers_is_added_up() -> None:
    picture = picture_of({"traceEvents": STEPS})
    frames = {item["id"]: item for item in picture["frames"]}
    paths = {}
    for item in frames.values():
        path, at = [], item
        while at is not None:
            path.append(at["name"])
            at = frames.get(at["parent"])
        paths["/".join(reversed(path))] = (item["milliseconds"], item["calls"])
    assert paths == {
        "all threads": (5.5, 0),
        "all threads/thread 1": (4.0, 0),
        "all threads/thread 1/step": (4.0, 2),
        "all threads/thread 1/step/forward": (1.4, 2),
        "all threads/thread 1/step/forward/mm": (0.5, 2),
        "all threads/network": (1.5, 0),
        "all threads/network/all-reduce": (1.5, 1),
    }
    parents = [item["parent"] for item in picture["frames"]]
    assert all(parent is None or parent < place for place, parent in enumerate(parents))


def test_own_time_is_without_what_was_called() -> None:
    top = {item["name"]: item["milliseconds"] for item in picture_of(STEPS)["top"]}
    assert top == {"step": 2.6, "all-reduce": 1.5, "forward": 0.9, "mm": 0.5}
    assert sum(item["share"] for item in picture_of(STEPS)["top"]) == pytest.approx(1.0, abs=1e-3)


def test_the_timeline_keeps_the_order_and_the_longest() -> None:
    picture = picture_of(STEPS)
    assert picture["threads"] == ["thread 1", "network"]
    assert [(bar["name"], bar["thread"], bar["depth"], bar["start"]) for bar in picture["bars"]][-1] == (
        "all-reduce", 1, 0, 2.5,
    )  # fmt: skip
    many = [operation("long", 0, 1e6), *(operation(f"op {at}", at, 0.5) for at in range(2 * MOST_FRAMES))]
    picture = picture_of(many)
    assert (len(picture["bars"]), picture["left_out"]) == (MOST_FRAMES, MOST_FRAMES + 1)
    assert len(picture["frames"]) <= MOST_FRAMES
    assert picture["bars"][0]["name"] == "long"


def test_deep_nests_and_strange_entries_are_no_trouble() -> None:
    deep = [operation(f"level {level}", level, 10_000 - 2 * level) for level in range(2000)]
    strange: list[Any] = [None, 7, {"ph": "X"}, operation("nan", float("nan"), 1)]
    strange += [operation("text", "0", 1), operation("negative", 1, -1)]
    picture = picture_of([*deep, *strange])
    assert {bar["name"].split()[0] for bar in picture["bars"]} == {"level"}
    assert max(bar["depth"] for bar in picture["bars"]) < 100
    hostile = picture_of([operation("<script>\x1b[2J\u202e", 0, 1)])
    assert hostile["top"][0]["name"] == "<script>\\x1b[2J\\u202e"


@pytest.mark.parametrize("document", [{}, 7, {"traceEvents": {}}, [], [None], {"traceEvents": []}])
def test_what_is_no_trace_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"holds no operation|no trace"):
        picture_of(document)


def test_traces_are_listed_the_newest_first_and_drawn_once(tmp_path: Any) -> None:
    rundir = RunDir(str(tmp_path))
    for name in ("trace-r00000-s000009.json", "trace-r00001-s000120.json", "request-000001.json", "trace-x.json"):
        rundir.storage.write(f"profile/{name}", json.dumps({"traceEvents": STEPS}).encode())
    assert [(item.rank, item.step) for item in list_traces(rundir)] == [(1, 120), (0, 9)]
    pictures = TracePictures()
    made = pictures.picture(rundir, "trace-r00000-s000009.json")
    assert pictures.picture(rundir, "trace-r00000-s000009.json") is made
    rundir.storage.write("profile/trace-r00000-s000010.json", b"[" * 100_000)
    with pytest.raises(TraceError, match="Perfetto"):
        pictures.picture(rundir, "trace-r00000-s000010.json")
    for name in ("trace-x.json", "../job.json", "trace-r00000-s000011.json"):
        with pytest.raises(FileNotFoundError):
            pictures.picture(rundir, name)
