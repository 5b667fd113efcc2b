"""Which ranks hold a copy of the model together, and which rows each of them holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.sampler import Sampler
from trainer.parallel.replicas import ReplicaPlan, count_passes, plan_replicas, row_range


def test_a_node_is_a_replica_where_all_nodes_have_equally_many_ranks() -> None:
    plan = plan_replicas("hsdp", [0, 0, 3, 3])
    assert plan == ReplicaPlan(((0, 1), (2, 3)))
    assert (plan.size, plan.place_of(3), plan.replica_of(3), plan.column_of(3)) == (2, 1, (2, 3), (1, 3))
    assert plan_replicas("hsdp", [1, 2, 1, 2]) == ReplicaPlan(((0, 2), (1, 3)))
    assert plan_replicas("fsdp", [0, 0, 3, 3]) == ReplicaPlan(((0, 1, 2, 3),))


def test_a_node_that_lacks_a_rank_leaves_one_replica_of_all() -> None:
    assert plan_replicas("hsdp", [0, 0, 1]) == ReplicaPlan(((0, 1, 2),))
    assert plan_replicas("hsdp", [0, 0, 1, 1], can_divide=False) == ReplicaPlan(((0, 1, 2, 3),))


@given(rows=st.integers(1, 50), size=st.integers(1, 9))
def test_rows_are_divided_as_torch_divides_them(rows: int, size: int) -> None:
    pieces = [piece.tolist() for piece in torch.chunk(torch.arange(rows), size)]
    pieces += [[]] * (size - len(pieces))
    assert [list(range(*row_range(rows, place, size))) for place in range(size)] == pieces


@given(
    samples=st.integers(12, 200), ranks=st.integers(1, 6), each=st.integers(1, 3), at_once=st.integers(1, 30),
)  # fmt: skip
def test_there_are_passes_for_the_work_of_every_rank(samples: int, ranks: int, each: int, at_once: int) -> None:
    micro_batches = 6 * each if samples >= 6 * each else 6
    needed = []
    for rank in range(ranks):
        sampler = Sampler(
            samples=samples, global_batch_size=samples, micro_batches=micro_batches, seed=0, rank=rank,
            world_size=ranks,
        )  # fmt: skip
        _, mine = sampler.step(0, 0)
        needed.append(sum(-(-len(part.positions) // at_once) for part in mine))
    passes = count_passes(samples, micro_batches, ranks, at_once)
    assert max(needed) <= passes


@pytest.mark.parametrize(("ranks", "passes"), [(1, 6), (4, 2), (6, 1)])
def test_no_more_passes_than_that(ranks: int, passes: int) -> None:
    assert count_passes(48, 6, ranks, 8) == passes
