"""The variables from which Horovod reads the place of a rank."""

from __future__ import annotations

from trainer.comm.horovod import horovod_variables


def places(nodes: list[int]) -> list[tuple[int, ...]]:
    """Of each rank: its place on its node, the ranks there, its place across nodes, and how many are across."""
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    found = [horovod_variables(rank, nodes, ("10.0.0.1", 7), "eth0") for rank in range(len(nodes))]
    return [tuple(int(item[f"HOROVOD_{name}"]) for name in names) for item in found]


def test_ranks_have_places_on_their_nodes_and_across_them() -> None:
    assert places([0, 0, 1, 1]) == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert places([4, 7, 9]) == [(0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3)]


def test_nodes_may_have_unequally_many_ranks_in_any_order() -> None:
    """As after the loss of a rank: of the second places there is one alone."""
    assert places([1, 0, 1]) == [(0, 2, 1, 2), (0, 1, 0, 2), (1, 2, 0, 1)]


def test_each_generation_meets_under_names_of_its_own() -> None:
    first, second = (horovod_variables(0, [0, 1], ("10.0.0.1", 7000), "eth0", world) for world in ("g1-", "g2-"))
    assert first["HOROVOD_HOSTNAME"] != second["HOROVOD_HOSTNAME"]
    assert (first["HOROVOD_RANK"], first["HOROVOD_SIZE"]) == ("0", "2")
    assert (first["HOROVOD_GLOO_RENDEZVOUS_ADDR"], first["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "7000")
    assert first["HOROVOD_CONTROLLER"] == first["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert first["HOROVOD_GLOO_IFACE"] == "eth0"
