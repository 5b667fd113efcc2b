"""A trace of steps (`trainer.observability.trace`) as flame graphs and timelines, small for a browser. Pure.

A trace holds thousands of operations, each with a thread, a begin and a duration; one that began within another was
called by it. It may hold the Python functions that called them, too, which are operations like others here, and what a
GPU did: kernels and copies, each in a row of its stream and called by what has launched it. The flame graph adds up
what has the same callers; the timeline keeps the order, of the longest ones.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.printable import visible

MOST_FRAMES = 1500
"""The most frames of a flame graph, and the most bars of a timeline: the longest."""
LEAST_SHARE = 0.001
"""The share of the whole below which a frame is left out."""
STEM_SHARE = 0.01
"""The share of a thread's time within which a function counts as there from the begin of a trace, or to its end."""
MOST_DEPTH = 90
MOST_NAME = 120
TOP = 15
WHOLE, WHOLE_WITH_GPU = "all threads", "all threads and GPU streams"
PYTHON = "python_function"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU did. Its thread is the stream, its process the GPU."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of calls that have a GPU do something; both have the same ``correlation``."""
_LEFT_OUT = ("Trace", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "gpu_user_annotation")
"""Categories that are no operations: marks of the profiler itself, and spans that repeat on a GPU what is on a CPU."""
_PLUMBING = re.compile(r"torch/nn/modules/module\.py\(\d+\): (_wrapped_call_impl|_call_impl)$")
"""Functions between a module and its ``forward``: two frames for each module, which say nothing."""
_COUNTED = re.compile(r"#\d+$")
_ADDRESS = re.compile(r" (of \S+ object )?at 0x[0-9a-f]+")


@dataclass(slots=True)
class _Frame:
    microseconds: float = 0.0
    calls: int = 0
    below: dict[str, _Frame] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Event:
    """A span of a trace, as it is written there."""

    category: str
    row: tuple[str, str]
    """Process and thread."""
    name: str
    began: float
    took: float
    correlation: int | None


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    thread: str
    began: float
    ended: float
    depth: int
    launched_by: tuple[str, ...] | None = None
    """Of what a GPU did: the operations within which it was launched, the outermost first. None for a CPU's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlameFrame:
    """A frame of the flame graph: operations of one name with the same callers."""

    id: int
    parent: int | None
    name: str
    nanoseconds: int
    """Never less than those of what it called: a browser draws nothing where the parts exceed the whole, by whatever a
    sum of fractions is off."""
    calls: int
    """0 for a thread or stream, and for what has launched something on a GPU: its own calls are in another place."""


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
    by: str
    """Of what a GPU did: the operation that has launched it; else ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyOperation:
    """An operation with much time of its own, without those that it calls."""

    name: str
    is_on_gpu: bool
    milliseconds: float
    share: float
    calls: int


def pictures_of(document: Any) -> dict[str, dict[str, Any] | None]:
    """Return a trace as the page draws it: under ``operations`` without Python's functions, under ``python`` with them,
    None where it holds none. Each is ``frames``, ``threads``, ``bars``, ``top``, ``left_out`` (how many bars are not
    shown). Raise ValueError where it is no trace."""
    events, names = _read(document)
    without = [event for event in events if event.category != PYTHON]
    has_python = len(without) < len(events)
    return {"operations": _picture(without, names), "python": _picture(events, names) if has_python else None}


