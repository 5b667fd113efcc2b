"""Records of generations, small and large: what is written is read again, and a damaged one is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crowd import seat

from trainer.elastic.generation import FULL_MESH, Candidate, Generation
from trainer.elastic.generation_record import generations, path_of, read_generation, read_nodes, records, text_of
from trainer.errors import DamagedError
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

LARGE = FULL_MESH + 4


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def generation(size: int, number: int = 1, **changed: Any) -> Generation:
    seats = tuple(
        Candidate(
            member=f"n{place // 2}p{place % 2}-{place:08x}", node=place // 2, local_rank=place % 2, launch=3,
            host="::1", port=2000 + place, store_port=3000, ready=True, was_in=place % 3, rank=place,
            step=7, reason="n9 is gone", chunk=None if place % 2 else 16,
        )
        for place in range(size)
    )  # fmt: skip
    return Generation(**{"number": number, "launch": 3, "members": seats, "step": 7, "formed_at": 1.5} | changed)


@pytest.mark.parametrize("size", [1, 2, FULL_MESH, FULL_MESH + 1, 300])
def test_what_is_written_is_read_again(storage: Storage, size: int) -> None:
    made = [generation(size), generation(size, 2, topology="star", attempt=4, reason="why")]
    for item in made:
        storage.create(path_of(item.number), text_of(item))
    assert records(storage) == ["g000001.json", "g000002.json"]
    assert generations(storage) == made
    assert read_nodes(storage, "g000002.json") == {
        "number": 2, "launch": 3, "formed_at": 1.5, "nodes": frozenset(range((size + 1) // 2)),
    }  # fmt: skip


def test_all_on_one_node_are_counted_by_their_column(storage: Storage) -> None:
    made = generation(LARGE, members=tuple(seat(f"n0p{rank}-a", local_rank=rank) for rank in range(20)))
    storage.create(path_of(1), text_of(made))
    assert read_generation(storage, "g000001.json") == made
    found = read_nodes(storage, "g000001.json")
    assert found is not None
    assert found["nodes"] == {0}


def test_views_have_served_and_take_no_room_in_a_large_record(storage: Storage) -> None:
    seats = tuple(seat(f"n{node}p0-a", node, view={"b": "here"}) for node in range(LARGE))
    storage.create(path_of(1), text_of(generation(LARGE, members=seats)))
    assert all(not seat.view for seat in read_generation(storage, "g000001.json").members)


def test_a_field_that_a_later_version_adds_is_left_out(storage: Storage) -> None:
    made = generation(LARGE)
    data = json.loads(text_of(made))
    data["later"], data["members"]["later"] = 1, [1, 2]
    storage.create(path_of(1), json.dumps(data).encode())
    assert read_generation(storage, "g000001.json") == made


def set_column(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda columns: columns.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_column("port", [1] * LARGE + [2]), "columns whose 'port' has another length"),
        (set_column("port", 70_000), "columns whose 'port' is out of range"),
        (set_column("node", [-1] * LARGE), "columns whose 'node' is out of range"),
        (set_column("member", "n0p0-a"), "columns whose 'member' is not a list"),
        (set_column("member", ["../a"] * LARGE), "columns whose 'member' is not of its form"),
        (set_column("ready", [1] * LARGE), "columns whose 'ready' is neither true nor false"),
        (lambda columns: columns.pop("host"), "columns without 'host'"),
        (lambda columns: columns.pop("member"), "columns without 'member'"),
    ],
)  # fmt: skip
def test_damaged_columns_are_refused_by_name(
    storage: Storage, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    data = json.loads(text_of(generation(LARGE)))
    change(data["members"])
    storage.create(path_of(1), json.dumps(data).encode())
    with pytest.raises(DamagedError) as raised:
        read_generation(storage, "g000001.json")
    assert words in str(raised.value)
    assert "g000001.json" in str(raised.value)


@pytest.mark.parametrize("members", [None, 3, "n0p0-a"])
def test_members_that_are_neither_a_list_nor_columns_are_refused(storage: Storage, members: Any) -> None:
    data = json.loads(text_of(generation(LARGE))) | {"members": members}
    storage.create(path_of(1), json.dumps(data).encode())
    for read in (read_generation, read_nodes):
        with pytest.raises(DamagedError, match="neither a list nor columns"):
            read(storage, "g000001.json")


@pytest.mark.parametrize("nodes", [[[1]] * LARGE, ["0"] * LARGE])
def test_an_observer_refuses_nodes_that_are_no_numbers(storage: Storage, nodes: Any) -> None:
    data = json.loads(text_of(generation(LARGE)))
    data["members"]["node"] = nodes
    storage.create(path_of(1), json.dumps(data).encode())
    with pytest.raises(DamagedError, match="columns whose 'node' is not a whole number"):
        read_nodes(storage, "g000001.json")
