"""Real ranks that share cores: the report says so, calls no node slow, and advises nothing that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtrain_dagster.monitoring.alerts import STRAGGLERS, alerts
from dtrain_dagster.monitoring.diagnosis import SlowdownCause, diagnose
from dtrain_dagster.monitoring.strategies import strategies
from dtrain_dagster.monitoring.windows import keep, settled, windows
from harness.clinic import COMPUTE_SECONDS, MICRO_BATCHES, Clinic, Plant, seconds_of_round
from trainer.runtime.cores import available_cores

RANKS = available_cores() + 1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(RANKS > 5, reason="more ranks than cores would be too many for a test"),
]


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    made = Clinic(tmp_path_factory.mktemp("clinic"))
    yield made
    made.close()


@pytest.mark.long
def test_more_ranks_than_cores_are_told_and_no_node_is_to_be_replaced(clinic: Clinic) -> None:
    rounds = round(COMPUTE_SECONDS / MICRO_BATCHES / seconds_of_round())
    plant = Plant(seed=0, cause=SlowdownCause.CROWDED, ranks=RANKS, model={"rounds": rounds})
    events = clinic.events(plant, "crowded")
    found = diagnose(events)
    assert found.cause is SlowdownCause.CROWDED
    assert f"{RANKS} ranks share {available_cores()} core" in found.evidence
    assert not [item for item in (found, *found.also) if item.cause in STRAGGLERS]
    assert not alerts(keep((), events))
    advice = {item.name for item in strategies(settled(windows(events)))}
    assert "fewer nodes are as fast" in found.evidence
    assert not [name for name in advice if name.startswith(("replace", "go on without"))]
