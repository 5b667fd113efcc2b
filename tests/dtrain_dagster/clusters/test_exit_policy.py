"""What is done when processes have ended, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain_dagster.clusters.exit_policy import (
    ExitDecision,
    PlacedNode,
    decide_after_exit,
    decide_plainly,
    exit_code,
    is_failure,
    is_loss,
)

RUNS, DONE, ERROR, REFUSED, LOST_PEERS, UNFIT, EVICTED, KILLED, TERMINATED = None, 0, 1, 2, 75, 76, 143, -9, -15


def facts(*nodes: tuple[int | None, ...], gone: float = 60.0, kept: tuple[int, ...] = ()) -> list[PlacedNode]:
    """Nodes by the exit codes of their processes; of those of ``kept`` a child is left."""
    return [
        PlacedNode(node_id=number, codes=codes, gone_seconds=None if None in codes or number in kept else gone)
        for number, codes in enumerate(nodes)
    ]


def of(decision: ExitDecision) -> tuple[str, tuple[int, ...]]:
    return decision.action, decision.nodes


@pytest.mark.parametrize(
    ("nodes", "action", "whom"),
    [
        ([(RUNS,), (RUNS,)], "wait", ()),
        # A lost node is replaced, whatever it was lost by, as long as there is somebody to join.
        ([(RUNS,), (KILLED,)], "replace", (1,)),
        ([(RUNS,), (LOST_PEERS,)], "replace", (1,)),
        ([(RUNS,), (EVICTED,)], "replace", (1,)),
        ([(RUNS,), (UNFIT,)], "replace", (1,)),
        ([(UNFIT,), (UNFIT,)], "replace", (0, 1)),  # nothing had begun, and other machines may do
        ([(UNFIT,), (LOST_PEERS,)], "relaunch", (1,)),
        ([(TERMINATED,), (RUNS,)], "replace", (0,)),
        ([(137,), (RUNS,)], "replace", (0,)),  # a shell's words for SIGKILL
        ([(KILLED,), (RUNS,), (LOST_PEERS,)], "replace", (0, 2)),
        ([(KILLED, DONE), (RUNS, RUNS)], "wait", ()),  # a process is done: the work ends
        # A node is lost as a whole: the rest of it is ended first, and is nobody to join.
        ([(RUNS, RUNS), (KILLED, RUNS)], "wait", ()),
        ([(KILLED, RUNS), (KILLED, KILLED)], "wait", ()),
        # An error comes again, however often it is started.
        ([(RUNS,), (ERROR,)], "fail", ()),
        ([(RUNS,), (REFUSED,)], "fail", ()),
        ([(KILLED,), (3,)], "fail", ()),
        ([(DONE,), (ERROR,)], "fail", ()),
        # At the end some are done before others.
        ([(DONE,), (RUNS,)], "wait", ()),
        ([(DONE,), (KILLED,), (RUNS,)], "wait", ()),
        # Nobody is left.
        ([(LOST_PEERS,), (LOST_PEERS,)], "relaunch", (0, 1)),
        ([(LOST_PEERS,), (KILLED,), (LOST_PEERS,)], "relaunch", (0, 2)),
        ([(LOST_PEERS,), (EVICTED,)], "relaunch", (0,)),
        ([(LOST_PEERS, EVICTED), (KILLED, KILLED)], "relaunch", (0,)),
        ([(KILLED,), (KILLED,)], "relaunch", (0, 1)),  # all at once: nobody is left who could say that it helps
        ([(KILLED, -11), (137, KILLED)], "relaunch", (0, 1)),
        ([(KILLED,), (EVICTED,)], "give_up", ()),  # told to go, and some did not hear it
        ([(KILLED,), (TERMINATED,)], "give_up", ()),
        # The others had nothing more to do, and had left; what is to be done yet is in the last checkpoint.
        ([(KILLED,), (DONE,)], "relaunch", (0,)),
        ([(DONE,), (LOST_PEERS,), (KILLED,)], "relaunch", (1,)),
        ([(KILLED, DONE), (DONE, DONE)], "relaunch", (0,)),
        ([(EVICTED,), (DONE,)], "give_up", ()),
        ([(EVICTED,), (EVICTED,)], "give_up", ()),
        ([(DONE,), (DONE,)], "give_up", ()),  # without a result
    ],
)
def test_of_a_job_that_regroups(nodes, action: str, whom: tuple[int, ...]):
    decision = decide_after_exit(facts(*nodes), finished=False, replacements_left=6, launches_left=3, delay_seconds=1.0)
    assert of(decision) == (action, whom)


@pytest.mark.parametrize(
    ("nodes", "action"),
    [
        ([(DONE,), (DONE,)], "succeed"),
        ([(DONE,), (KILLED,)], "succeed"),  # a node that was lost before, and no replacement was left
        ([(DONE,), (LOST_PEERS,)], "succeed"),
        ([(DONE,), (RUNS,)], "dismiss"),  # a frozen one would never end by itself
        ([(DONE,), (ERROR,)], "fail"),
        ([(KILLED,), (KILLED,)], "succeed"),  # after the result, which is written last
    ],
)
def test_of_one_whose_result_says_that_the_work_is_done(nodes, action: str):
    assert (
        decide_after_exit(facts(*nodes), True, replacements_left=6, launches_left=3, delay_seconds=1.0).action == action
    )


def test_a_replacement_waits_for_its_moment_and_for_the_last_of_the_lost():
    lost = [(RUNS,), (KILLED,)]

    def action(left: int = 1, **what) -> str:
        return decide_after_exit(
            facts(*lost, **what), False, replacements_left=left, launches_left=3, delay_seconds=5.0
        ).action

    assert action(gone=5.0) == "replace"
    assert action(gone=4.9) == "wait"
    assert action(kept=(1,)) == "wait"
    assert action(left=0) == "wait"
    immediately = decide_after_exit(
        facts(*lost, gone=0.0), False, replacements_left=1, launches_left=3, delay_seconds=0.0
    )
    assert immediately.action == "replace"


def test_no_more_are_replaced_than_may_be():
    nodes = facts((KILLED,), (KILLED,), (RUNS,), (KILLED,))
    assert of(decide_after_exit(nodes, False, replacements_left=2, launches_left=3, delay_seconds=0.0)) == (
        "replace",
        (0, 1),
    )


def test_nodes_that_were_taken_away_spend_a_budget_of_their_own():
    nodes = [replace(each, is_taken=each.node_id < 2) for each in facts((KILLED,), (KILLED,), (KILLED,), (RUNS,))]

    def whom(lost: int, taken: int) -> tuple[int, ...]:
        return decide_after_exit(nodes, False, lost, 3, 0.0, preemptions_left=taken).nodes

    assert whom(1, 2) == (0, 1, 2)
    assert whom(0, 2) == (0, 1)
    assert whom(1, 1) == (0, 2)
    assert whom(1, 0) == (2,)
    assert decide_after_exit(nodes, False, 0, 3, 0.0, preemptions_left=-1).action == "wait"


def test_nothing_is_concluded_while_a_child_of_a_process_is_left():
    for nodes in ([(LOST_PEERS,), (LOST_PEERS,)], [(KILLED,), (KILLED,)], [(DONE,), (DONE,)]):
        for finished in (True, False):
            assert decide_after_exit(facts(*nodes, kept=(1,)), finished, 6, 3, 1.0).action == "wait"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([(EVICTED,), (TERMINATED,)], "evicted"),
        ([(EVICTED,), (KILLED,)], "all nodes are gone"),
        ([(LOST_PEERS,), (KILLED,)], "could not regroup"),
        ([(KILLED,), (KILLED,)], "all nodes are gone, and starting them again did not help"),
        ([(DONE,), (DONE,)], "the result does not say"),
        ([(DONE,), (KILLED,)], "all nodes are gone, and starting them again did not help"),
    ],
)
def test_why_it_ends_in_words(nodes, words: str):
    decision = decide_after_exit(facts(*nodes), False, replacements_left=6, launches_left=0, delay_seconds=1.0)
    assert decision.action == "give_up"
    assert words in decision.reason


@pytest.mark.parametrize(
    ("nodes", "action"),
    [
        ([(RUNS, RUNS), (RUNS, RUNS)], "wait"),
        ([(DONE,), (RUNS,)], "wait"),
        ([(DONE,), (DONE,)], "succeed"),
        ([(RUNS,), (KILLED,)], "fail"),
        ([(RUNS,), (LOST_PEERS,)], "fail"),
        ([(EVICTED,), (EVICTED,)], "fail"),
        ([(DONE, DONE), (DONE, ERROR)], "fail"),
    ],
)
def test_of_a_job_whose_processes_need_each_other(nodes, action: str):
    assert decide_plainly(facts(*nodes)).action == action


def test_every_code_is_an_end_a_loss_or_a_failure():
    for code in range(-64, 256):
        assert (code == 0) + is_loss(code) + is_failure(code) == 1
        assert 0 <= exit_code(code) < 256


def test_unfit_nodes_are_replaced_within_the_budget_and_then_the_job_gives_up() -> None:
    nodes = facts((UNFIT,), (UNFIT,))
    assert of(decide_after_exit(nodes, False, 1, 3, 0.0)) == ("replace", (0,))
    decision = decide_after_exit(nodes, False, 0, 3, 0.0)
    assert (decision.action, decision.reason) == ("give_up", "no node passed its pre-flight")