def _picture(events: Sequence[_Event], names: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    operations = list(_operations(events, names))
    if not operations:
        raise ValueError("it holds no operation")
    first = min(item.began for item in operations)
    in_order = sorted(operations, key=lambda item: (item.launched_by is not None, item.began))
    threads = list(dict.fromkeys(item.thread for item in in_order))
    longest = sorted(operations, key=lambda item: item.began - item.ended)[:MOST_FRAMES]
    bars = [
        TimelineBar(
            name=item.name,
            thread=threads.index(item.thread),
            depth=item.depth,
            start=round((item.began - first) / 1000, 4),
            milliseconds=round((item.ended - item.began) / 1000, 4),
            by=item.launched_by[-1] if item.launched_by else "",
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
    root, has_gpu = _Frame(), False
    stacks: dict[str, list[_Frame]] = defaultdict(list)
    for item in operations:
        took = item.ended - item.began
        stack = stacks[item.thread]
        del stack[item.depth :]
        if not stack:
            thread = root.below.setdefault(item.thread, _Frame())
            for whole in (thread, root):
                whole.microseconds += took
        parent = stack[-1] if stack else root.below[item.thread]
        has_gpu |= item.launched_by is not None
        for name in item.launched_by or ():
            parent = parent.below.setdefault(name, _Frame())
            parent.microseconds += took
        frame = parent.below.setdefault(item.name, _Frame())
        frame.microseconds += took
        frame.calls += 1
        stack.append(frame)
    found: list[FlameFrame] = []
    number = itertools.count()
    whole_name = WHOLE_WITH_GPU if has_gpu else WHOLE
    left = [(-root.microseconds, next(number), whole_name, root, -1)]  # the longest is at the top of this heap
    while left and len(found) < MOST_FRAMES:
        _, _, name, frame, parent_id = heapq.heappop(left)
        made = FlameFrame(
            id=len(found), parent=parent_id if parent_id >= 0 else None, name=name,
            nanoseconds=round(1000 * frame.microseconds), calls=frame.calls,
        )  # fmt: skip
        found.append(made)
        for key, called in frame.below.items():
            if called.microseconds >= LEAST_SHARE * root.microseconds:
                heapq.heappush(left, (-called.microseconds, next(number), key, called, made.id))
    return _wide_enough(found)


def _wide_enough(frames: Sequence[FlameFrame]) -> list[FlameFrame]:
    """Return the frames, each at least as long as those below it together."""
    below: Counter[int] = Counter()
    wide = []
    for frame in reversed(frames):  # those below come before it
        whole = max(frame.nanoseconds, below[frame.id])
        if frame.parent is not None:
            below[frame.parent] += whole
        wide.append(replace(frame, nanoseconds=whole))
    return wide[::-1]


def _read(document: Any) -> tuple[list[_Event], dict[tuple[str, str], str]]:
    """Return the operations of a trace, in the order of the file, and what its threads are called."""
    entries = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(entries, list):
        raise ValueError("it is not a trace: it has no list of traceEvents")
    events: list[_Event] = []
    names: dict[tuple[str, str], str] = {}
    for entry in entries:
        if not isinstance(entry, Mapping):
            continue
        row = (str(entry.get("pid")), str(entry.get("tid")))
        args = entry.get("args")
        about: Mapping[str, Any] = args if isinstance(args, Mapping) else {}
        if entry.get("ph") == "M" and entry.get("name") == "thread_name" and about:
            names[row] = str(about.get("name"))
        began, took, category = entry.get("ts"), entry.get("dur"), str(entry.get("cat"))
        if entry.get("ph") != "X" or category in _LEFT_OUT or not (_is_number(began) and _is_number(took)):
            continue
        name = str(entry.get("name"))[:1000]
        if category == PYTHON and _PLUMBING.search(name):
            continue
        number = about.get("correlation")
        correlation = number if isinstance(number, int) and not isinstance(number, bool) else None
        events.append(_Event(category, row, _shown(name, category), float(began), float(took), correlation))  # type: ignore[arg-type]
    return events, names


def _operations(events: Sequence[_Event], names: Mapping[tuple[str, str], str]) -> Iterator[_Operation]:
    """Yield the operations of each thread in order of their begin, those that call before those that are called; then
    those of each stream of a GPU."""
    begins = [event.began for event in events if event.category not in ON_GPU]
    ends = [event.began + event.took for event in events if event.category not in ON_GPU]
    span = (min(begins, default=0.0), max(ends, default=0.0))
    by_row: dict[tuple[str, str], list[_Event]] = defaultdict(list)
    of_gpu: dict[tuple[str, str], list[_Event]] = defaultdict(list)
    for event in events:
        (of_gpu if event.category in ON_GPU else by_row)[event.row].append(event)
    launches: dict[int, tuple[str, ...]] = {}
    for row, rows in by_row.items():
        if all(event.category == PYTHON for event in rows):
            continue  # such threads wait most of the time, and would fill the picture
        thread = visible(names.get(row) or f"thread {row[1]}")[:MOST_NAME]
        stack: list[tuple[float, str]] = []
        for event in sorted(_without_stem(rows, *span), key=lambda event: (event.began, -event.took)):
            while stack and stack[-1][0] <= event.began:
                stack.pop()
            ended = event.began + event.took
            if stack:
                ended = min(ended, stack[-1][0])  # clocks may differ by a hair
            if event.category in LAUNCHES and event.correlation is not None:
                launches[event.correlation] = tuple(name for _, name in stack)
            if len(stack) < MOST_DEPTH:
                yield _Operation(event.name, thread, event.began, ended, len(stack))
                stack.append((ended, event.name))
    for row, rows in of_gpu.items():
        thread, ended = visible(f"GPU {row[0]}, stream {row[1]}")[:MOST_NAME], -math.inf
        for event in sorted(rows, key=lambda event: event.began):
            by = launches.get(event.correlation, ()) if event.correlation is not None else ()
            began = max(event.began, ended)  # a stream does one thing at a time
            ended = max(event.began + event.took, began)
            yield _Operation(event.name, thread, began, ended, 0, by)


def _without_stem(rows: Sequence[_Event], first: float, last: float) -> Sequence[_Event]:
    """Return the spans of a thread without the Python functions that ran already when the trace began and still when it
    ended, at ``first`` and ``last``: they say how the program was started, or what a thread waits in."""
    near = STEM_SHARE * (last - first)  # the tracer notes what runs already one after the other
    return [
        event
        for event in rows
        if event.category != PYTHON or event.began > first + near or event.began + event.took < last - near
    ]


def _heaviest(operations: Iterable[_Operation]) -> list[HeavyOperation]:
    own: dict[tuple[str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    stacks: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for item in operations:
        stack, key = stacks[item.thread], (item.name, item.launched_by is not None)
        del stack[item.depth :]
        if stack:
            own[stack[-1]][0] -= item.ended - item.began
        own[key][0] += item.ended - item.began
        own[key][1] += 1
        stack.append(key)
    total = sum(max(0.0, microseconds) for microseconds, _ in own.values()) or 1.0
    return [
        HeavyOperation(
            name=name,
            is_on_gpu=is_on_gpu,
            milliseconds=round(microseconds / 1000, 4),
            share=round(microseconds / total, 4),
            calls=int(calls),
        )
        for (name, is_on_gpu), (microseconds, calls) in sorted(own.items(), key=lambda row: -row[1][0])[:TOP]
    ]


def _shown(name: str, category: str) -> str:
    """Return a name that is the same for each call, of bounded length. Of a Python function the end says what it is."""
    if category != PYTHON:
        return visible(_COUNTED.sub("", name))[:MOST_NAME]
    text = visible(_ADDRESS.sub("", name))
    return text if len(text) <= MOST_NAME else f"…{text[1 - MOST_NAME :]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
