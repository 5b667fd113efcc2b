"""The time series and summaries of a job's events, as the page, the report, Prometheus and the terminal show them.

`PerformanceDashboard` is a fold: it takes events as they come and keeps a bounded amount of them, so that a training of
a week costs no more to look at than one of an hour. It ignores an event that it does not understand (an older or a
newer trainer wrote it).
"""

from __future__ import annotations

import math
import uuid
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain_dagster.dashboard.job_facts import describe_diagnosis
from dtrain_dagster.jobs.view import UNREADABLE, JobView, fold, news
from dtrain_dagster.monitoring.alerts import advise
from dtrain_dagster.monitoring.diagnosis import diagnose
from dtrain_dagster.monitoring.hangs import hang_verdict
from dtrain_dagster.monitoring.windows import SEGMENTS, Throughput
from trainer.documents.events import (
    EvaluationEvent,
    EventError,
    MembershipEvent,
    StepEvent,
    TimingEvent,
    read_event,
)
from trainer.secrets.redaction import redact

POINTS = 1000
"""The most rows of a track."""
VALUES = 60_000
"""The most rows times columns of all tracks of one kind: with many nodes, each has fewer rows."""
LATEST_WINDOWS = 20
"""The number of the newest windows in the breakdown per rank."""
NEWS, CHANGES = 60, 200
MOST_NODES = 2048
"""The most nodes that are kept. No training has more; further ones are ignored."""


Row = dict[str, float]


@dataclass(slots=True)
class Track:
    """The rows of a series over ``x`` (``step`` or ``time``). When there are too many, neighbours are merged into
    means.

    Each row has the version of the dashboard that changed it last, so that a reader can ask for the new rows.
    """

    x: str
    rows: list[Row] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stride: int = 1
    """The number of samples in a row."""
    filled: int = 0
    """The number of samples in the last row."""

    def add(self, values: Mapping[str, Any], version: int, most: int) -> None:
        """Add a sample. A repeated step replaces its earlier sample; a value that is not a number is left out."""
        sample = {name: float(value) for name, value in values.items() if is_number(value)}
        while self.x == "step" and self.rows and self.rows[-1]["step"] >= sample["step"]:
            self.rows.pop()
            self.versions.pop()
            self.filled = self.stride
        if self.rows and self.filled < self.stride:
            self.rows[-1] = merged(self.rows[-1], sample, self.filled, self.x)
            self.filled += 1
        else:
            self.rows.append(sample)
            self.versions.append(version)
            self.filled = 1
        self.versions[-1] = version
        if len(self.rows) > max(most, 2):
            self._halve(version)

    def since(self, version: int) -> dict[str, Any] | None:
        """Return the rows that changed after ``version``; they replace all rows from an index on. None if none did."""
        first = bisect_right(self.versions, version)
        return {"from": first, "rows": self.rows[first:]} if first < len(self.rows) else None

    def _halve(self, version: int) -> None:
        pairs = [self.rows[at : at + 2] for at in range(0, len(self.rows), 2)]
        self.rows = [merged(pair[0], pair[1], 1, self.x) if len(pair) == 2 else pair[0] for pair in pairs]
        self.versions = [version] * len(self.rows)
        self.filled += self.stride if len(pairs[-1]) == 2 else 0
        self.stride *= 2


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def merged(row: Row, sample: Row, weight: int, x: str) -> Row:
    """Return the mean of a row of ``weight`` samples and one more; its position is that of the last."""
    mean = {name: row[name] + (sample[name] - row[name]) / (weight + 1) for name in row.keys() & sample.keys()}
    return {**row, **sample, **mean, x: sample[x]}


