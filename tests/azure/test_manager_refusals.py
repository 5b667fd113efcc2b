"""Refusals as Azure has worded and wrapped them, and a workspace that is not ours alone: what is bought all the same,
and what is left behind. With the real clients, against the emulator."""

from __future__ import annotations

import pytest

from dtrain_dagster.clusters.base import ClusterError, JobState
from harness.azure.emulator.foreign import foreign_computes
from tests.azure.stage import A100, H100, LAST_ONE_DONE, T4, Stage, end

pytestmark = pytest.mark.slow
A10 = "Standard_NV36ads_A10_v5"
NEVER = "UnsupportedVMSizeForLowPriority"


def test_what_no_size_changes_ends_the_chain_though_it_comes_late_and_wrapped(stage: Stage) -> None:
    stage.control("fault", fault="refuse", how="async", nesting="info", code="SubnetNotFound", count=None)
    with pytest.raises(ClusterError, match=r"another size would not change \(SubnetNotFound"):
        stage.manager().provision_cluster(2, A100)
    assert not stage.computes()
    assert len({request["path"] for request in stage.asked("compute.put")}) == 1


def test_low_priority_that_a_size_does_not_have_is_a_refusal_though_the_compute_succeeded(stage: Stage) -> None:
    manager = stage.manager(tiers=("low_priority",), chain=(H100, T4))
    got = manager.provision_cluster(2, H100)
    assert (got.gpu_type, got.tier) == (T4, "spot")
    assert [(tried.sku, tried.code, tried.decision) for tried in manager.attempts] == [
        (H100, NEVER, "next"),
        (T4, "Succeeded", "created"),
    ]
    assert "not allowed for LowPriority" in manager.attempts[0].message
    assert list(stage.computes()) == [f"{stage.name}-nc4ast4v3-lp"], "the one that will never have a node is gone"


def test_a_job_whose_compute_never_gets_nodes_goes_on_elsewhere(stage: Stage) -> None:
    """The compute does not show it, so its job fails, with a sentence that says nothing."""
    stage.control("timing", refusal_seconds=1e6)
    try:
        manager = stage.manager(tiers=("low_priority",), chain=(H100, T4))
        assert manager.provision_cluster(2, H100).gpu_type == H100
        spec = stage.spec(manager, LAST_ONE_DONE)
        manager.submit_job(spec)
        stage.control("clock", advance_seconds=10)
        assert end(manager, spec).state is JobState.SUCCEEDED
    finally:
        stage.control("timing", refusal_seconds=0)
    history = manager._record(spec.job_id)
    assert history is not None
    assert [(launch["sku"], launch["tier"]) for launch in history["history"]] == [(H100, "spot")]
    assert history["history"][0]["reason"].endswith("cluster has encountered unknown issue")
    assert (history["sku"], history["tier"]) == (T4, "spot")


def test_computes_of_others_of_every_kind_neither_hinder_nor_are_touched(stage: Stage) -> None:
    manager = stage.manager()
    config = manager.provision_cluster(2, A100)
    assert manager.scale_cluster(3), "its change is answered as a creation"
    assert list(manager.provisioner.computes()) == list(stage.computes())
    [pool] = manager.pools()
    assert (pool.sku, pool.trouble) == (config.gpu_type, ""), "spelled as we spell it, not in the service's capitals"
    assert manager.monitor_health().healthy
    stage.manager().cleanup_cluster()
    touched = [request for request in stage.control("requests", operation="compute.*") if request["method"] != "GET"]
    assert not [one for one in touched if one["path"].rpartition("/")[2] in foreign_computes()]


def test_a_compute_of_somebody_else_with_our_name_is_not_changed(stage: Stage) -> None:
    from azure.ai.ml.entities import AmlCompute

    manager = stage.manager(chain=(A100, H100))
    theirs = AmlCompute(name=f"{stage.name}-nc24adsa100v4", size=A100, max_instances=1)
    manager.service.ml.compute.begin_create_or_update(theirs).result()
    assert manager.provision_cluster(2, A100).gpu_type == H100
    assert [tried.code for tried in manager.attempts] == ["NameTaken", "Succeeded"]
    assert manager.service.ml.compute.get(theirs.name).max_instances == 1
    manager.service.ml.compute.begin_delete(theirs.name).wait()


def test_what_was_begun_and_refused_is_deleted_though_a_404_hid_it(stage: Stage) -> None:
    """The service keeps a compute that it could not make, and may say for a while that there is none."""
    stage.control("fault", fault="refuse", vm_size=A100, how="async", code="NoRoom")
    stage.control("fault", fault="hide", resource="compute", by="both", since="put", seconds=2)
    assert stage.manager(chain=(A100, H100), start_seconds=20.0).provision_cluster(2, A100).gpu_type == H100
    assert len(stage.computes()) == 1
