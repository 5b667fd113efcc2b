"""Training that outlives its nodes: real processes that are killed, frozen, evicted, replaced, and out of memory;
and communication that fails although nobody is lost: retries, parameter-server mode and the way back."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from certificates import Authority

from harness.elastic_nodes import KILLED, Nodes, assert_undisturbed
from harness.worlds import Job
from trainer.checkpoint.manager import LATEST
from trainer.comm.group import GroupError
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import parse_job
from trainer.engine.interruptions import Regroup, Stopped
from trainer.engine.steps import StepFlags, StepResult
from trainer.engine.trainer import DistributedTrainer

pytestmark = pytest.mark.slow
NewJob = Callable[..., Job]
STEPS = 30


@pytest.fixture
def hurry(tmp_path: Path) -> Path:
    """Once there is this file, trainings that are `slow` take their time no more."""
    return tmp_path / "hurry"


def slow(hurry: Path) -> dict[str, Any]:
    model = {"factory": "user_parts:paced", "args": {"hurry": str(hurry)}}
    return {"epochs": 4, "sections": {"model": model}}


@pytest.fixture(scope="module")
def paced(dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same for the model that takes its time; here it does not."""
    folder, environment = tmp_path_factory.mktemp("paced"), {"DTRAIN_CACHE": str(cache)}
    job = Job(folder, dataset, training={"epochs": 4}, environment=environment)
    job.sections["model"] = {"factory": "user_parts:paced", "args": {"seconds": 0.0}}
    assert job.run_here() == 0, job.result()
    return job


def fault(kind: str, at: str, step: int | None, node: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, "node": node, **({} if step is None else {"step": step}), **more}


@pytest.mark.parametrize(
    ("at", "step", "node"),
    [
        ("forward", 0, 2),  # before the first step is done
        ("backward", 6, 0),
        ("all_reduce", 6, 1),
        ("optimizer", 6, 0),  # the step is agreed, and this one has not done it yet
        ("evaluate", 10, 0),
        ("save", 10, 0),
        ("finish", STEPS, 0),
        ("finish", STEPS, 1),
    ],
)
def test_a_node_that_is_killed_at_any_point_changes_nothing(
    begin: Callable[..., Nodes], whole: Job, at: str, step: int, node: int
) -> None:
    nodes = begin().start(faults=(fault("kill", at, step, node),))
    codes = nodes.wait()
    assert codes == [KILLED if number == node else 0 for number in range(3)], nodes.log()
    assert_undisturbed(nodes, whole)
    left = [number for number in range(3) if number != node]
    assert nodes.members() == [[0, 1, 2], left]
    assert nodes.job.result()["world_size"] == 2
    [change] = [item for item in nodes.job.events("membership") if item["lost"]]
    assert (change["lost"], change["nodes"], change["world_size"]) == ([node], left, 2)
    unreported = set(range(1, STEPS + 1)) - nodes.job.losses().keys()
    assert unreported <= {step + 1}, "whoever is rank 0 reports; the sum for that one step may have died with the node"
    assert not nodes.job.events("resume"), "no step was done anew from a checkpoint"
    assert len(nodes.job.events("link")) <= 1, "survivors know that they have looked at their links"


def test_nodes_that_are_killed_one_after_the_other_and_while_they_regroup(
    begin: Callable[..., Nodes], whole: Job
) -> None:
    nodes = begin(checkpoint_frequency=1000)
    nodes.start(
        world=4,
        faults=(fault("kill", "forward", 4, 0), fault("kill", "regroup", None, 2), fault("kill", "all_reduce", 20, 1)),
    )
    assert nodes.wait() == [KILLED, KILLED, KILLED, 0], nodes.log()
    assert_undisturbed(nodes, whole)
    assert nodes.members()[-1] == [3]


def test_what_is_done_once_more_from_a_checkpoint_is_reported_once(begin: Callable[..., Nodes], whole: Job) -> None:
    """The second rank 0 dies before it has handed on the state: whoever is left does not know what it had done by
    then, goes back, and has steps of its own that the first rank 0 had no time to report."""
    pause = fault("sleep", "forward", 8, 0, seconds=2.0)  # until the checkpoint, which is written beside, is there
    nodes = begin().start(faults=(pause, fault("kill", "all_reduce", 9, 0), fault("kill", "formed", 9, 1)))
    assert nodes.wait() == [KILLED, KILLED, 0], nodes.log()
    assert_undisturbed(nodes, whole)
    assert [len(item.members) for item in nodes.history()] == [3, 2, 1]
    [resumed] = nodes.job.events("resume")
    assert resumed["step"] < 9
    reports = Counter((item["generation"], item["step"]) for item in nodes.job.events("step"))
    assert set(reports.values()) == {1}, reports


