"""A trace of steps (`trainer.observability.trace`) as a flame graph and as a timeline, small for a browser. Pure.

A trace holds thousands of operations, each with a thread, a begin and a duration; one that began within another was
called by it. The flame graph adds up what has the same callers; the timeline keeps the order, of the longest ones.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.printable import visible

MOST_FRAMES = 1500
"""The most frames of a flame graph, and the most bars of a timeline: the longest."""
LEAST_SHARE = 0.001
"""The share of the whole below which a frame is left out."""
MOST_DEPTH = 60
MOST_NAME = 120
TOP = 15
WHOLE = "all threads"
_LEFT_OUT = ("Trace", "overhead", "ac2g", "fwdbwd")
"""Categories that are no operations: marks of the profiler itself."""
_COUNTED = re.compile(r"#\d+$")


@dataclass(slots=True)
class _Frame:
    microseconds: float = 0.0
    calls: int = 0
    below: dict[str, _Frame] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    thread: str
    began: float
    ended: float
    depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlameFrame:
    """A frame of the flame graph: operations of one name with the same callers."""

    id: int
    parent: int | None
    name: str
    milliseconds: float
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineBar:
    """One operation of the timeline."""

    name: str
    thread: int
    """The number of its row in ``threads``."""
    depth: int
    start: float
    """Milliseconds after the first operation."""
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyOperation:
    """An operation with much time of its own, without those that it calls."""

    name: str
    milliseconds: float
    share: float
    calls: int


def picture_of(document: Any) -> dict[str, Any]:
    """Return a trace as the page draws it: ``frames``, ``threads``, ``bars``, ``top``, ``left_out`` (how many bars are
    not shown). Raise ValueError where it is no trace."""
    operations = list(_operations(document))
    if not operations:
        raise ValueError("it holds no operation")
    first = min(item.began for item in operations)
    threads = list(dict.fromkeys(item.thread for item in sorted(operations, key=lambda item: item.began)))
    longest = sorted(operations, key=lambda item: item.began - item.ended)[:MOST_FRAMES]
    bars = [
        TimelineBar(
            name=item.name,
            thread=threads.index(item.thread),
            depth=item.depth,
            start=round((item.began - first) / 1000, 4),
            milliseconds=round((item.ended - item.began) / 1000, 4),
        )
        for item in sorted(longest, key=lambda item: item.began)
    ]
    return {
        "frames": [asdict(item) for item in flame_graph(operations)],
        "threads": threads,
        "bars": [asdict(item) for item in bars],
        "top": [asdict(item) for item in _heaviest(operations)],
        "left_out": len(operations) - len(bars),
    }


def flame_graph(operations: Iterable[_Operation]) -> list[FlameFrame]:
    """Return the frames, each after its parent, the longest first among those of one parent."""
    root = _Frame()
    stacks: dict[str, list[_Frame]] = defaultdict(list)
    for item in operations:
        stack = stacks[item.thread]
        del stack[item.depth :]
        if not stack:
            thread = root.below.setdefault(item.thread, _Frame())
            for whole in (thread, root):
                whole.microseconds += item.ended - item.began
        parent = stack[-1] if stack else root.below[item.thread]
        frame = parent.below.setdefault(item.name, _Frame())
        frame.microseconds += item.ended - item.began
        frame.calls += 1
        stack.append(frame)
    found: list[FlameFrame] = []
    number = itertools.count()
    left = [(-root.microseconds, next(number), WHOLE, root, -1)]  # the longest is at the top of this heap
    while left and len(found) < MOST_FRAMES:
        _, _, name, frame, parent_id = heapq.heappop(left)
        made = FlameFrame(
            id=len(found), parent=parent_id if parent_id >= 0 else None, name=name,
            milliseconds=round(frame.microseconds / 1000, 4), calls=frame.calls,
        )  # fmt: skip
        found.append(made)
        for key, called in frame.below.items():
            if called.microseconds >= LEAST_SHARE * root.microseconds:
                heapq.heappush(left, (-called.microseconds, next(number), key, called, made.id))
    return found


def _operations(document: Any) -> Iterator[_Operation]:
    """Yield the operations of each thread in order of their begin, those that call before those that are called."""
    events = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(events, list):
        raise ValueError("it is no trace: it has no list of traceEvents")
    by_thread: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    names: dict[tuple[str, str], str] = {}
    for event in events:
        if not isinstance(event, Mapping):
            continue
        key = (str(event.get("pid")), str(event.get("tid")))
        if event.get("ph") == "M" and event.get("name") == "thread_name" and isinstance(event.get("args"), Mapping):
            names[key] = str(event["args"].get("name"))
        began, took = event.get("ts"), event.get("dur")
        if event.get("ph") != "X" or event.get("cat") in _LEFT_OUT or not (_is_number(began) and _is_number(took)):
            continue
        by_thread[key].append((float(began), float(took), _name(event.get("name"))))  # type: ignore[arg-type]
    for key, rows in by_thread.items():
        thread = visible(names.get(key) or f"thread {key[1]}")[:MOST_NAME]
        stack: list[float] = []
        for began, took, name in sorted(rows, key=lambda row: (row[0], -row[1])):
            while stack and stack[-1] <= began:
                stack.pop()
            ended = min(began + took, stack[-1]) if stack else began + took  # clocks of a GPU may overlap by a hair
            if len(stack) < MOST_DEPTH:
                yield _Operation(name, thread, began, ended, len(stack))
                stack.append(ended)


def _heaviest(operations: Iterable[_Operation]) -> list[HeavyOperation]:
    own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    stacks: dict[str, list[str]] = defaultdict(list)
    for item in operations:
        stack = stacks[item.thread]
        del stack[item.depth :]
        if stack:
            own[stack[-1]][0] -= item.ended - item.began
        own[item.name][0] += item.ended - item.began
        own[item.name][1] += 1
        stack.append(item.name)
    total = sum(max(0.0, microseconds) for microseconds, _ in own.values()) or 1.0
    return [
        HeavyOperation(
            name=name,
            milliseconds=round(microseconds / 1000, 4),
            share=round(microseconds / total, 4),
            calls=int(calls),
        )
        for name, (microseconds, calls) in sorted(own.items(), key=lambda row: -row[1][0])[:TOP]
    ]


def _name(value: Any) -> str:
    return visible(_COUNTED.sub("", str(value)[:1000]))[:MOST_NAME]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
