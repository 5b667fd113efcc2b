"""Who is there, and who only seems to be: what the records of members say of a node."""

import json
from dataclasses import replace

import pytest

from dtrain_dagster.clusters.presence import NodeGeneration, health, newest_generation, usage
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir

NOW = 1000.0


def node(node_id: int, started_at: float = 0.0, launch: int = 1) -> NodePresence:
    return NodePresence(node_id=node_id, launch=launch, incarnation=1, started_at=started_at, last_seen_at=NOW - 1)


def generation(nodes: set[int], asking: set[int] = frozenset(), launch: int = 1) -> NodeGeneration:
    return NodeGeneration(
        number=3,
        launch=launch,
        formed_at=500.0,
        nodes=frozenset(nodes),
        asking=frozenset(asking),
        patience_seconds=60.0,
    )


@pytest.mark.parametrize(
    ("newest", "of", "healthy"),
    [
        (None, node(1), True),
        (generation({0, 1}), node(1), True),
        (generation({0}), node(1), False),
        (generation({0}, asking={1}), node(1), True),
        (generation({0}), node(1, started_at=600.0), True),
        (generation({0}, launch=2), node(1), True),
    ],
)
def test_a_node_that_the_others_go_on_without_is_not_healthy(newest, of, healthy):
    """D2. One that asks to come back, has come since, or belongs to another launch is none of these."""
    seen = health("job", of, NOW, newest)
    assert seen.healthy is healthy
    assert healthy or "generation 3" in seen.message


def test_what_was_spent_on_a_pre_flight_and_on_keeping_a_node_is_handed_to_the_bill():
    kept = replace(node(0), preflight_seconds=2.0, kept_since=40.0, kept_until=90.0, ended_at=90.0)
    (found,) = usage([kept], "sku", running=False, now=NOW)
    assert (found.preflight_until, found.kept_since, found.ended_at) == (2.0, 40.0, 90.0)
    (found,) = usage([node(0)], "sku", running=False, now=NOW)
    assert (found.preflight_until, found.kept_since) == (None, None)


def test_a_node_that_is_kept_is_not_healthy_and_says_why():
    seen = health("job", replace(node(1), kept_since=NOW - 5, exit_codes=(1,)), NOW)
    assert (seen.healthy, seen.message) == (False, "failed in job and is kept for a person")


def test_the_newest_generation_is_read_as_the_members_wrote_it(tmp_path):
    rundir = RunDir(str(tmp_path))
    assert newest_generation(rundir) is None
    seats = [{"node": 0}, {"node": 2}]
    for number in (9, 10):
        record = {"number": number, "launch": 2, "formed_at": 12.5, "members": seats}
        rundir.storage.create(f"membership/g{number:06d}.json", json.dumps(record).encode())
    rundir.storage.write("membership/g000011/n12p0-abcdef01.json", b"{}")
    rundir.storage.write("job.json", json.dumps({"training": {"peer_timeout_seconds": 7}}).encode())
    newest = newest_generation(rundir)
    assert newest is not None
    assert (newest.number, newest.launch, newest.formed_at) == (10, 2, 12.5)
    assert (newest.nodes, newest.asking, newest.patience_seconds) == ({0, 2}, {12}, 7.0)