def test_three_two_three_one(begin: Callable[..., Nodes], paced: Job, hurry: Path) -> None:
    """A replacement takes the state of a survivor, and carries it alone in the end: there is no checkpoint."""
    nodes = begin(**slow(hurry), checkpoint_frequency=1000, eval_frequency=1000).start()
    nodes.until_step(3)
    nodes.signal(signal.SIGKILL, 1)
    nodes.until_members(0, 2)
    nodes.start(1, stay=2)
    nodes.until_members(0, 1, 2)
    joined = nodes.step()
    nodes.until_step(joined + 3)
    nodes.signal(signal.SIGKILL, 0, 2)
    nodes.until_members(1)
    hurry.touch()
    assert nodes.wait() == [KILLED, 0, KILLED], nodes.log()
    assert not nodes.job.events("resume")
    assert not nodes.job.events("checkpoint_failed")
    newcomer = next(item for item in nodes.history() if len(item.members) == 3 and item.number > 1)
    assert [(seat.node, bool(seat.was_in)) for seat in newcomer.members] == [(0, True), (2, True), (1, False)]
    assert 3 <= joined < nodes.job.result()["steps"]
    assert_undisturbed(nodes, paced)


def test_a_frozen_node_is_left_out_and_comes_back(begin: Callable[..., Nodes], paced: Job, hurry: Path) -> None:
    nodes = begin(**slow(hurry), peer_timeout_seconds=2.5)
    nodes.start(faults=(fault("stop", "backward", 4, 0),))
    nodes.until_members(1, 2)
    before = nodes.step()
    nodes.until_step(before + 2)
    nodes.signal(signal.SIGCONT, 0)
    nodes.until_members(0, 1, 2)
    hurry.touch()
    assert nodes.wait() == [0, 0, 0], nodes.log()
    assert_undisturbed(nodes, paced)
    back = next(item for item in nodes.history()[2:] if len(item.members) == 3)
    assert {seat.node: bool(seat.was_in) for seat in back.members} == {0: False, 1: True, 2: True}, (
        "what it held when it woke up does not count"
    )


@pytest.mark.parametrize(
    "launch", [pytest.param(2, id="launched again"), pytest.param(1, id="restarted by Azure", marks=pytest.mark.long)]
)
def test_one_is_evicted_then_all_and_another_start_goes_on_with_fewer(
    begin: Callable[..., Nodes], paced: Job, hurry: Path, launch: int
) -> None:
    nodes = begin(**slow(hurry), checkpoint_frequency=1000, eval_frequency=1000).start()
    nodes.until_step(3)
    nodes.signal(signal.SIGTERM, 0)
    assert nodes.wait(0) == [143], nodes.log()
    left_at = (nodes.job.rundir.read_json(LATEST) or {})["step"]
    assert left_at >= 3, "a checkpoint before it went"
    assert not nodes.job.result(), "the others go on"
    nodes.until_members(1, 2)
    nodes.until_step(left_at + 2)
    nodes.signal(signal.SIGTERM, 1, 2)
    assert nodes.wait() == [143] * 3, nodes.log()
    stopped = nodes.job.result()
    assert (stopped["status"], stopped["launch"]) == ("stopped", 1)
    assert (nodes.job.rundir.read_json(LATEST) or {})["step"] == stopped["steps"] > left_at

    nodes.processes.clear()
    nodes.start(world=2, launch=launch).until_members(0, 1)
    hurry.touch()
    assert nodes.wait() == [0, 0], nodes.log()
    # Under its old number, a start does not wait for its planned world: who comes later takes the state of the first.
    assert {item["step"] for item in nodes.job.events("resume")} == {stopped["steps"]}
    assert (nodes.job.result()["status"], nodes.job.result()["launch"]) == ("succeeded", launch)
    launches = [item.launch for item in nodes.history()]
    assert len(launches) >= 3, "that of three, that of two, and the new start's"
    assert launches == [*[1] * (len(launches) - 1), launch], (
        "and more where a node comes late, or leaves a step earlier"
    )
    steps = [item["step"] for item in nodes.job.events("step")]
    assert steps == sorted(set(steps)), "no step was done twice"
    assert_undisturbed(nodes, paced)


