from __future__ import annotations

import itertools
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from harness.worlds import Forked, free_port
from trainer.comm import static_rendezvous
from trainer.comm.launch_secret import SECRET_FILE, write_launch_secret
from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.comm.static_rendezvous import PeersMissingError, join_world
from trainer.comm.world import UNKNOWN_GPU, choose_device, choose_gpu, explain_mig
from trainer.config import ConfigError, DistributedTrainingConfig

CONFIG = DistributedTrainingConfig()
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

MEMBER = """
import os, sys, torch
from trainer.config import DistributedTrainingConfig
from trainer.comm.static_rendezvous import join_world
world = join_world(DistributedTrainingConfig(collective_timeout_seconds=30))
rank = world.rank
assert world.all_reduce(torch.tensor([1.0, rank])).tolist() == [2.0, 1.0]
assert world.all_gather_object(["rank", rank]) == [["rank", 0], ["rank", 1]]
print(world.backend, world.device.type, os.environ["GLOO_SOCKET_IFNAME"], flush=True)
sys.stdin.readline()
world.close()
"""


def test_without_a_launcher_this_is_a_world_of_one() -> None:
    assert rank_facts({}, CONFIG) == RankFacts()
    world = join_world(CONFIG, {})
    assert (world.rank, world.world_size, world.any(True, False)) == (0, 1, (True, False))
    assert world.all_gather_object(1) == [1]
    world.barrier()
    weights = torch.ones(2)
    world.broadcast(weights)
    assert world.all_reduce(weights).tolist() == [1.0, 1.0]
    world.close()


def test_torchrun_says_all() -> None:
    facts = rank_facts(TORCHRUN, CONFIG)
    assert facts == RankFacts(
        rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, master_addr="10.0.0.1", master_port=29500
    )


def test_slurm_is_understood_with_the_address_from_the_configuration() -> None:
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_NODEID": "1",
    }
    facts = rank_facts(slurm, DistributedTrainingConfig(master_addr="node-a", master_port=4000))
    assert (facts.rank, facts.world_size, facts.local_rank, facts.node_rank) == (5, 8, 1, 1)
    assert (facts.master_addr, facts.master_port) == ("node-a", 4000)


