"""The file of a fleet: what is wrong with one is said with the field and the job, before anything else happens."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits
from dtrain_dagster.fleet.source import parse_fleet

GOOD: dict[str, Any] = {
    "name": "seeds",
    "budget_usd": 5,
    "defaults": {"dataset": "latest", "expected_node_minutes": 10, "set": {"training.epochs": 2}},
    "jobs": [{"name": "a", "priority": 2}, {"name": "b", "config": "b.json", "set": {"training.seed": 1}}],
}


def test_defaults_fill_what_a_job_does_not_say_itself():
    fleet = parse_fleet(yaml.safe_dump(GOOD), "f.yaml")
    first, second = fleet.jobs
    assert (first.dataset, first.config, first.priority) == ("latest", None, 2)
    assert (second.dataset, second.config) == (None, "b.json"), "its own data takes the place of the others'"
    assert second.set == {"training.epochs": 2, "training.seed": 1}
    assert parse_fleet('{"name": "x", "budget_usd": 1, "jobs": [{"name": "a", "script": "s.py"}]}', "f.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget_usd": 0}, "f.yaml: budget_usd = 0: it should be greater than 0"),
        ({"slice_seconds": 60}, "f.yaml: slice_seconds is no longer a setting"),
        ({"budget": 3}, "f.yaml: budget is not a setting: did you mean budget_usd?"),
        ({"jobs": []}, "f.yaml: jobs = []: it should have at least 1 item"),
        ({"jobs": [{"name": "a"}, {"name": "a"}]}, "jobs.1.name: 'a' is the name of jobs.0 already"),
        ({"jobs": [{"name": "a", "least_nodes": 3}]}, "jobs.0.least_nodes is not a setting"),
        ({"jobs": [{"name": "a b"}]}, "jobs.0.name = 'a b': it should match pattern"),
        ({"jobs": [{"name": "a", "dataset": "d", "config": "c"}]}, "jobs.0: it has dataset and config"),
        (
            {"jobs": [{"name": "a", "expected_node_minutes": 0}]},
            "jobs.0.expected_node_minutes = 0: it should be greater than 0 (job 'a')",
        ),
        ({"jobs": [{"name": "a"}], "defaults": {}}, "jobs.0: it has no data: give dataset, config or script (job 'a')"),
        ({"defaults": {"name": "x"}}, "defaults.name: each job has a name of its own"),
    ],
)
def test_an_error_names_the_field_and_the_job(change: dict[str, Any], said: str):
    with pytest.raises(FleetError) as error:
        parse_fleet(yaml.safe_dump(GOOD | change), "f.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "hello"])
def test_what_is_no_fleet_is_refused(text: str):
    with pytest.raises(FleetError, match=r"f\.yaml"):
        parse_fleet(text, "f.yaml")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"job_id": "a/b"}, "job_id has letters"),
        ({"nodes": 0}, "nodes is 0"),
        ({"node_seconds": float("inf")}, "node_seconds is inf"),
    ],
)
def test_a_job_that_cannot_be_is_refused(fields: dict[str, Any], said: str):
    with pytest.raises(FleetError, match=said):
        FleetJob(**{"job_id": "a", "node_seconds": 1.0, **fields})


def test_limits_of_nothing_are_refused():
    with pytest.raises(FleetError, match="nodes is 0"):
        FleetLimits(budget_usd=1.0, nodes=0, usd_per_node_hour=1.0)
