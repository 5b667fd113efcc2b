"""The sensors' decisions."""

import pytest

from dtrain_dagster.monitoring.advice import decide_overrun


@pytest.mark.parametrize(("actual", "alert"), [(1.0, False), (1.25, False), (1.26, True), (3.0, True)])
def test_overrun(actual, alert):
    decision = decide_overrun(actual, 1.0, node_count=3, limit_fraction=0.25)
    assert decision.alert is alert
    assert "checkpoint stays" in decision.advice
