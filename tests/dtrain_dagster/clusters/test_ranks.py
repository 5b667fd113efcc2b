"""How many ranks a node has, and which GPUs of this machine they get."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.ranks import explain_idle_gpus, have_gpus, hosts_of, ranks_per_node
from dtrain_dagster.costs.prices import PriceError, price_of
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.cluster_kinds import KINDS
from dtrain_dagster.settings.environment import Settings
from trainer.node import gpus as local_gpus
from trainer.node.environment import Seat, merge_environment, rank_environment
from trainer.node.gpus import VISIBLE, explain_local_gpus, share_gpus, visible_gpus

FOUR, EIGHT = "Standard_NC24s_v3", "Standard_ND40rs_v2"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As many GPUs as a test says: no machine of the tests has any."""

    def have(count: int) -> None:
        monkeypatch.delenv(VISIBLE, raising=False)
        monkeypatch.setattr(local_gpus, "_gpu_count", lambda: count)

    return have


def test_a_node_of_azure_has_a_rank_for_each_gpu_of_its_sku():
    assert [ranks_per_node(None, KINDS["azure_ml"], sku, 3) for sku in ("Standard_NC6s_v3", FOUR, EIGHT)] == [1, 4, 8]
    assert ranks_per_node(2, KINDS["azure_ml"], FOUR, 3) == 2, "what is stated wins"
    with pytest.raises(PriceError, match="Standard_Nothing"):
        ranks_per_node(None, KINDS["azure_ml"], "Standard_Nothing", 3)


def test_local_nodes_divide_the_gpus_of_the_machine(gpus: Any):
    for here, nodes, wanted in ((0, 3, 1), (1, 3, 1), (8, 1, 8), (8, 2, 4), (8, 3, 2)):
        gpus(here)
        assert ranks_per_node(None, KINDS["local"], FOUR, nodes) == wanted, (here, nodes)


def test_the_resource_follows_the_sku_that_the_launchpad_names(tmp_path):
    cluster = build_resources(Settings(home=tmp_path, nodes=1))["cluster"]
    assert cluster.processes_per_node is None
    assert cluster.model_copy(update={"kind": "azure_ml", "gpu_type": FOUR}).ranks_per_node == 4
    assert cluster.manager().processes_per_node == cluster.ranks_per_node


def test_no_two_ranks_of_this_machine_get_the_same_gpu(gpus: Any):
    gpus(8)
    launch = {"node_count": 3, "processes_per_node": 2, "threads_per_rank": None, "env": {}, "elastic": True,
              "launch": 1, "token": "t"}  # fmt: skip
    found = [
        merge_environment({}, launch, Seat(node_id=node), rank_environment(launch, Seat(node_id=node), rank))[VISIBLE]
        for node in range(3)
        for rank in range(2)
    ]
    assert found == ["0,1", "0,1", "2,3", "2,3", "4,5", "4,5"], "a node's ranks choose by LOCAL_RANK among its own"
    own = launch | {"env": {VISIBLE: "7"}}
    assert merge_environment({}, own, Seat(node_id=0), rank_environment(own, Seat(node_id=0), 0))[VISIBLE] == "7"
    assert visible_gpus({VISIBLE: "5, 6"}) == ("5", "6")
    assert share_gpus(("5", "6"), 1, 2, 1) == ("6",)
    assert share_gpus(("0",), 0, 3, 1) == (), "one GPU for three nodes: none has it alone"
    gpus(1)
    alone = Seat(node_id=0, is_alone=True)
    assert merge_environment({}, launch, Seat(node_id=0), rank_environment(launch, Seat(node_id=0), 0))[VISIBLE] == ""
    assert VISIBLE not in merge_environment({}, launch, alone, rank_environment(launch, alone, 0)), "ranks refuse it"
    gpus(0)
    assert VISIBLE not in merge_environment({}, launch, Seat(node_id=0), rank_environment(launch, Seat(node_id=0), 0))


def test_gpus_that_are_paid_and_idle_are_told_with_their_dollars():
    assert explain_idle_gpus(price_of(FOUR), 4, 2, 8.0, is_local=False) is None
    said = str(explain_idle_gpus(price_of(FOUR), 1, 2, 8.0, is_local=False))
    assert "$6.00 of $8.00 pay for 6 idle GPU(s)" in said
    assert "unset DTRAIN_PROCESSES_PER_NODE" in said
    assert "stand in" in str(explain_idle_gpus(price_of(FOUR), 1, 2, 8.0, is_local=True))
    assert explain_local_gpus(0, 3, 1) is explain_local_gpus(6, 3, 2) is None
    assert "2 of this machine's 8 GPUs have no rank" in str(explain_local_gpus(8, 3, 2))
    assert "all train on the CPU" in str(explain_local_gpus(1, 3, 1))


def test_on_how_many_machines_nodes_are_and_whether_they_have_gpus():
    assert [hosts_of(KINDS[name], 4) for name in ("local", "azure_ml", "slurm")] == [1, 4, 4]
    assert have_gpus(KINDS["azure_ml"], "Standard_NC24ads_A100_v4")
    assert not have_gpus(KINDS["slurm"], "Standard_NC24ads_A100_v4", 0), "its SKU only stands in for a price"
    assert have_gpus(KINDS["slurm"], "Standard_NC24ads_A100_v4", 2)
    assert not have_gpus(KINDS["local"], "Standard_NC24ads_A100_v4")
