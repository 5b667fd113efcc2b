"""Runs that wait for capacity: the decision, the queue in storage, and the sensor over a real Dagster instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.automation.capacity_queue import (
    ATTEMPT_TAG,
    TICKET_TAG,
    Ticket,
    WaitingList,
    decide_turns,
    new_ticket,
    pause_seconds,
    refused_again,
)
from dtrain_dagster.automation.retraining import CAUSE_TAG, run_config
from dtrain_dagster.clusters.base import ClusterConfig, NoCapacityError
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.queue import build_queue_sensor
from dtrain_dagster.settings.environment import Settings
from tests.webhook import web_hook
from trainer.rundir import STATUS, RunDir

NONE: frozenset[Any] = frozenset()


def ticket(number: int, **fields: Any) -> Ticket:
    made = new_ticket(f"run{number}aaaaaaa", ["trained_checkpoint"], {}, "no quota", 1000.0 + number, 3600)
    return replace(made, **fields)


def test_the_oldest_is_tried_first_and_only_when_it_is_due() -> None:
    first, second = ticket(1), ticket(2, retry_at=0)
    assert decide_turns([first, second], NONE, NONE, now=1001.0).start is None, "nobody overtakes"
    assert decide_turns([first, second], NONE, NONE, now=first.retry_at).start == first
    busy = decide_turns([first, second], frozenset({second.ticket}), NONE, now=first.retry_at)
    assert busy.start is None, "two at a time would ask for the same nodes"


def test_who_waits_too_long_is_given_up_unless_it_is_being_tried() -> None:
    late = ticket(1)
    assert decide_turns([late], NONE, NONE, late.deadline_at).expired == (late,)
    assert decide_turns([late], frozenset({late.ticket}), NONE, late.deadline_at).expired == ()
    assert decide_turns([late], NONE, NONE, late.deadline_at).start is None


def test_a_run_that_ends_for_another_reason_does_not_wait_any_more() -> None:
    item = ticket(1)
    ended = decide_turns([item], NONE, frozenset({(item.ticket, item.attempt)}), item.retry_at)
    assert ended.ended == (item,)
    assert ended.start is None
    before = decide_turns([item], NONE, frozenset({(item.ticket, item.attempt - 1)}), item.retry_at)
    assert before.start == item, "the run before was refused, and said so"


def test_pauses_grow_to_an_hour_and_respect_when_the_cloud_says_to_come_back() -> None:
    assert [pause_seconds(n) for n in (1, 2, 3, 4, 5, 9)] == [300, 600, 1200, 2400, 3600, 3600]
    asked = new_ticket("0123456789", [], {}, "no quota", now=1000.0, deadline_seconds=60, not_before=9000.0)
    assert asked.retry_at == 9000.0
    assert refused_again(asked, "x", "no quota", now=9000.0, not_before=0.0).retry_at == 9600.0


def test_who_has_waited_in_the_clouds_own_queue_stands_where_it_began_to_wait() -> None:
    waited = new_ticket("late", [], {}, "no nodes came", now=9000.0, deadline_seconds=7200, since=5000.0)
    other = new_ticket("early", [], {}, "no quota", now=6000.0, deadline_seconds=7200)
    assert waited.ticket < other.ticket
    assert (waited.queued_at, waited.deadline_at, waited.retry_at) == (5000.0, 12200.0, 9300.0)


def test_the_queue_keeps_its_order_and_a_refusal_keeps_the_place(tmp_path: Path) -> None:
    queue = WaitingList(str(tmp_path))
    assert queue.put(ticket(1)) == 1
    assert queue.put(ticket(2)) == 2
    again = refused_again(queue.tickets()[0], "other", "still no quota", 2000.0)
    assert queue.put(again) == 1
    assert [item.run_id for item in WaitingList(str(tmp_path)).tickets()] == ["other", "run2aaaaaaa"]
    assert again.attempt == 3
    assert again.retry_at == 2600.0
    queue.remove(again.ticket)
    assert queue.find(again.ticket) is None
    assert len(queue.tickets()) == 1


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@cache
def repository() -> dg.RepositoryDefinition:
    return build_defs(Settings()).get_repository_def()


def tick(settings: Settings, instance: dg.DagsterInstance) -> Any:
    sensor, resources = build_queue_sensor(settings), build_resources(settings)
    del resources["io_manager"]
    with dg.build_sensor_context(instance, repository_def=repository(), resources=resources) as made:
        return sensor.evaluate_tick(made)


def run_that_fails(instance: dg.DagsterInstance, item: Ticket, **tags: str) -> None:
    @dg.op
    def fails() -> None:
        raise RuntimeError("the disk is full")

    @dg.job(tags={TICKET_TAG: item.ticket, ATTEMPT_TAG: str(item.attempt), **tags})
    def training() -> None:
        fails()

    training.execute_in_process(instance=instance, raise_on_error=False)


def test_the_sensor_starts_what_is_due_with_its_configuration(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    settings = Settings(home=tmp_path)
    assert "no run waits" in tick(settings, instance).skip_message
    item = new_ticket("0123456789", ["cost_estimate"], {"ops": {}}, "no quota", now=1e9, deadline_seconds=1e10)
    queue = WaitingList(settings.shared_uri)
    queue.put(item)
    result = tick(settings, instance)
    [request] = result.run_requests
    assert request.asset_selection == [dg.AssetKey("cost_estimate")]
    assert request.run_config == {"ops": {}}
    assert request.tags[TICKET_TAG] == item.ticket
    assert request.run_key == tick(settings, instance).run_requests[0].run_key, "the daemon starts a key only once"
    assert queue.tickets() == [item], "the run gives it back once it has a cluster"

    run_that_fails(instance, item)
    assert not tick(settings, instance).run_requests
    assert not queue.tickets()


def test_a_deadline_that_passes_is_told(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    with web_hook() as (url, heard):
        settings = Settings(home=tmp_path, notify=url)
        queue = WaitingList(settings.shared_uri)
        queue.put(new_ticket("0123456789", [], {}, "no quota", now=1e9, deadline_seconds=60))
        assert not tick(settings, instance).run_requests
    assert not queue.tickets()
    assert [item["title"] for item in heard] == ["dtrain: a run no longer waits for capacity"]


@pytest.mark.parametrize(
    ("status", "stays"),
    [
        ({"state": "queued", "message": "has been waiting for nodes for 600 s"}, True),
        ({"state": "cancelled", "message": "no nodes", "starved": {"since": 1e9, "retry_at": 1e9}}, True),
        ({"state": "running"}, False),
        ({"state": "failed"}, False),
    ],
)
def test_a_run_that_dies_while_its_job_waits_for_nodes_keeps_its_place(
    status: dict[str, Any], stays: bool, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """As after a restart of the orchestrator, which marks what it finds dead as failed."""
    settings = Settings(home=tmp_path)
    queue = WaitingList(settings.shared_uri)
    item = new_ticket("0123456789", ["cost_estimate"], {}, "no quota", now=1e9, deadline_seconds=1e10)
    queue.put(item)
    queue.put(new_ticket("9876543210", ["cost_estimate"], {}, "no quota", now=1e9 + 1, deadline_seconds=1e10))
    project = build_resources(settings)["project"]
    RunDir(f"{project.jobs_uri}/train-x").write_json(STATUS, status)
    run_that_fails(instance, item, **{JOB_TAG: "train-x"})

    said = tick(settings, instance)
    assert len(queue.tickets()) == 1 + stays
    if stays:
        [kept, _] = queue.tickets()
        assert (kept.ticket, kept.attempt) == (item.ticket, item.attempt + 1), "at its place, and with a try more"
        assert str(status["message"]) in kept.reason
        assert not said.run_requests, "whoever is behind it does not overtake"
        assert "1. run " in said.skip_message


def test_a_run_that_has_succeeded_without_asking_for_nodes_just_leaves(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path)
    queue = WaitingList(settings.shared_uri)
    item = new_ticket("0123456789", ["cost_estimate"], {}, "no quota", now=1e9, deadline_seconds=1e10)
    queue.put(item)

    @dg.job(tags={TICKET_TAG: item.ticket, ATTEMPT_TAG: str(item.attempt)})
    def training() -> None: ...

    training.execute_in_process(instance=instance)
    with web_hook() as (url, heard):
        monkeypatch.setenv("DTRAIN_NOTIFY", url)
        tick(settings, instance)
    assert not queue.tickets()
    assert not heard


def test_each_cluster_has_a_queue_of_its_own(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """What is not to be had on one keeps nobody waiting for another, and the sensor of one starts no run of another."""
    here, there = Settings(home=tmp_path), Settings(home=tmp_path, cluster_name="there")
    full, late = (
        new_ticket(
            run, ["cost_estimate"], {}, "no quota", 1e9 + at, 1e10, cluster=cluster.cluster_key, not_before=retry_at
        )
        for run, at, cluster, retry_at in (("0123456789", 0, there, 2e10), ("9876543210", 1, here, 0.0))
    )
    everywhere = WaitingList(here.shared_uri)
    everywhere.put(full)
    assert WaitingList(here.shared_uri, here.cluster_key).put(late) == 1, "the first in its own queue"
    [request] = tick(here, instance).run_requests
    assert request.tags[TICKET_TAG] == late.ticket
    assert not tick(there, instance).run_requests
    assert len(everywhere.tickets()) == 2


def test_a_run_of_another_code_location_is_left_to_its_sensor(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    settings = Settings(home=tmp_path)
    queue = WaitingList(settings.shared_uri)
    queue.put(new_ticket("0123456789", ["theirs/trained_checkpoint"], {}, "no quota", 1e9, 60.0))
    assert "no run waits" in tick(settings, instance).skip_message
    assert len(queue.tickets()) == 1


class SoldOut(LocalClusterManager):
    """A cluster whose cloud has no nodes."""

    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        raise NoCapacityError(f"no {gpu_type}", (), 0.0)


def test_a_whole_job_that_waits_comes_back_as_that_job_for_the_same_cause(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """`train` is the graph but the studies, within a budget: nothing else may come out of the queue."""
    settings = Settings(home=tmp_path)
    resources = build_resources(settings)
    manager = SoldOut(home=tmp_path)

    @dg.asset(config_schema={"budget_usd": float})
    def cost_estimate(context) -> None:
        ClusterRun(context, resources["cluster"], resources["project"], manager).provision("A", 1)

    @dg.asset(deps=[cost_estimate])
    def trained_checkpoint() -> None: ...

    @dg.asset(deps=[trained_checkpoint], group_name="studies")
    def study() -> None: ...

    whole = dg.AssetSelection.all() - dg.AssetSelection.groups("studies")
    defs = dg.Definitions([cost_estimate, trained_checkpoint, study], jobs=[dg.define_asset_job("job", whole)])
    config = run_config(2.5)

    def refused(job: str, **more: Any) -> None:
        run = defs.resolve_job_def(job).execute_in_process(
            instance=instance, raise_on_error=False, run_config=config, **more
        )
        assert not run.success

    refused("job", tags={CAUSE_TAG: "data-1", "dagster/priority": "3"})
    queue, names = WaitingList(settings.shared_uri), ["cost_estimate", "trained_checkpoint"]
    for attempt in (2, 3):
        [item] = queue.tickets()
        queue.put(replace(item, retry_at=0.0))
        [request] = tick(settings, instance).run_requests
        assert sorted(key.to_user_string() for key in request.asset_selection) == names
        assert request.run_config == config
        assert (request.tags[CAUSE_TAG], request.tags[ATTEMPT_TAG]) == ("data-1", str(attempt))
        assert "dagster/priority" not in request.tags
        refused("__ASSET_JOB", asset_selection=request.asset_selection, tags=request.tags)