def asked_to_stop(new_job: Callable[..., Job]) -> DistributedTrainer:
    """A trainer in a world of two, on a cluster, whose process was asked to end."""
    trainer = DistributedTrainer(parse_job(new_job().write().read_text()))
    world = World(RankFacts(world_size=2), torch.device("cpu"), "gloo", group=mock.Mock(rank=0, size=2))
    trainer._session = mock.Mock(world=world, participant=mock.Mock(asked_to_stop=True))
    return trainer


def test_who_is_asked_to_leave_goes_though_the_others_were_quicker_to_go_on(new_job: Callable[..., Job]) -> None:
    """They have heard of it in the step, and are in the next generation before this one has their last report."""
    trainer = asked_to_stop(new_job)
    trainer._leaves, trainer._pending_flags = True, StepResult(0.0, 0.0, 0.0, StepFlags(leaving=1), 0)
    called_off = GroupError("the others regroup", communication=False)
    with mock.patch.object(trainer, "_catch_up", side_effect=called_off), pytest.raises(Stopped) as stopped:
        trainer.train()
    trainer.session.save.assert_called_once_with(wait=True)  # type: ignore[attr-defined]
    assert not stopped.value.everybody


def test_who_is_asked_to_leave_after_it_has_voted_says_so_in_the_next_step(new_job: Callable[..., Job]) -> None:
    """Else two that leave in the same step would both count on the other to say how the job ended."""
    trainer = asked_to_stop(new_job)
    with pytest.raises(Regroup):
        trainer._act_on_flags(StepResult(0.0, 0.0, 0.0, StepFlags(leaving=1), 0))
    with pytest.raises(Stopped) as stopped:
        trainer._act_on_flags(StepResult(0.0, 0.0, 0.0, StepFlags(leaving=2), 0))
    assert stopped.value.everybody


def test_when_all_are_killed_a_new_launch_goes_on_from_the_checkpoint(begin: Callable[..., Nodes], whole: Job) -> None:
    nodes = begin()
    go = nodes.job.run_dir.parent / "go"
    until = {"seconds": 60.0, "until": str(go)}
    pauses = tuple(fault("sleep", "forward", 16, node, **until) for node in range(3))
    kills = tuple(fault("kill", "forward", 17, node) for node in range(3))
    nodes.start(faults=pauses + kills)
    nodes.until(lambda: (nodes.job.rundir.read_json(LATEST) or {"step": None})["step"])  # before, it only fences
    go.touch()
    assert nodes.wait() == [KILLED] * 3, nodes.log()
    kept = (nodes.job.rundir.read_json(LATEST) or {})["step"]
    assert kept >= 5
    nodes.job.training["peer_timeout_seconds"] = 3
    nodes.processes.clear()
    assert nodes.start(0, 2, world=3, launch=2).wait() == [0, 0], nodes.log()  # one never comes
    after = nodes.members()[1:]  # on a busy machine one of them may begin, and the other join it
    assert after
    assert all(set(members) <= {0, 2} for members in after)
    assert {item["step"] for item in nodes.job.events("resume")} == {kept}
    assert_undisturbed(nodes, whole)


def test_one_rank_that_runs_out_of_memory_makes_all_use_less(begin: Callable[..., Nodes]) -> None:
    nodes = begin(max_steps=8, log_frequency=4)
    nodes.start(faults=(fault("oom", "backward", 3, 1), fault("oom", "forward", 5, 0)))
    assert nodes.wait() == [0, 0, 0], nodes.log()
    told = [(item["samples"], item["activation_checkpointing"]) for item in nodes.job.events("out_of_memory")]
    assert told == [(16, False), (8, False)]
    assert nodes.members() == [[0, 1, 2]] * 3, "nobody left"
    assert [generation.chunk for generation in nodes.history()] == [None, 16, 8]
    result = nodes.job.result()
    assert (result["status"], result["steps"], result["samples_seen"]) == ("succeeded", 8, 8 * 192)
    timing = nodes.job.events("timing")
    assert [(item["step"], item["steps"]) for item in timing] == [(4, 1), (8, 3)], "each regroup begins a window anew"
    assert [item["local_samples_per_micro_batch"] for item in timing] == [16, 8]
    assert [sum(item["samples"]) for item in timing] == [192, 3 * 192]


