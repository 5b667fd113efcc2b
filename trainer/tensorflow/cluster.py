"""The ranks of a training with TensorFlow: from ``TF_CONFIG``, or from a launcher's variables.

Reading them, and the exchange of addresses where a launcher tells ranks only, belongs here; no TensorFlow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.comm.own_address import is_loopback
from trainer.comm.static_rendezvous import join_world
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.frameworks.tensorflow import TF_CONFIG, gather_workers


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers of one training."""

    facts: RankFacts
    workers: tuple[str, ...]
    """HOST:PORT of each rank, in order; one of them for a process that is alone."""

    @property
    def is_one_host(self) -> bool:
        """Whether all workers are on this machine, as far as their addresses tell."""
        hosts = {worker.rpartition(":")[0].strip("[]") for worker in self.workers}
        return len(hosts) == 1 or all(map(is_loopback, hosts))


_MET: dict[RankFacts, Cluster] = {}
"""The clusters that this process has met: TensorFlow listens at one address as long as it runs."""


def read_tf_config(text: str) -> tuple[tuple[str, ...], int]:
    """Return the workers' addresses and this one's rank. Raise `ConfigError` for what is no such cluster. Pure."""
    try:
        given: Any = json.loads(text)
        cluster, kind, index = given["cluster"], str(given["task"]["type"]), int(given["task"]["index"])
        chief = [str(place) for place in cluster.get("chief", [])]
        workers = (*chief, *(str(place) for place in cluster.get("worker", [])))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        example = '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": 0}}'
        raise ConfigError(f"{TF_CONFIG} is not valid: it needs {example} ({type(error).__name__}: {error})") from None
    if other := [name for name in (*sorted(cluster), kind) if name not in ("chief", "worker")]:
        raise ConfigError(f"{TF_CONFIG} has tasks of the type {other[0]!r}: all ranks of this strategy are workers")
    if kind == "worker":
        index += len(chief)
    if not 0 <= index < len(workers):
        raise ConfigError(f"{TF_CONFIG} has {len(workers)} workers and says that this one is number {index}")
    return workers, index


def choose_facts(
    environment: Mapping[str, str], config: DistributedTrainingConfig
) -> tuple[RankFacts, tuple[str, ...]]:
    """Return this process's rank, and the workers where ``TF_CONFIG`` names them. Raise `ConfigError` where it and a
    launcher's variables disagree. Pure."""
    facts = rank_facts(environment, config)
    if TF_CONFIG not in environment:
        return facts, ()
    workers, rank = read_tf_config(environment[TF_CONFIG])
    if facts.world_size > 1 and (facts.rank, facts.world_size) != (rank, len(workers)):
        raise ConfigError(
            f"{TF_CONFIG} says rank {rank} of {len(workers)}, and the launcher's variables rank {facts.rank} of "
            f"{facts.world_size}: give one of them only"
        )
    return replace(facts, rank=rank, world_size=len(workers)), workers


def find_cluster(config: DistributedTrainingConfig, environment: Mapping[str, str]) -> Cluster:
    """Return the cluster that the environment names. Without ``TF_CONFIG``, several ranks meet at MASTER_ADDR and tell
    each other where they will listen: a collective, once in a process. Raise `ConfigError` for an environment that
    cannot be used."""
    facts, workers = choose_facts(environment, config)
    if workers:
        return Cluster(facts, workers)
    if facts not in _MET:
        _MET[facts] = _meet(facts, config, environment)
    return _MET[facts]


def _meet(facts: RankFacts, config: DistributedTrainingConfig, environment: Mapping[str, str]) -> Cluster:
    if facts.world_size == 1:
        return Cluster(facts, tuple(gather_workers(facts, environment, lambda mine: [mine])))
    world = join_world(replace(config, backend="gloo"), environment)
    try:
        return Cluster(facts, tuple(gather_workers(facts, environment, world.all_gather_object)))
    finally:
        world.close()