@pytest.mark.parametrize(
    ("tasks", "rank", "node", "here", "nodes"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 5, 1, 4, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, 7, 2, 2, 3),
        ({"SLURM_TASKS_PER_NODE": "8"}, 5, 0, 8, 1),
        ({"SLURM_TASKS_PER_NODE": "4(x9)", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 5, 1, 4, 2),  # the job has more
        ({"SLURM_TASKS_PER_NODE": "4(x9)", "SLURM_NTASKS_PER_NODE": "4"}, 5, 1, 4, 2),
        ({"SLURM_TASKS_PER_NODE": "nonsense"}, 5, 1, 1, 8),
        ({}, 5, 1, 1, 8),
    ],
)
def test_slurm_tells_the_ranks_of_each_node_without_being_asked_for_so_many(
    tasks: dict[str, str], rank: int, node: int, here: int, nodes: int
) -> None:
    slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": str(node)}
    facts = rank_facts({**slurm, **tasks, "MASTER_PORT": "1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, CONFIG)
    assert (facts.local_world_size, facts.node_count, facts.has_own_cores) == (here, nodes, True)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert rank_facts({**slurm, **tasks, "MASTER_PORT": "1", **launched}, CONFIG).node_count == 1, "by its own launcher"


def test_open_mpi_is_understood_and_its_node_rank_is_not_the_nodes_number() -> None:
    mpi = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "MASTER_PORT": "1",
    }
    of_the_daemon = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}
    for environment in (mpi, mpi | of_the_daemon):
        facts = rank_facts(environment, CONFIG)
        assert (facts.rank, facts.local_rank, facts.node_rank, facts.node_count) == (5, 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "x"}, "RANK='x' .*not a whole number"),
        ({"RANK": "4"}, "RANK=4 is outside a world of WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is outside"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": None}, "WORLD_SIZE is set and RANK is not.*torchrun"),
        ({"WORLD_SIZE": None}, "RANK is set and WORLD_SIZE is not.*torchrun"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 does not fit"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 does not fit"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set.*torchrun"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' .*not a port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000' .*not a port"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_name(changes: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        rank_facts(environment, CONFIG)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpus_is_refused_and_auto_takes_the_processor() -> None:
    with pytest.raises(ConfigError, match=r"'nccl' needs a GPU.*sees none: use backend 'auto'"):
        choose_device(RankFacts(), "nccl")
    assert choose_device(RankFacts(), "auto") == (torch.device("cpu"), "gloo")


def facts_of(local_rank: int, local_world_size: int) -> RankFacts:
    return RankFacts(rank=local_rank, world_size=8, local_rank=local_rank, local_world_size=local_world_size)


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend", "chosen"),
    [
        (4, 4, "auto", [0, 1, 2, 3]),
        (8, 4, "nccl", [0, 1, 2, 3]),
        (1, 4, "auto", [0, 0, 0, 0]),  # each rank sees its own, as number 0: srun --gpus-per-task=1
        (2, 4, "auto", [0, 1, 0, 1]),  # each socket's ranks see those of it
        (0, 4, "auto", [None] * 4),
        (4, 4, "gloo", [None] * 4),
        (1, 4, "gloo", [None] * 4),
    ],
)
def test_each_rank_takes_a_gpu_of_those_that_it_sees(
    gpus: int, ranks: int, backend: str, chosen: list[int | None]
) -> None:
    assert [choose_gpu(gpus, facts_of(rank, ranks), backend) for rank in range(ranks)] == chosen


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (["GPU-a", "GPU-b"], ""),
        (["", ""], ""),
        ([UNKNOWN_GPU, UNKNOWN_GPU], ""),
        (["GPU-a", "GPU-b", "GPU-a"], "rank 0 and rank 2 use the same GPU (GPU-a)"),
        (["GPU-a", ""], "rank 0 has a GPU and rank 1 sees none"),
    ],
)
def test_ranks_with_one_gpu_or_without_refuse_each_other_when_they_meet(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], words: str
) -> None:
    monkeypatch.setattr(static_rendezvous, "gpu_name", lambda device: gpus[device.index])
    monkeypatch.setattr(static_rendezvous, "choose_device", lambda facts, _: (torch.device("cpu", facts.rank), "gloo"))
    config = DistributedTrainingConfig(collective_timeout_seconds=30)
    common = {"WORLD_SIZE": str(len(gpus)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def join(rank: int) -> str:
        try:
            join_world(config, common | {"RANK": str(rank)}).close()
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(gpus)) as threads:
        told = list(threads.map(join, range(len(gpus))))
    assert [bool(words) == bool(said) and words in said for said in told] == [True] * len(gpus), told


@pytest.mark.parametrize(
    ("gpus", "name", "visible"),
    [
        (1, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        (1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_parts_of_a_gpu_are_refused_where_ranks_train_together(
    monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, visible: str | None, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=r"MIG instance .*take a size with whole GPUs"):
        choose_device(RankFacts(world_size=2, local_world_size=2 if visible else 1), backend)
    assert choose_device(RankFacts(), backend) == (torch.device("cuda", 0), "nccl"), "alone it may train"
    assert choose_device(RankFacts(world_size=2), "gloo") == (torch.device("cpu"), "gloo")


def test_whole_gpus_are_not_taken_for_parts() -> None:
    assert not explain_mig("NVIDIA H100 80GB HBM3", 8)
    assert not explain_mig("GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77,1", 8)
    assert explain_mig("MIG-GPU-5d5ba0d6/1/0", 8)


@pytest.mark.parametrize(("address", "reason"), [("127.0.0.1", "MASTER_PORT={} is in use"), ("localhost", "in use")])
def test_a_port_in_use_is_said_at_once(address: str, reason: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        with pytest.raises(ConfigError, match=re.escape(reason.format(port))):
            join_world(CONFIG, environment)


@pytest.mark.parametrize("said", [b"nonsense", b"70000 127.0.0.1", b"80 ..", b"\xff\x00 1"])
def test_nonsense_in_the_store_of_torchruns_agents_is_said(
    tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can write there; with a secret, rank 1 looks there for rank 0's own store."""
    monkeypatch.setattr(static_rendezvous, "_JOINED", itertools.count())  # the first world of this process
    write_launch_secret(tmp_path / "secrets" / "launch")
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents.set("run/0/store", said)
    environment = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run",
        SECRET_FILE: str(tmp_path / "secrets" / "launch"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"rank 0 listens at .*not an address with a port.*--master-port") as refused:
        join_world(DistributedTrainingConfig(collective_timeout_seconds=5), environment)
    assert repr(said) in str(refused.value)


@pytest.mark.slow
def test_two_ranks_agree_and_listen_on_this_machine_only() -> None:
    """F1: collectives of a real world; its sockets, as the kernel sees them."""
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common.pop("GLOO_SOCKET_IFNAME", None)
    ranks = [Forked(MEMBER, environment={**common, "RANK": str(rank)}) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout.readline().split() == ["gloo", "cpu", "lo"]
        sockets = [found for rank in ranks for found in psutil.Process(rank.pid).net_connections("inet")]
        listening = {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        assert {found.laddr.ip for found in sockets} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        for rank in ranks:
            rank.communicate("\n")
        assert [rank.wait() for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_a_peer_that_never_comes_is_not_waited_for_beyond_the_timeout() -> None:
    config = DistributedTrainingConfig(collective_timeout_seconds=1)

    def facts(rank: int) -> dict[str, str]:  # each in a world of its own
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return world | {"RANK": str(rank)}

    with pytest.raises(PeersMissingError, match=r"rank 1 waited 1 s at MASTER_ADDR=127\.0\.0\.1"):
        join_world(config, facts(1))
    program = """
from trainer.comm.static_rendezvous import *
join_world(DistributedTrainingConfig(collective_timeout_seconds=1))
"""
    with Forked(program, environment=os.environ | facts(0), errors=True) as process:
        said = process.communicate()
        assert process.wait() == 1, "nothing keeps the process from ending"
    assert "PeersMissingError: rank 0 waited 1 s at MASTER_ADDR=127.0.0.1" in said
