"""A bad host does not come back: what counts against a machine, for how long, and how few may be excluded."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.hosts import HostEvent, HostRecord, judge_hosts
from dtrain_dagster.clusters.supervision.engine import EngineJob
from dtrain_dagster.clusters.supervision.placer import NodeRecord, find_fault, is_successor_due
from trainer.documents.presences import NodePresence
from trainer.exit_codes import EVICTED, LOST, UNFIT

NOW = 1_800_000_000.0
HOUR = 3600.0


def lost(host: str, ago: float = 60.0, seconds: float = 30.0) -> HostEvent:
    return HostEvent(host=host, at=NOW - ago, kind="lost", seconds=seconds, why="killed")


def unfit(host: str, ago: float = 60.0) -> HostEvent:
    return HostEvent(host=host, at=NOW - ago, kind="unfit", why="the disk is full")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([lost("h1")], []),
        ([lost("h1"), lost("h1")], ["h1"]),
        ([lost("h1", seconds=700), lost("h1")], []),
        ([lost("h1", seconds=700), lost("h1", seconds=700), lost("h1")], ["h1"]),
        ([lost("h1", ago=HOUR + 1), lost("h1")], []),
        ([lost("h1"), lost("h2")], []),
        ([unfit("h1")], ["h1"]),
        ([unfit("h1", ago=HOUR + 1)], []),
        ([unfit("h1", ago=90), HostEvent(host="h1", at=NOW - 80, kind="lifted")], []),
        ([unfit("h1", ago=90), HostEvent(host="h1", at=NOW - 80, kind="lifted"), unfit("h1", ago=70)], ["h1"]),
        ([*(lost(f"h{n}") for n in (1, 1, 2, 2, 2)), unfit("h3")], ["h3", "h2", "h1"]),
        ([lost("h0"), lost("h0"), *(unfit(f"h{n}", ago=90 - n) for n in range(1, 5))], ["h4", "h3", "h2", "h1"]),
    ],
    ids=[
        "nothing", "once", "twice soon", "one ran long", "three times", "long ago", "two hosts", "unfit", "unfit once",
        "lifted", "unfit again", "the worst first", "four at most",
    ],
)  # fmt: skip
def test_a_host_is_excluded_for_what_is_its_own_doing(events: list[HostEvent], expected: list[str]) -> None:
    found = judge_hosts(reversed(events), NOW)
    assert [each.host for each in found] == expected
    assert all(NOW < each.until <= NOW + HOUR and each.why for each in found)


def record(node: int = 0, **job: Any) -> NodeRecord:
    """A node that was killed a minute after it began, where nothing else is said."""
    fields = {"state": "ended", "host": f"h{node}", "exit_code": -9, "ended_at": NOW - 5} | job
    presence = NodePresence(
        node_id=node, launch=1, started_at=NOW - 65, ended_at=NOW - 5, exit_codes=fields.pop("codes", (-9,))
    )
    made = EngineJob(id=str(node), node_id=node, incarnation=1, **fields)
    return NodeRecord(
        node_id=node, incarnation=1, made_at=NOW - 70, job=made, presence=presence, gone_at=1.0, is_cut_off=True
    )


def unfit_record() -> NodeRecord:
    made = record(codes=(UNFIT,))
    assert made.presence is not None
    return replace(made, presence=replace(made.presence, preflight="the disk is full"))


def warned_record() -> NodeRecord:
    made = record()
    assert made.presence is not None
    return replace(made, presence=replace(made.presence, leaves_at=NOW - 5))


def running(node: int) -> NodeRecord:
    return replace(record(node, state="running"), gone_at=None)


@pytest.mark.parametrize(
    ("lost_one", "others", "expected"),
    [
        (record(), [running(1)], 60.0),
        (record(codes=(LOST,)), [running(1)], 60.0),
        (record(codes=(1,), cause="machine"), [running(1)], 60.0),
        (record(codes=(1,)), [running(1)], None),
        (replace(record(), is_cut_off=False), [running(1)], None),
        (replace(record(codes=(-signal.SIGSEGV,)), is_cut_off=False), [running(1)], None),
        (replace(record(codes=(LOST,)), is_cut_off=False), [running(1)], 60.0),
        (replace(record(codes=(EVICTED,)), is_cut_off=False), [running(1)], None),
        (replace(record(codes=(-signal.SIGTERM,)), is_cut_off=False), [running(1)], None),
        (record(cause="taken", lost=True), [running(1)], None),
        (record(cause="program"), [running(1)], None),
        (warned_record(), [running(1)], None),
        (record(host=""), [running(1)], None),
        (replace(record(), force_at=1.0), [running(1)], None),
        (replace(record(), presence=None), [running(1)], None),
        (replace(record(started_at=NOW - 8), presence=None), [running(1)], 3.0),
        (record(), [], None),
        (unfit_record(), [record(1)], 0.0),
        (record(), [record(1)], None),
        (record(), [record(1), running(2)], None),
        (record(), [record(1), running(2), running(3)], 60.0),
    ],
    ids=[
        "killed", "lost its device", "machine failed", "failed", "a rank killed",
        "a rank crashed", "told that it lost its device", "evicted", "ended", "preempted", "out of memory",
        "warned", "no host", "ended by us", "never began", "before it spoke", "alone", "unfit", "all", "most",
        "two of four",
    ],
)  # fmt: skip
def test_only_a_loss_that_others_survived_counts_against_a_host(
    lost_one: NodeRecord, others: Sequence[NodeRecord], expected: float | None
) -> None:
    found = find_fault(lost_one, others, 1, "job", NOW)
    assert (found.seconds if found else None) == expected
    kind = "unfit" if expected == 0 else "lost"
    assert found is None or (found.kind, found.host, found.at, found.job_id) == (kind, "h0", NOW, "job")


def test_a_warned_node_has_a_successor_and_one_that_is_kept_or_gone_has_none() -> None:
    warned = replace(running(0), presence=replace(warned_record().presence, ended_at=None))  # type: ignore[type-var]
    assert is_successor_due(warned, NOW)
    assert is_successor_due(replace(warned, job=None), NOW)
    assert not is_successor_due(running(0), NOW)
    assert not is_successor_due(warned_record(), NOW)
    kept = replace(warned, presence=replace(warned.presence, kept_since=NOW))  # type: ignore[type-var]
    assert not is_successor_due(kept, NOW)


def test_the_record_is_shared_and_a_torn_line_is_one_event_less(tmp_path: Path) -> None:
    book = HostRecord.of_cluster(tmp_path, "slurm.local")
    assert book.excluded(NOW) == []
    book.add(unfit("h1"))
    with open(book.path, "ab") as file:
        file.write(b'torn {"\n{"host": 1}\n{"host": "h2", "at": 1.0, "kind": "began"}\n')
    assert [each.host for each in HostRecord(book.path).excluded(NOW)] == ["h1"]
    book.lift("h1", NOW)
    assert book.excluded(NOW) == []