class PerformanceDashboard:
    """The fold of one job's events: `take` adds events, all other methods read."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        """The fold's identity: versions of another fold mean nothing here."""
        self.version = 0
        self.view = JobView()
        self.heard_at: float | None = None
        self.tracks: dict[str, Track] = {}
        self.nodes: dict[int, dict[str, Any]] = {}
        """The latest ``node`` event of each node."""
        self.lost: set[int] = set()
        self.has_gpus = False
        self.windows: deque[TimingEvent] = deque(maxlen=LATEST_WINDOWS)
        self.news: deque[dict[str, Any]] = deque(maxlen=NEWS)
        self.throughput = Throughput()
        self.changes_of_nodes: deque[MembershipEvent] = deque(maxlen=CHANGES)
        """The generations after the first that lost nodes or took some in."""
        self.counts: Counter[str] = Counter()
        """The number of events by kind, and ``nodes_lost``."""

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add events, in order of time."""
        events = list(events)
        self.version += bool(events)
        for item in events:
            with suppress(*UNREADABLE):
                self._take(dict(item))

    def changes(self, version: int, token: str) -> dict[str, Any]:
        """Return each track's rows that are newer than ``version``; all rows where the token is another fold's."""
        version = version if token == self.token else 0
        found = {name: track.since(version) for name, track in self.tracks.items()}
        return {
            "token": self.token,
            "version": self.version,
            "tracks": {name: rows for name, rows in found.items() if rows},
        }

    def details(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Return the small parts that change as a whole. ``training``: the job's configuration."""
        return {
            "has_gpus": self.has_gpus,
            "ranks": self.ranks(),
            "verdict": self.verdict(training),
            "news": list(self.news)[::-1],
        }

    def ranks(self) -> dict[str, Any] | None:
        """Return the milliseconds per step of each rank by segment, over the newest windows of the present ranks."""
        if not self.windows:
            return None
        last = self.windows[-1]
        labels = rank_labels(last.nodes)
        windows = [window for window in self.windows if window.nodes == last.nodes]
        steps = sum(window.steps for window in windows)
        segments = {
            name: [
                1000 * sum(window.segments[name][rank] * window.steps for window in windows) / steps
                for rank in range(last.world_size)
            ]
            for name in SEGMENTS
            if all(name in window.segments for window in windows)
        }
        return {"labels": list(labels), "nodes": list(last.nodes), "steps": steps, "milliseconds": segments}

    def verdict(self, training: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the bottleneck of the latest steps and what would help, the best first; None if it is not known."""
        recent = [*self.view.recent, *self.view.hang]
        try:
            return describe_diagnosis(diagnose(recent), advise(recent, training))
        except UNREADABLE:
            return None

    def _take(self, item: dict[str, Any]) -> None:
        kind, at = item["kind"], float(item["time"])
        self.heard_at = max(at, self.heard_at or at)
        self.counts[kind] += 1
        take = getattr(self, f"_take_{kind}", None)
        if take is not None:
            take(item)
        if kind != "node":  # most events are of this kind, and tell nothing of progress
            self.view = fold(self.view, [item])
        if kind == "hang":
            self._tell_hang(item)
        for text in sentences(item):
            if all(entry["text"] != text for entry in self.news):  # several ranks may tell the same
                self.news.append({"time": at, "kind": kind, "text": text})

    def _take_step(self, item: dict[str, Any]) -> None:
        told = read_event(StepEvent, item)
        names = ("step", "time", "loss", "learning_rate", "grad_norm", "samples_per_second", "step_seconds")
        self.throughput = self.throughput.after(told)
        self._add("steps", "step", {name: getattr(told, name) for name in names})

    def _take_evaluation(self, item: dict[str, Any]) -> None:
        found = read_event(EvaluationEvent, item)
        if found.split == "valid":
            self._add("evaluations", "step", {"step": found.step, "time": found.time, "loss": found.loss})

    def _take_node(self, item: dict[str, Any]) -> None:
        node = int(item["node_id"])
        if node not in self.nodes and len(self.nodes) >= MOST_NODES:
            return
        gpu = item.get("gpu_utilization") is not None
        self.has_gpus |= gpu
        self.nodes[node] = item
        self.lost.discard(node)
        row = {
            "time": item["time"],
            "busy": item.get("gpu_utilization" if gpu else "cpu_percent"),
            "memory": item.get("gpu_memory_percent" if gpu else "memory_percent"),
            "samples_per_second": item.get("samples_per_second"),
        }
        self._add(f"node {node}", "time", row, VALUES // (len(row) * len(self.nodes)))

    def _take_timing(self, item: dict[str, Any]) -> None:
        window = read_event(TimingEvent, item)
        segments = {name: values for name, values in window.segments.items() if name in SEGMENTS}
        if not segments:
            raise EventError("a 'timing' event without segments")
        self.windows.append(replace(window, segments=segments))
        self.throughput = self.throughput.after(window)
        means = {name: 1000 * window.mean(name) for name in segments}
        self._add("timing", "step", {"step": window.step, "time": window.time, **means})

    def _take_membership(self, item: dict[str, Any]) -> None:
        formed = read_event(MembershipEvent, item)
        self.lost = (self.lost | set(formed.lost)) - set(formed.nodes)
        self.counts["nodes_lost"] += len(formed.lost)
        if formed.generation > 1 and (formed.lost or formed.joined):
            self.changes_of_nodes.append(formed)

    def _tell_hang(self, item: dict[str, Any]) -> None:
        """Note the rank that keeps the others waiting, as far as ranks have reported: a later report may change it."""
        text = redact(hang_verdict(self.view.hang))
        for entry in self.news:
            if (entry["kind"], entry.get("step")) == ("hang", item["step"]):
                entry["text"] = text
                return
        self.news.append({"time": item["time"], "kind": "hang", "step": item["step"], "text": text})

    def _add(self, name: str, x: str, values: dict[str, Any], most: int = POINTS) -> None:
        self.tracks.setdefault(name, Track(x)).add(values, self.version, min(most, POINTS))


def rank_labels(nodes: Sequence[int]) -> tuple[str, ...]:
    """Return a label of each rank that stays when ranks are numbered again: node, and place there if not alone."""
    several, seen, labels = len(set(nodes)) < len(nodes), Counter[int](), []
    for node in nodes:
        labels.append(f"node {node}.{seen[node]}" if several else f"node {node}")
        seen[node] += 1
    return tuple(labels)


def sentences(item: dict[str, Any]) -> tuple[str, ...]:
    """Return the sentences that tell people of an event: its news, and details for the page's reader. Pure."""
    known = news([item])
    if known:
        return known
    kind = item["kind"]
    if kind == "communication_error":
        return (redact(f"communication failed at step {item['step']} ({item['operation']}): {item['error']}"),)
    if kind == "error":
        return (redact(str(item["message"])),)
    return ()
