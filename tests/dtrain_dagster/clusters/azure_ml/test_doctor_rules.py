"""The doctor's decisions, without anybody to ask."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml import doctor
from dtrain_dagster.clusters.azure_ml.sku_chain import Quota, Size, SkuChoice

SIZE = Size(sku="Standard_NC24ads_A100_v4", family="A100", vcpus=24, gpus=1, low_priority_capable=False)
SIZES = {SIZE.sku.casefold(): SIZE, "standard_nc6s_v3": SIZE}
QUOTAS = [Quota(name="A100", used=24, limit=96)]


@pytest.mark.parametrize(
    ("granted", "excluded", "missing"),
    [
        (["*"], [], []),
        (["microsoft.x/ws/*/READ"], [], ["Microsoft.X/ws/jobs/write"]),
        (["Microsoft.X/ws/*"], ["Microsoft.X/ws/jobs/*"], ["Microsoft.X/ws/jobs/write"]),
        ([], [], ["Microsoft.X/ws/computes/read", "Microsoft.X/ws/jobs/write"]),
    ],
)
def test_wildcards_of_roles(granted: list[str], excluded: list[str], missing: list[str]) -> None:
    needed = ["Microsoft.X/ws/computes/read", "Microsoft.X/ws/jobs/write"]
    assert doctor.missing_operations(needed, [{"actions": granted, "notActions": excluded}]) == missing


@pytest.mark.parametrize(
    ("pattern", "granted"),
    [("A/ws/*/read", True), ("A/*/read", True), ("A/ws/*", True), ("A/ws/*/write", False), ("A/w*s/r", False)],
)
def test_a_wildcard_between_slashes_may_stand_for_nothing(pattern: str, granted: bool) -> None:
    assert (doctor.missing_operations(["A/ws/read"], [{"actions": [pattern]}]) == []) is granted


def test_what_one_role_excludes_another_may_grant() -> None:
    roles: list[dict[str, Any]] = [{"actions": ["*"], "notActions": ["*/write"]}, {"actions": ["A/b/write"]}]
    assert doctor.missing_operations(["A/b/write", "A/c/write"], roles) == ["A/c/write"]


@pytest.mark.parametrize(
    ("sku", "tier", "nodes", "verdict", "seen"),
    [
        (SIZE.sku, "dedicated", 3, "ok", "need 72 cores; A100 has 72 free of 96"),
        (SIZE.sku, "dedicated", 4, "warning", "need 96 cores"),
        (SIZE.sku, "spot", 1, "warning", "not offered as Spot nodes"),
        ("Standard_NC40ads_H100_v5", "dedicated", 1, "warning", "is not among the 2 sizes"),
        ("Standard_NC6s_v3", "dedicated", 1, "warning", "retired Standard_NC6s_v3 on 2025-09-30"),
    ],
)
def test_choices(sku: str, tier: str, nodes: int, verdict: str, seen: str) -> None:
    line = doctor.judge_choice(SkuChoice(sku=sku, tier=tier), SIZES, QUOTAS, nodes, 1)
    assert line.verdict == verdict
    assert seen in line.seen
    assert bool(line.remedy) is (verdict != "ok")
