"""Which workers a training with TensorFlow has, by ``TF_CONFIG`` and by launchers' variables; no TensorFlow."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from worlds import free_port

from trainer import DistributedConfig
from trainer.comm.launcher_env import RankFacts
from trainer.config import ConfigError
from trainer.tensorflow.cluster import Cluster, choose_facts, find_cluster, read_tf_config

CONFIG = DistributedConfig(world_size=1)


def tf_config(kind: str = "worker", index: int = 0, **cluster: list[str]) -> str:
    cluster = cluster or {"worker": ["a:1", "b:2"]}
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_workers_are_ranks_in_their_order() -> None:
    assert read_tf_config(tf_config(index=1)) == (("a:1", "b:2"), 1)
    assert read_tf_config(tf_config("chief", 0, chief=["c:0"], worker=["a:1"])) == (("c:0", "a:1"), 0)
    assert read_tf_config(tf_config("worker", 0, chief=["c:0"], worker=["a:1"])) == (("c:0", "a:1"), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG is not valid"),
        ('{"cluster": {"worker": ["a:1"]}}', "TF_CONFIG is not valid"),
        ("[]", "TF_CONFIG is not valid"),
        (tf_config(worker=["a:1"], ps=["b:2"]), "type 'ps'"),
        (tf_config("evaluator", 0), "type 'evaluator'"),
        (tf_config(index=2), "2 workers and says that this one is number 2"),
    ],
)
def test_what_is_no_cluster_of_workers_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tf_config(text)


def test_its_own_variable_and_a_launchers_must_agree() -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    facts, workers = choose_facts({"TF_CONFIG": tf_config(index=1), **ranks}, CONFIG)
    assert (facts.rank, facts.world_size, workers) == (1, 2, ("a:1", "b:2"))
    with pytest.raises(ConfigError, match="rank 0 of 2, and the launcher's variables rank 1 of 2"):
        choose_facts({"TF_CONFIG": tf_config(index=0), **ranks}, CONFIG)
    alone, _ = choose_facts({"TF_CONFIG": tf_config(index=1)}, CONFIG)
    assert (alone.rank, alone.world_size) == (1, 2)


def test_a_process_without_a_launcher_is_alone() -> None:
    cluster = find_cluster(CONFIG, {})
    assert (cluster.facts.rank, cluster.facts.world_size, len(cluster.workers)) == (0, 1, 1)
    assert cluster.is_one_host


def test_ranks_tell_each_other_their_addresses() -> None:
    port, found = free_port(), dict[int, Cluster]()

    def join(rank: int) -> None:
        environment: Mapping[str, Any] = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        found[rank] = find_cluster(CONFIG, environment)

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert found[0].workers == found[1].workers
    assert len(set(found[0].workers)) == 2
    assert found[1].facts.rank == 1


def test_hosts_are_told_by_their_addresses() -> None:
    facts = RankFacts(world_size=2)
    assert Cluster(facts, ("127.0.0.1:1", "127.0.0.1:2")).is_one_host
    assert Cluster(facts, ("[::1]:1", "[::1]:2")).is_one_host
    assert not Cluster(facts, ("10.0.0.1:1", "10.0.0.2:1")).is_one_host
