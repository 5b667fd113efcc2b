"""A state that is passed to newcomers: which ranks get it, in which pieces, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from thread_worlds import CPU, at_once, gloo_openers, worlds_of
from torch import Tensor, nn

from trainer.comm import state_passing
from trainer.comm.group import GroupError
from trainer.comm.state_passing import pass_state
from trainer.comm.world import World


def a_state() -> dict[str, Any]:
    """Of all that a checkpoint may hold: types, layouts, nothing, one tensor twice, plain values."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)  # type: ignore
    odd = {
        "none": torch.zeros(0, 3), "one": torch.tensor(3), "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64).conj(), "half": torch.randn(7).bfloat16(),
        "strided": torch.randn(3, 8)[:, ::2], "same": torch.ones(1).expand(6), "turned": torch.randn(4, 5).t(),
    }  # fmt: skip
    moments = {number: (torch.randn(11), torch.randn(11)) for number in range(3)}
    return {
        "model": net.state_dict(),
        "odd": odd,
        "step": {"state": moments, "rates": [1e-3, None]},
        "best": odd["one"],
    }


def are_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and bool(torch.equal(found, expected.detach()))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(are_equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(are_equal, found, expected))
    return bool(found == expected)


def pass_among(ranks: int, takers: Collection[int], lost: int | None = None) -> tuple[list[Any], list[list[int]]]:
    """What each rank gets, or its error, of the state of rank 1; and the bytes of each operation on it. Rank ``lost``
    leaves after three of its pieces."""
    moved = [list[int]() for _ in range(ranks)]

    def counted(rank: int, opener: Callable[[], Any]) -> Any:
        made = opener()
        if lost is not None:  # it is waited for; only forming the group may take longer
            made.group._get_backend(CPU)._set_default_timeout(timedelta(seconds=1.0))

        def counting(move: Callable[[Tensor, int], None]) -> Callable[[Tensor, int], None]:
            def act(piece: Tensor, peer: int) -> None:
                if rank == lost and len(moved[rank]) == 3:
                    raise RuntimeError("this rank is lost")
                moved[rank].append(piece.nbytes)
                move(piece, peer)

            return act

        for name in ("send", "receive", "broadcast"):
            setattr(made, name, counting(getattr(made, name)))
        return made

    def work(world: World) -> Any:
        try:
            return pass_state(world, 1, takers, a_state)
        except GroupError as error:
            return error
        finally:
            world.close()

    openers = [partial(counted, rank, opener) for rank, opener in enumerate(gloo_openers(ranks, 20.0))]
    return at_once(work, worlds_of(openers)), moved


@pytest.mark.parametrize(
    ("ranks", "takers", "idle"),
    [
        (2, [0], []),
        (4, [3], [0, 2]),  # from one to the other
        (4, [1, 2, 3], [0]),  # the source is none of them
        (4, [0, 2, 3], []),  # so many that all get it
        (3, [], [0, 1, 2]),
    ],
)
def test_those_that_need_it_get_it_bit_for_bit_in_small_pieces(
    monkeypatch: pytest.MonkeyPatch, ranks: int, takers: list[int], idle: list[int]
) -> None:
    monkeypatch.setattr(state_passing, "PIECE_BYTES", 100)
    found, moved = pass_among(ranks, takers)
    outline = len(state_passing.take_apart(a_state())[0])
    for rank in range(ranks):
        assert (found[rank] is not None) == (rank in takers and rank != 1)
        assert not [size for size in moved[rank] if size > 100 and size != outline]
        assert bool(moved[rank]) == (rank not in idle), rank
        if found[rank] is not None:
            assert are_equal(found[rank], a_state())
            weight = found[rank]["model"]["0.weight"]
            assert weight.is_contiguous(memory_format=torch.channels_last), "it lies as it did"
            assert found[rank]["model"]._metadata["1"] == {"version": 2}


def test_a_rank_that_is_lost_meanwhile_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_passing, "PIECE_BYTES", 100)
    found, moved = pass_among(3, [0, 2], lost=2)
    assert [isinstance(item, GroupError) for item in found] == [True, True, True]
    assert len(moved[1]) < 20, "the source has not gone on"
