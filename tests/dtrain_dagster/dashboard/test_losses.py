"""A lost node is the first thing that a job's page says; what was survived is a line, and a cancellation is no loss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dtrain_dagster.dashboard.failure import LossNotice, changes_to_mark, losses_of, missing_nodes, tell_losses
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.jobs.view import news
from tests.dtrain_dagster.told_events import START, event, membership, told, write_run
from trainer.documents.events import MembershipEvent
from trainer.documents.presences import NodePresence
from trainer.documents.schemas import LEAVING
from trainer.documents.schemas import START as BEGAN


def change(at: float, step: int, seconds: float, **fields: Any) -> MembershipEvent:
    return MembershipEvent(time=at, rank=0, generation=2, nodes=(0, 1), step=step, seconds=seconds, **fields)


LOST = change(100.0, 40, 0.17, lost=(2,))
BACK = change(110.0, 60, 0.2, joined=(2,))
NODES = [NodePresence(node_id=node, launch=1, started_at=50.0) for node in range(3)]


def notice(*facts: Any, **more: Any) -> LossNotice:
    found = tell_losses(*facts, **more)
    assert found is not None
    return found


def died(node: int, code: int) -> NodePresence:
    return NodePresence(node_id=node, launch=1, started_at=50.0, ended_at=99.0, exit_codes=(code,))


def test_a_lost_node_is_told_until_it_has_joined_again():
    dead = [*NODES[:2], died(2, -9)]
    at_once = notice([], dead, "running", 101.0)
    assert at_once.is_open
    assert at_once.title == "Node 2 was lost"
    assert at_once.words.startswith("2 s ago: killed by SIGKILL. The others are about to go on without it.")
    without = notice([LOST], dead, "running", 105.0)
    assert without.words == ("5 s ago, at step 40. The others go on: 2 of 3 nodes train.")
    replaced = [*dead, NodePresence(node_id=2, launch=1, incarnation=2, started_at=103.0)]
    over = notice([LOST, BACK], replaced, "running", 111.0)
    assert not over.is_open
    assert over.title == "1 loss survived, 0.17 s without a step"
    ended = notice([LOST, BACK], replaced, "succeeded", 200.0, usd=0.0009)
    assert (ended.title, ended.words) == ("1 loss survived, 0.17 s without a step, $0.0009", "node 2 at step 40")
    assert tell_losses([], NODES, "running", 105.0) is None


def test_a_cancellation_is_no_loss_and_an_eviction_is_one():
    asked = change(100.0, 40, 0.1, lost=(1,), reason=LEAVING)
    assert losses_of([LOST, BACK, asked], "cancelled") == [LOST]
    assert tell_losses([asked], [died(1, 143)], "cancelled", 105.0) is None
    resumed = change(205.0, 41, 6.0, joined=(0, 1, 2), reason=BEGAN)
    assert losses_of([LOST, BACK, asked, resumed], "succeeded") == [LOST], "it was cancelled, and then gone on with"
    marked = changes_to_mark([LOST, BACK, asked, resumed], "succeeded")
    assert [(each["step"], each["was_asked"]) for each in marked] == [(40, False), (60, False)]
    assert [each["was_asked"] for each in changes_to_mark([asked], "running")] == [True]
    assert changes_to_mark([asked], "cancelled") == []
    again = [*NODES, *(NodePresence(node_id=node, launch=2, started_at=200.0) for node in range(3))]
    assert missing_nodes([asked], again, "running") == {}, "its second launch has formed no generation yet"
    assert missing_nodes([], [died(1, 143), *NODES[:1]], "running") == {}, "all are asked to end, one after the other"
    evicted = notice([asked], NODES, "running", 105.0)
    assert evicted.title == "Node 1 left when asked to"
    left = membership(2, START, nodes=[0, 2], lost=[1], joined=[]) | {"reason": LEAVING}
    assert news([left])[0].startswith("generation 2 at step 40: node(s) 1 left when asked to; goes on with 2 rank(s)")


def test_the_page_of_a_finished_job_says_what_it_survived_and_how_many_nodes_it_used(tmp_path: Path):
    events = [
        *told(20),
        membership(2, START + 21, nodes=[0, 1], lost=[2], joined=[]),
        membership(3, START + 23, nodes=[0, 1, 2], lost=[], joined=[2]),
        event("finish", START + 24, stage="baselines"),
    ]
    rundir = write_run(tmp_path, "done", events, state="succeeded")
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": START})
    job = JobBoard(str(tmp_path), "dedicated").open("done", time.time())
    assert job is not None
    page = job.snapshot(0, "", time.time())
    assert page["loss"]["title"].startswith("1 loss survived, 1.25 s without a step, $")
    assert [(change["lost"], change["joined"]) for change in page["changes"]] == [([2], []), ([], [2])]
    figures = {figure["label"]: figure["value"] for figure in page["headline"]}
    assert figures["nodes used"] == "3"
    assert "nodes alive" not in figures
