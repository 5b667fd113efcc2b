"""How long a cluster idles and when it is scaled down: the arithmetic of the sensor `idle_cluster`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.clusters.azure_ml.manager import why_nodes_stay
from dtrain_dagster.clusters.base import NodePool
from dtrain_dagster.sensors.idle_cluster import (
    Idling,
    is_over,
    look,
    read_cursor,
)

LIMIT, USD = 600.0, 3.06
POOL = NodePool(name="p", sku="Standard_NC6s_v3", states={"idle": 2}, node_count=2, used_at=100.0)
WORKING, EMPTY = replace(POOL, work=("train-1",)), replace(POOL, node_count=0)
IDLE = Idling(seen_at=1000.0, used_at=100.0, idle_seconds=540.0)


@pytest.mark.parametrize(
    ("before", "pool", "now", "idle_seconds"),
    [
        (None, POOL, 1000.0, 0.0),  # seen for the first time
        (IDLE, POOL, 1060.0, 600.0),
        (IDLE, WORKING, 1060.0, 0.0),
        (IDLE, EMPTY, 1060.0, 0.0),
        (IDLE, replace(POOL, used_at=1050.0), 1060.0, 10.0),  # a job ended since the last look
        (IDLE, replace(POOL, used_at=5000.0), 1060.0, 0.0),  # the same by a clock that is ahead
        (IDLE, replace(POOL, used_at=50.0), 1060.0, 60.0),  # the same by one that is behind
        (IDLE, POOL, 1000.0 + 7200, 540.0 + 7200),  # nobody looked for two hours
        (IDLE, POOL, 10.0, 540.0),  # the clock was set back
    ],
)
def test_idle_time_is_added_up_from_look_to_look(before, pool, now, idle_seconds):
    assert look(before, pool, USD, now).idle_seconds == idle_seconds


@pytest.mark.parametrize(
    ("pool", "idle_seconds", "over"),
    [
        (POOL, 599.0, False),
        (POOL, 600.0, True),
        (replace(POOL, trouble="it keeps 2 nodes"), 600.0, True),
        (replace(POOL, grace_seconds=180.0), 600.0, False),  # the service is about to
        (replace(POOL, grace_seconds=180.0), 780.0, True),
        (WORKING, 1e6, False),
        (EMPTY, 1e6, False),
    ],
)
def test_a_pool_is_scaled_down_after_the_limit_and_never_with_work(pool, idle_seconds, over):
    idling = replace(IDLE, idle_seconds=idle_seconds)
    assert is_over(idling, pool, LIMIT) is over


@pytest.mark.parametrize(
    ("state", "minimum", "why", "grace"),
    [
        ("Succeeded", 0, "", 180.0),  # the service is about to
        ("Succeeded", 2, "it keeps 2 nodes", 0.0),
        ("Failed", 0, "it is Failed", 0.0),
        ("Updating", 2, "it is Updating", 900.0),  # somebody changes it, or tried to
    ],
)
def test_why_nodes_of_azure_stay_and_how_long_that_is_borne(state, minimum, why, grace):
    found = why_nodes_stay(state, minimum, operation_seconds=900.0)
    assert found[0].startswith(why)
    assert bool(found[0]) == bool(why)
    assert found[1] == grace


@pytest.mark.parametrize("text", [None, "", "1763740000.5", "{}", '{"pools": {"p": {"since": 3}}}', "not json"])
def test_the_cursor_of_another_version_is_forgotten(text):
    assert read_cursor(text) == ({}, [])


LOOKS = st.lists(
    st.tuples(
        st.floats(min_value=-1e6, max_value=1e6),  # seconds to the next look, by a clock that is set at will
        st.sampled_from(["idle", "idle", "idle", "works", "was used", "no nodes"]),
    ),
    max_size=30,
)


@given(LOOKS)
def test_whatever_the_clock_does_idle_time_never_runs_ahead_of_the_looks(looks):
    now, idling, pool, since_work = 1e9, None, POOL, 0.0
    for step, state in looks:
        now += step
        if state == "was used":
            pool = replace(pool, used_at=now - 1)
        seen = {"works": replace(pool, work=("j",)), "no nodes": replace(pool, node_count=0)}.get(state, pool)
        before, idling = idling, look(idling, seen, USD, now)
        passed = max(step, 0.0)
        since_work = since_work + passed if state == "idle" and before is not None else passed
        assert 0 <= idling.idle_seconds <= since_work + 1e-3
        assert idling.wasted_usd == pytest.approx(idling.idle_seconds / 3600 * 2 * USD)
        assert not (is_over(idling, seen, LIMIT) and since_work + 1e-3 < LIMIT)
