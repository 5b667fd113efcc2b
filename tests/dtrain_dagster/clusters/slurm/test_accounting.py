"""SLURM's account beside the presence of nodes."""

from __future__ import annotations

import pytest

from dtrain_dagster.clusters.slurm.accounting import (
    compare_accounts,
    describe_accounts,
    describe_price,
    names_of,
    read_account,
)
from trainer.documents.presences import NodePresence

LAUNCH = {"token": "0123456789abcdef" * 3, "launch": 2}
TOLD = """\
7|dtrain-89abcdef0123456789abcdef-l1-n0-s1|COMPLETED|100|161|61|0:0|n1|main
8|dtrain-89abcdef0123456789abcdef-l1-n1-s1|CANCELLED by 0|100|131|31|0:15|n2|main
9|somebody-else|COMPLETED|100|131|31|0:0|n2|main
not a row
"""


def node(node_id: int, seconds: float, incarnation: int = 1, ended: bool = True) -> NodePresence:
    return NodePresence(
        node_id=node_id, launch=1, incarnation=incarnation, started_at=100.5,
        ended_at=100.5 + seconds if ended else None,
    )  # fmt: skip


def test_each_node_is_told_by_both_accounts():
    names = names_of(LAUNCH, [node(0, 60.0), node(1, 30.0), node(1, 10.0, incarnation=2, ended=False)])
    found = compare_accounts(names, read_account(TOLD), now=140.5)
    assert [(one.node_id, one.incarnation, one.accounted_seconds, one.state) for one in found] == [
        (0, 1, 61.0, "COMPLETED"), (1, 1, 31.0, "CANCELLED"), (1, 2, None, ""),
    ]  # fmt: skip
    assert [one.difference for one in found] == [pytest.approx(1.0), pytest.approx(1.0), None]
    assert found[2].present_seconds == pytest.approx(40.0), "it is still there"
    lines = describe_accounts(found)
    assert lines[-1].startswith("2 of 3 nodes in both: 90.0 s of presence, 92 s in SLURM's accounting (+2.2%)")
    assert "cancelled" in lines[2]
    assert "none" in lines[3]


def test_an_empty_account_is_no_error():
    assert describe_accounts(compare_accounts({}, read_account(""), now=0.0))[-1].startswith("0 of 0 nodes")


def test_the_price_of_each_partition_counts_for_its_nodes():
    names = names_of(LAUNCH, [node(0, 60.0), node(1, 30.0), node(1, 10.0, incarnation=2, ended=False)])
    told = TOLD.replace("|n2|main", "|n2|gpu")
    found = compare_accounts(names, read_account(told), now=140.5)
    assert [one.partition for one in found] == ["main", "gpu", ""]
    both = describe_price(found, {"main": 60.0, "gpu": 120.0})
    assert "$2.0000 by presence, $2.0500 by SLURM's accounting (2 nodes)" in both
    assert "no price" not in both
    one = describe_price(found, {"main": 60.0})
    assert "$1.0000 by presence, $1.0167 by SLURM's accounting (1 nodes); no price is given for gpu" in one
