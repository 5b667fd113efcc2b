"""The variables from which Horovod reads the place of a rank."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from trainer.comm.group import CompletedCollective, GroupError
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.elastic.membership import NoGenerationError
from trainer.parallel import horovod_world
from trainer.parallel.horovod_world import form_horovod, horovod_variables


def places(nodes: list[int]) -> list[tuple[int, ...]]:
    """Of each rank: its place on its node, the ranks there, its place across nodes, and how many are across."""
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    found = [horovod_variables(rank, nodes, 1, "10.0.0.1", 7) for rank in range(len(nodes))]
    return [tuple(int(item[f"HOROVOD_{name}"]) for name in names) for item in found]


def test_ranks_have_places_on_their_nodes_and_across_them() -> None:
    assert places([0, 0, 1, 1]) == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert places([4, 7, 9]) == [(0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3)]


def test_nodes_may_have_unequally_many_ranks_in_any_order() -> None:
    """As after the loss of a rank: of the second places there is one alone."""
    assert places([1, 0, 1]) == [(0, 2, 1, 2), (0, 1, 0, 2), (1, 2, 0, 1)]


def test_each_generation_meets_under_names_of_its_own() -> None:
    first, second = (horovod_variables(0, [0, 1], number, "10.0.0.1", 7000) for number in (1, 2))
    assert first["HOROVOD_HOSTNAME"] != second["HOROVOD_HOSTNAME"]
    assert (first["HOROVOD_RANK"], first["HOROVOD_SIZE"]) == ("0", "2")
    assert (first["HOROVOD_GLOO_RENDEZVOUS_ADDR"], first["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "7000")
    assert first["HOROVOD_CONTROLLER"] == first["HOROVOD_CPU_OPERATIONS"] == "gloo"


class StartingHorovod(types.ModuleType):
    """As far as `form_horovod` uses it: it starts, or its start fails."""

    def __init__(self, works: bool) -> None:
        super().__init__("horovod.torch")
        self.works, self.calls = works, list[str]()

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def init(self) -> None:
        self.calls.append("init")
        if not self.works:
            raise RuntimeError("Horovod initialization failed")


class AloneGroup:
    """A group of the second of two ranks, whose actions run at once."""

    rank, size, error = 1, 2, None

    def run(self, what: str, action: Any, bytes_: int = 0) -> Any:
        try:
            return action(self)
        except Exception as error:
            raise GroupError(str(error)) from error

    def all_reduce(self, what: str, tensor: torch.Tensor) -> CompletedCollective:
        return CompletedCollective(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [[False, 0, "127.0.0.1", 7000], value]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("DTRAIN_HOST", "127.0.0.1")
    for name in ("_OURS", "_SPOILT"):
        monkeypatch.setattr(horovod_world, name, False)
    more = ("HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_IFACE")
    for name in (*horovod_variables(1, [0, 0], 1, "", 0), *more):
        monkeypatch.setenv(name, "")  # what is set meanwhile is undone
    return World(RankFacts(rank=1, world_size=2), torch.device("cpu"), "gloo", group=AloneGroup())  # type: ignore[arg-type]


@pytest.mark.parametrize("works", [True, False])
def test_a_process_whose_horovod_did_not_start_leaves(
    world: World, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's own flag of a failed start is never reset."""
    horovod = StartingHorovod(works)
    package = types.ModuleType("horovod")
    package.torch = horovod  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    if works:
        form_horovod(world, 5)
    else:
        with pytest.raises(NoGenerationError, match="cannot again in this process: Horovod initialization failed"):
            form_horovod(world, 5)
    assert horovod.calls == ["shutdown", "init"]
