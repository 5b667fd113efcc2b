"""What each framework is told of the ranks, as pure functions; the frameworks themselves are in tests/frameworks."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from trainer.comm.horovod import horovod_variables
from trainer.comm.launcher_env import RankFacts
from trainer.frameworks import deepspeed, horovod, ray, tensorflow
from trainer.frameworks.catalogue import FRAMEWORKS, explain_missing, explain_size


def ranks(nodes: int, per_node: int) -> list[RankFacts]:
    return [
        RankFacts(
            rank=rank, world_size=nodes * per_node, local_rank=rank % per_node, local_world_size=per_node,
            node_rank=rank // per_node, master_addr="10.0.0.1", master_port=29500,
        )
        for rank in range(nodes * per_node)
    ]  # fmt: skip


def test_horovods_server_knows_the_nodes_by_the_names_of_the_ranks():
    assert horovod.hosts(ranks(2, 2)[0]) == "node-0:2,node-1:2"
    assert horovod_variables(3, [0, 0, 1, 1], ("10.0.0.1", 4000), "eth0")["HOROVOD_HOSTNAME"] == "node-1"


def test_tensorflow_gets_all_workers_and_its_own_place():
    workers = ["10.0.0.1:4000", "10.0.0.2:4001"]
    told = [json.loads(tensorflow.describe_workers(rank, workers)) for rank in range(2)]
    assert [each["task"] for each in told] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert all(each["cluster"] == {"worker": workers} for each in told)


def test_deepspeed_computes_on_the_cpu_only_where_there_is_no_gpu_and_nobody_says_otherwise():
    facts = ranks(2, 2)[3]
    assert deepspeed.variables(facts, {}, has_gpu=False)["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in deepspeed.variables(facts, {}, has_gpu=True)
    assert "DS_ACCELERATOR" not in deepspeed.variables(facts, {"DS_ACCELERATOR": "xpu"}, has_gpu=False)
    told = deepspeed.variables(facts, {}, has_gpu=True)
    assert (told["CROSS_RANK"], told["CROSS_SIZE"], told["LOCAL_SIZE"]) == ("1", "2", "2")


def test_what_a_killed_compilation_left_is_taken_away_only_while_nobody_compiles(tmp_path: Path):
    (tmp_path / "op").mkdir()
    left = tmp_path / "op" / deepspeed.LEFT_BEHIND
    left.touch()
    other = os.open(tmp_path / deepspeed.HELD, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_SH)  # as another program that runs does
    deepspeed.hold_extensions(tmp_path)
    assert left.exists()
    os.close(other)
    before = set(os.listdir("/proc/self/fd"))
    [held] = [int(fd) for fd in before if os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path / deepspeed.HELD)]
    assert os.get_inheritable(held), "the program that this process becomes holds it on"
    os.close(held)
    deepspeed.hold_extensions(tmp_path)
    assert not left.exists()


def test_a_machine_of_loopback_has_one_node_of_ray_with_all_its_gpus():
    assert ray.join_gpus(["0,1", "2,3", "0,1", ""]) == "0,1,2,3"


def test_ray_asks_for_a_token_and_stays_on_loopback_where_it_can():
    told = ray.ray_variables("secret", is_one_machine=True)
    assert (told["RAY_AUTH_MODE"], told["RAY_AUTH_TOKEN"]) == ("token", "secret")
    assert told["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in ray.ray_variables("secret", is_one_machine=False)
    options = ray.head_options(4000, 4001, 4002)
    assert options[options.index("--include-dashboard") + 1] == "false"


def test_rays_folder_is_where_the_paths_of_its_sockets_are_short_enough():
    assert ray.folder_of_folders("/var/tmp") == "/var/tmp"
    wanted = ray.folder_of_folders("/tmp/pytest-of-somebody/pytest-276/t0")
    assert wanted == "/tmp"
    longest = f"{'x' * ray.MOST_LETTERS}/{ray.NAME_PREFIX}12345678/session_2026-11-26_03-10-03_601011_4194304/sockets/"
    assert len(f"{longest}plasma_store") <= 107


def test_what_is_missing_is_named_with_its_remedy():
    assert explain_missing(FRAMEWORKS["torchrun"], lambda name: False) == ""
    assert explain_missing(FRAMEWORKS["horovod"], lambda name: True) == ""
    for name, remedy in (("horovod", "build_horovod.sh"), ("ray", r"dtrain[frameworks]"), ("tensorflow", "frameworks")):
        said = explain_missing(FRAMEWORKS[name], lambda name: False)
        assert f"--engine {name} needs" in said
        assert remedy in said


@pytest.mark.parametrize(
    ("engine", "processes", "has_gpus", "refused"),
    [
        ("horovod", 4, True, ""),
        ("deepspeed", 4, True, ""),
        ("tensorflow", 1, True, ""),
        ("tensorflow", 4, False, ""),
        ("tensorflow", 4, True, "give --procs-per-node 1"),
        ("ray", 1, False, ""),
        ("ray", 2, False, "leave out --procs-per-node"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(engine: str, processes: int, has_gpus: bool, refused: str):
    said = explain_size(FRAMEWORKS[engine], processes, has_gpus)
    assert refused in said
    assert bool(said) == bool(refused)


def places(nodes: list[int]) -> list[tuple[int, ...]]:
    """Of each rank: its place on its node, the ranks there, its place across nodes, and how many are across."""
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    found = [horovod_variables(rank, nodes, ("10.0.0.1", 7), "eth0") for rank in range(len(nodes))]
    return [tuple(int(item[f"HOROVOD_{name}"]) for name in names) for item in found]


def test_ranks_of_horovod_have_places_on_their_nodes_and_across_them() -> None:
    assert places([0, 0, 1, 1]) == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert places([4, 7, 9]) == [(0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3)]


def test_nodes_of_horovod_may_have_unequally_many_ranks_in_any_order() -> None:
    """As after the loss of a rank: of the second places there is one alone."""
    assert places([1, 0, 1]) == [(0, 2, 1, 2), (0, 1, 0, 2), (1, 2, 0, 1)]


def test_each_generation_of_horovod_meets_under_names_of_its_own() -> None:
    first, second = (horovod_variables(0, [0, 1], ("10.0.0.1", 7000), "eth0", world) for world in ("g1-", "g2-"))
    assert first["HOROVOD_HOSTNAME"] != second["HOROVOD_HOSTNAME"]
    assert (first["HOROVOD_RANK"], first["HOROVOD_SIZE"]) == ("0", "2")
    assert (first["HOROVOD_GLOO_RENDEZVOUS_ADDR"], first["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "7000")
    assert first["HOROVOD_CONTROLLER"] == first["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert first["HOROVOD_GLOO_IFACE"] == "eth0"
