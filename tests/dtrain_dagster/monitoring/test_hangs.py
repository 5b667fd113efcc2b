"""Who keeps the others waiting: from the reports of ranks to a sentence, and to whoever follows the job."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.jobs.view import JobView, fold
from dtrain_dagster.monitoring.hangs import SETTLE_SECONDS, HangNews, hang_verdict, unresolved
from trainer.rundir import event

BUCKET, COMMIT = "all-reduce of gradient bucket 0 (12,345 bytes)", "all-reduce"
NODES = [0, 2, 1]


def report(rank: int, sequence: int, ended: bool = False, step: int = 17, generation: int = 1, **more: Any) -> dict:
    """A rank that waits in a collective, or, where that has ended, in none."""
    names = {sequence: BUCKET if sequence % 2 else COMMIT, sequence - 1: BUCKET if sequence % 2 == 0 else COMMIT}
    fields = {
        "operation": "no collective" if ended else names[sequence],
        "sequence": sequence,
        "waited_seconds": 24.2 - rank / 10,
        "where": f"my_model.py:3{rank} Net.forward" if ended else "trainer/comm/group.py:98 Group.run",
        "stacks": "…",
        "recent": [
            {"sequence": sequence - 1, "what": names[sequence - 1], "ended": True},
            {"sequence": sequence, "what": names[sequence], "ended": ended},
        ],
        "nodes": NODES,
    }
    return event("hang", rank, generation, step=step, node_id=NODES[rank], **{**fields, **more})


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        (
            [report(0, 33), report(1, 32, ended=True), report(2, 33)],
            "rank 1 (node 2) never entered the all-reduce of gradient bucket 0 of step 17: it is in "
            "my_model.py:31 Net.forward; ranks 0 and 2 have been waiting there for 24 s",
        ),
        (  # nobody waits *in* a collective of NCCL, the processor is ahead: the numbers tell
            [report(0, 34, ended=True), report(1, 32, ended=True), report(2, 34, ended=True)],
            "rank 1 (node 2) never entered the all-reduce of gradient bucket 0 of step 17: it is in "
            "my_model.py:31 Net.forward; ranks 0 and 2 have been waiting there for 24 s",
        ),
        (
            [report(0, 33), report(2, 33)],
            "rank 1 (node 2) says nothing (it is frozen, cut off, in code that never lets go of the interpreter, or "
            "busy outside of a step); ranks 0 and 2 have been waiting in the all-reduce of gradient bucket 0 of step "
            "17 for 24 s",
        ),
        (  # of a broadcast some are done before others: who never came is the one of whom nothing is heard
            [report(0, 32), report(2, 33)],
            "rank 1 (node 2) says nothing (it is frozen, cut off, in code that never lets go of the interpreter, or "
            "busy outside of a step); ranks 0 and 2 have been waiting in the all-reduce of step 17 for 24 s",
        ),
        (
            [report(0, 33), report(1, 32), report(2, 33)],
            "rank 1 (node 2) never entered the all-reduce of gradient bucket 0 of step 17: it is still in the "
            "all-reduce before it; ranks 0 and 2 have been waiting there for 24 s",
        ),
        (
            [report(0, 33), report(1, 33, ended=True), report(2, 33)],
            "rank 1 (node 2) has left the all-reduce of gradient bucket 0 of step 17, a message was lost: "
            "ranks 0 and 2 have been waiting in it for 24 s",
        ),
        (
            [report(0, 33), report(1, 33), report(2, 33)],
            "all ranks are in the all-reduce of gradient bucket 0 of step 17, which has not ended for 24 s: check "
            "the network",
        ),
        (
            [report(0, 5, ended=True, nodes=[0], recent=[])],
            "step 17 has not ended for 24 s, and no rank is known to wait for another: it is in "
            "my_model.py:30 Net.forward",
        ),
        ([event("hang", 3, 1, step=2)], None),  # written by something else: said as far as known
    ],
)
def test_the_verdict_names_who_is_missing_and_where_it_stands(reports: list[dict], said: str | None) -> None:
    assert hang_verdict(reports) == (said or hang_verdict(reports))


def test_a_hang_is_told_once_all_have_spoken_and_forgotten_with_the_next_step() -> None:
    tell = HangNews()
    progress = fold(JobView(), [report(0, 33), report(2, 33)])
    assert list(tell.tell(progress.hang, 100.0, is_final=False)) == [], "rank 1 may only be slower to speak"
    progress = fold(progress, [report(1, 32, ended=True)])
    [said] = tell.tell(progress.hang, 101.0, is_final=False)
    assert "rank 1 (node 2) never entered" in said
    assert list(tell.tell(progress.hang, 102.0, is_final=False)) == []
    assert progress.explained("failed") == f"failed; {said}"
    assert "stacks" not in progress.hang[0]
    step = {"epoch": 0, "loss": 1.0, "samples_per_second": 1.0, "eta_seconds": 1.0}
    earlier = fold(progress, [event("step", 0, 1, step=16, **step)])
    assert earlier.hang == progress.hang
    assert fold(progress, [event("step", 0, 1, step=18, **step)]).explained("failed") == "failed"
    assert fold(progress, [event("step", 0, 2, step=11, **step)]).hang == (), "done again, by those who are left"


def test_who_stays_silent_is_waited_for_only_so_long() -> None:
    tell, reports = HangNews(), unresolved((), [report(0, 33), report(2, 33)])
    assert list(tell.tell(reports, 100.0, is_final=False)) == []
    [said] = tell.tell(reports, 100.0 + SETTLE_SECONDS, is_final=False)
    assert said.startswith("rank 1 (node 2) says nothing")
    [at_the_end] = HangNews().tell(reports, 100.0, is_final=True)
    assert at_the_end == said


def test_a_later_hang_takes_the_place_of_an_earlier_one() -> None:
    first = unresolved((), [report(0, 33), report(1, 32)])
    again = unresolved(first, [report(0, 7, generation=2), report(2, 8, generation=2)])
    assert [item["rank"] for item in again] == [0, 2]
    assert unresolved(again, [event("membership", 0, 3, step=10, reason="start")]) == (), "started anew"
