"""The usages of a region, as recorded (Azure/azure-powershell, Get-AzMLServiceUsage.Recording.json at 689c9cc2): the
totals, and each family twice under one name, with its dedicated and its low-priority cores; only the type differs."""

from __future__ import annotations

from typing import Any

from harness.azure.emulator.state import LOCATION, SUBSCRIPTION, Cloud, quota_of, total_quota_of, used_cores

PROVIDER = "Microsoft.MachineLearningServices"
WITHOUT_QUOTA = "standardNDv5H100FlexFamily"
"""A family of which the service tells nothing: all that may be null is."""


def usage_rows(cloud: Cloud) -> list[dict[str, Any]]:
    families = sorted({size.family for size in cloud.sizes.values()})
    low_used, low_limit = used_cores(cloud, "", "low_priority"), total_quota_of(cloud, "low_priority")
    used = sum(used_cores(cloud, family, "dedicated") for family in families)
    rows = [
        _total("TotalClusters", "Total Clusters", "totalClusters", len(cloud.computes), 200),
        _total(
            "TotalDedicatedCores", "Total Cluster Dedicated Regional vCPUs", "totalDedicatedCores", used,
            total_quota_of(cloud, "dedicated"),
        ),
    ]  # fmt: skip
    rows += [
        _family(family, "Dedicated", used_cores(cloud, family, "dedicated"), quota_of(cloud, family, "dedicated"))
        for family in families
    ]
    rows.append({**_family(WITHOUT_QUOTA, "Dedicated", None, None), "unit": None})
    rows.append({"unit": "Count", "currentValue": None, "limit": None, "name": None, "type": None, "id": None})
    rows.append(
        _total(
            "TotalLowPriorityCores", "Total Cluster Low Priority Regional vCPUs", "totalLowPriorityCores", low_used,
            low_limit,
        )
    )  # fmt: skip
    # -1: none is set, and the total decides.
    rows += [_family(family, "LowPriority", 0, cloud.quota.get(f"low_priority:{family}", -1)) for family in families]
    return rows


def _total(name: str, words: str, kind: str, used: int, limit: int) -> dict[str, Any]:
    return {
        "unit": "Count",
        "currentValue": used,
        "limit": limit,
        "name": {"value": name, "localizedValue": words},
        "type": f"{PROVIDER}/{kind}/usages",
        "amlWorkspaceLocation": LOCATION,
        "id": f"/subscriptions/{SUBSCRIPTION}",
    }


def _family(family: str, tier: str, used: int | None, limit: int | None) -> dict[str, Any]:
    kind = "dedicatedCores" if tier == "Dedicated" else "lowPriorityCores"
    words = family.removesuffix("Family").strip()
    return {
        "unit": "Count",
        "currentValue": used,
        "limit": limit,
        "name": {
            "value": family,
            "localizedValue": f"{words} Family Cluster {tier} vCPUs" if limit is not None else None,
        },
        "type": f"{PROVIDER}/vmFamily/{kind}/usages",
        "id": f"/subscriptions/{SUBSCRIPTION}/usages/{family.replace(' ', '_')}",
    }
