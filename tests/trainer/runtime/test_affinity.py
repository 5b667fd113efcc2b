"""Each rank on cores of its own, and gloo's threads behind those that send."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from worlds import Forked, Job

from trainer.runtime import affinity
from trainer.runtime.affinity import AVAILABLE, CoreTurns, bind, roam, share_of, take_cores

CORES = [2, 3, 5, 7]


@pytest.mark.parametrize(
    ("ranks", "threads", "shares"),
    [
        (2, 2, [[2, 3], [5, 7]]),
        (4, 1, [[2], [3], [5], [7]]),
        (3, 1, [CORES] * 3),  # one is left, for whoever needs it
        (1, 4, [CORES]),  # nobody to wait for
        (2, 1, [CORES] * 2),  # half of the cores idle: whichever they are
        (5, 1, [CORES] * 5),  # more ranks than cores
    ],
)
def test_ranks_that_take_all_cores_have_their_own(ranks: int, threads: int, shares: list[list[int]]) -> None:
    assert [share_of(place, ranks, threads, CORES) for place in range(ranks)] == shares


@pytest.mark.slow
@pytest.mark.skipif(len(AVAILABLE) < 2, reason="a core for each of two ranks is needed")
@pytest.mark.parametrize("bound", [True, False])
def test_two_ranks_that_share_a_host(new_job: Callable[..., Job], bound: bool) -> None:
    each = len(AVAILABLE) // 2
    job = new_job(world_size=2, threads_per_rank=each, bind_cores=bound, epochs=1000).start(2)
    found = []

    def trains() -> bool:
        return bool(job.losses())

    try:
        job.signal_when(trains, number=0)
        for process in job.processes:
            assert isinstance(process, Forked)
            tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
            loops = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == "gloo_tcp_loop"]
            found.append((os.sched_getaffinity(process.pid), {os.sched_getscheduler(loop) for loop in loops}))
    finally:
        job.kill()
    shares = [set(share_of(rank, 2, each, AVAILABLE)) for rank in range(2)]
    allowed = shares if bound else [set(AVAILABLE)]  # which of them: they exchange them in turns
    assert all(cores in allowed for cores, _ in found)
    assert [policies for _, policies in found] == [{os.SCHED_BATCH}] * 2


def test_ranks_of_a_host_exchange_their_cores_at_the_same_steps() -> None:
    shares = ((0,), (1,), (2,))
    for step_seconds, steps_of_a_turn in ((0.2, 1), (0.05, 1), (0.02, 3), (0.001, 50)):
        for step in range(3 * 50 + 2):
            given = [CoreTurns(shares, place).cores_at(step, step_seconds) for place in range(3)]
            assert sorted(given) == sorted(shares), "each core has one rank"
        own = [CoreTurns(shares, 1).cores_at(step, step_seconds) for step in range(3 * steps_of_a_turn)]
        assert [own.count(share) for share in shares] == [steps_of_a_turn] * 3


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="two cores are needed")
@pytest.mark.usefixtures("let_go")
def test_a_rank_moves_with_its_turn_unless_memory_is_nearer_to_some_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = len(AVAILABLE)
    turns = take_cores(0, ranks, 1)
    assert os.sched_getaffinity(0) == {AVAILABLE[0]}
    if turns is not None:  # this host has one memory node
        turns.take_turn(1, 1.0)
        assert os.sched_getaffinity(0) == {AVAILABLE[1]}
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(affinity, "_MEMORY_NODES", tmp_path)
    assert take_cores(0, ranks, 1) is None
    assert os.sched_getaffinity(0) == {AVAILABLE[0]}, "bound all the same"
    assert [take_cores(0, 1, 1), take_cores(0, ranks + 1, 1)] == [None, None]
    assert [take_cores(1, 1, ranks), take_cores(ranks, ranks, 1)] == [None, None], "a launcher tells too few ranks"


@pytest.fixture
def let_go() -> Iterator[None]:
    yield
    bind(AVAILABLE)


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="two cores are needed")
@pytest.mark.usefixtures("let_go")
def test_threads_that_were_bound_together_move_together_and_others_roam() -> None:
    """As after a regroup: threads that compute follow; one that works beside the training stays free."""
    every, one, other = set(AVAILABLE), {AVAILABLE[0]}, {AVAILABLE[1]}
    bind([*one])
    with ThreadPoolExecutor(1) as computing, ThreadPoolExecutor(1, initializer=roam) as beside:

        def where() -> list[set[int]]:
            here = partial(os.sched_getaffinity, 0)
            return [here(), computing.submit(here).result(), beside.submit(here).result()]

        assert where() == [one, one, every]
        bind([*other])
        assert where() == [other, other, every]
        bind(AVAILABLE)
        assert where() == [every] * 3


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="two cores are needed")
@pytest.mark.usefixtures("let_go")
def test_who_was_never_bound_keeps_what_others_have_chosen() -> None:
    """With taskset, say, after this process began."""
    chosen = set(AVAILABLE[:1])
    os.sched_setaffinity(0, chosen)
    try:
        bind(AVAILABLE)
        roam()
        assert os.sched_getaffinity(0) == chosen
    finally:
        os.sched_setaffinity(0, AVAILABLE)
