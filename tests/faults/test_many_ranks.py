"""18 and 24 ranks of one machine train, a third are killed at once, and the weights come out the same.

These are more than `trainer.elastic.generation.FULL_MESH`: few watch each, and one gathers the candidacies of all.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.faults.hosts import Hosts, Preload
from harness.faults.properties import WEIGHTS_LIMIT, _weights, relative_difference
from harness.waiting import until
from harness.worlds import build
from trainer.elastic.generation_record import generations
from trainer.rundir import STATUS

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 240.0
TRAINING = {
    "gradient_accumulation_steps": 1,
    "epochs": 1,
    "warmup_steps": 4,
    "log_frequency": 1,
    "checkpoint_frequency": 10,
    "threads_per_rank": 1,
    "collective_timeout_seconds": 60.0,
}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "killed"), [(18, 5), (24, 8)])
def test_a_third_of_many_ranks_are_killed_at_once_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, ranks: int, killed: int
) -> None:
    dataset = build(tmp_path)
    victims = range(0, ranks, ranks // killed)[:killed]
    with Preload() as preload:
        undisturbed = train(preload, tmp_path / "undisturbed", dataset, ranks)
        disturbed = train(preload, tmp_path / "killed", dataset, ranks, victims)
    expected, found = _weights(undisturbed.rundir), _weights(disturbed.rundir)
    assert set(expected) == set(found)
    for name in expected:
        assert relative_difference(found[name], expected[name]) <= WEIGHTS_LIMIT, name
    results = [hosts.rundir.read_json("result.json") or {} for hosts in (undisturbed, disturbed)]
    assert results[0]["consumed"] == results[1]["consumed"]
    history = generations(disturbed.rundir.storage)
    assert len(history[0].members) == ranks
    assert {seat.node for seat in history[0].members} - {seat.node for seat in history[-1].members} == set(victims)
    for item in history[1:]:
        assert all(seat.was_in == item.number - 1 for seat in item.members), "all brought their states"


def train(preload: Preload, folder: Path, dataset: Path, ranks: int, kill: range = range(0)) -> Hosts:
    """A training to its end; the nodes in ``kill`` are killed together once some steps are done."""
    config: dict[str, Any] = {
        "dataset": {"uri": str(dataset)},
        "tracking": {"tensorboard": False},
        "model": {"factory": "paced:tcn", "args": {"dropout": 0.1, "pause_seconds": 0.02}},
        "training": {"world_size": ranks, "batch_size_per_gpu": 96 // ranks, **TRAINING},
    }
    environment = {"DTRAIN_CACHE": str(folder.parent / "cache"), "DTRAIN_STOP_GRACE_SECONDS": "5"}
    hosts = Hosts(preload, folder, config, environment, max_replacements=0, nodes=ranks)
    try:
        hosts.start()
        if kill:
            wait_until(hosts, lambda: any(item["step"] >= 3 for item in hosts.rundir.events("step")), "three steps")
            assert all([hosts.signal(node, signal.SIGKILL) for node in kill])
        wait_until(hosts, lambda: not hosts.running, "the end")
        status = hosts.rundir.read_json(STATUS) or {}
        assert status["state"] == "succeeded", status["message"]
        return hosts
    finally:
        hosts.close()


def wait_until(hosts: Hosts, true: Callable[[], bool], what: str) -> None:
    until(lambda: true() or hosts.look(), f"{what}: {hosts.rundir.uri}", LIMIT_SECONDS, pause=0.05)
