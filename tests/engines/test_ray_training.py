"""Whole trainings on a real Ray cluster: their weights are those of the local cluster, whatever happens to machines,
agents or the head."""

from __future__ import annotations

import pytest

from harness.engines.engine_training import Outcome, Training
from harness.engines.machines import Raylets
from tests.engines.engine_trials import EngineTrials

pytestmark = [pytest.mark.slow, pytest.mark.long]


class TestRay(EngineTrials):
    kind = "ray"

    def as_a_person(self, machines: Raylets, words: list[str]) -> list[str]:
        """Nothing: this machine is no host of its own that ssh could reach."""
        assert words[0] == "ssh"
        return []

    def test_the_control_plane_is_restarted(self, machines: Raylets, training: Training, expected: Outcome) -> None:
        """All of a Ray cluster ends with its head, unless that keeps its memory in a Redis: the training goes on from
        its checkpoint once there is a cluster again."""
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        start = machines.kill_control_plane()
        before = training.step()
        training.run_until(lambda: training.step() > before + 100, "steps without it")
        start()
        made = training.outcome()
        assert made[:2] == expected[:2]
        assert {node.launch for node in training.rundir.nodes()} >= {1}
