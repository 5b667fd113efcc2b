"""SLURM's account beside the presence of nodes."""

from __future__ import annotations

from dtrain_dagster.clusters.slurm.engine import compare_accounts, read_account
from dtrain_dagster.clusters.supervision.engine import name_job
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


NAMES = {
    presence: name_job({**LAUNCH, "launch": 1}, presence.node_id, presence.incarnation)
    for presence in (node(0, 60.0), node(1, 30.0), node(1, 10.0, incarnation=2, ended=False))
}


def test_each_node_is_told_by_both_accounts():
    lines = compare_accounts(NAMES, read_account(TOLD), {}, now=140.5)
    assert [line.split() for line in lines[1:4]] == [
        ["1", "0", "1", "60.0", "s", "61", "s", "+1.0", "s", "completed"],
        ["1", "1", "1", "30.0", "s", "31", "s", "+1.0", "s", "cancelled"],
        ["1", "1", "2", "40.0", "s", "none"],  # it is still there
    ]
    assert lines[4].startswith("2 of 3 nodes in both: 90.0 s of presence, 92 s in SLURM's accounting (+2.2%)")
    assert len(lines) == 5
    assert compare_accounts(NAMES, read_account(""), {}, now=140.5) == []


def test_the_price_of_each_partition_counts_for_its_nodes():
    account = read_account(TOLD.replace("|n2|main", "|n2|gpu"))
    both = compare_accounts(NAMES, account, {"main": 60.0, "gpu": 120.0}, now=140.5)[-1]
    assert "$2.0000 by presence, $2.0500 by SLURM's accounting (2 nodes)" in both
    assert "no price" not in both
    one = compare_accounts(NAMES, account, {"main": 60.0}, now=140.5)[-1]
    assert "$1.0000 by presence, $1.0167 by SLURM's accounting (1 nodes); no price is given for gpu" in one