def test_a_rank_whose_gpu_is_too_small_comes_back_on_the_cpu(begin: Callable[..., Nodes], hurry: Path) -> None:
    def seats(at: int) -> dict[int, str]:
        return {seat.node: seat.member for seat in nodes.history()[at].members}

    nodes = begin(**slow(hurry), micro_batch_floor=16)
    nodes.start(faults=[fault("gpu_oom", "forward", 4, 1)] * 3)  # fewer samples, checkpointing, no way left
    nodes.until(lambda: nodes.history() and seats(-1).get(1, seats(0)[1]) != seats(0)[1])
    hurry.touch()
    assert nodes.wait() == [0, 0, 0], nodes.log()
    moved = [item for item in nodes.job.events("out_of_memory") if item.get("device") == "cpu"]
    assert [item["step"] for item in moved] == [4]
    first, last = seats(0), seats(-1)
    assert {node for node, member in last.items() if member != first[node]} == {1}, "it is let in as a newcomer"
    assert set(last) == {0, 1, 2}
    assert nodes.job.events("resume") == [], "the others went on with their state, and it got that"
    assert nodes.job.result()["status"] == "succeeded"
    assert nodes.job.result()["weights_equal_on_ranks"]


def test_an_error_of_the_users_code_ends_the_job_and_nobody_tries_again(begin: Callable[..., Nodes]) -> None:
    nodes = begin().start(faults=(fault("raise", "forward", 4, 1),))
    assert nodes.wait() == [1, 1, 1], nodes.log()
    assert nodes.job.result()["status"] == "failed"
    assert "InjectedError: injected" in nodes.job.result()["error"]
    assert nodes.step() <= 5


def test_a_step_is_retried_then_goes_through_one_rank_and_all_reduce_comes_back(
    begin: Callable[..., Nodes], whole: Job, tmp_path: Path
) -> None:
    """Node 1 comes too late to its all-reduce four times in a row; nobody is lost."""

    def failed_without_1(attempt: int) -> bool:
        errors = nodes.job.events("communication_error")
        return {item["rank"] for item in errors if item["attempt"] == attempt} >= {0, 2}

    nodes = begin(collective_timeout_seconds=1, health_check_seconds=1, allreduce_retry_seconds=0.01)
    comes = [tmp_path / f"comes-{attempt}" for attempt in range(4)]
    nodes.start(faults=[fault("sleep", "all_reduce", 7, 1, seconds=60.0, until=str(file)) for file in comes])
    for attempt, file in enumerate(comes):
        nodes.until(partial(failed_without_1, attempt))
        file.touch()
    assert nodes.wait() == [0, 0, 0], nodes.log()
    job = nodes.job
    history = nodes.history()
    assert [item.attempt for item in history[:5]] == [0, 1, 2, 3, 4]
    assert [item.topology for item in history[:5]] == ["mesh"] * 4 + ["star"], (
        "three retries, then parameter-server mode"
    )
    assert {item.topology for item in history[5:]} == {"mesh"}, "and all-reduce again when it works"
    assert all(len(item.members) == 3 for item in history), "nobody was left out"
    assert [item.step for item in history[:5]] == [0, 7, 7, 7, 7]
    errors = [item for item in job.events("communication_error") if item["generation"] == history[0].number]
    assert {item["rank"] for item in errors} >= {0, 2}
    said = errors[0]
    assert "gradient bucket 0" in said["operation"]
    assert said["waited_seconds"] >= 0.9
    assert said["error"]
    assert len(said["peers"]) == 2
    assert all(view.startswith("here") for view in said["peers"].values())
    assert_undisturbed(nodes, whole)


def test_with_tls_the_same_training_goes_on_without_the_rank_0_that_is_killed(
    begin: Callable[..., Nodes], whole: Job, tmp_path: Path
) -> None:
    nodes = begin(tls=asdict(Authority(tmp_path).node()))
    nodes.start(faults=(fault("kill", "all_reduce", 7, 0),))
    assert nodes.wait() == [KILLED, 0, 0], nodes.log()
    job = nodes.job
    assert job.events("membership")[-1]["topology"] == "mesh"
    timing = job.events("timing")
    assert {item["topology"] for item in timing} == {"all-reduce"}
    names = [[one["name"] for one in item["collectives"]] for item in timing]
    assert names == [["bucket 0", "commit"]] * len(timing)
    assert_undisturbed(nodes, whole)
