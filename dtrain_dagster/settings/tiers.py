"""The tiers on which nodes are bought, and the name that Spot had before."""

from __future__ import annotations

from typing import Literal, get_args

Tier = Literal["dedicated", "spot"]
TIERS: tuple[Tier, ...] = get_args(Tier)
OLD_SPOT = "low_priority"
"""The name of the tier before 2026-03-31, when Azure ML retired its low-priority nodes. It stands in plans
and run directories of that time, and Azure ML's interfaces still take no other word for Spot."""
SPOT_QUOTA = 'Spot cores ("low-priority cores" in Azure ML, "Total Regional Spot vCPUs" of virtual machines)'
"""The quota of Spot nodes, under both of its names."""


def current_tier(name: str) -> str:
    """Return the name that a tier has now; a name that no tier ever had stays as it is."""
    return "spot" if name == OLD_SPOT else name


def tier_of(name: str) -> Tier:
    """Return the tier of that name, as clusters, settings and stored plans give it."""
    return next((tier for tier in TIERS if tier == current_tier(name)), "dedicated")


def tier_in_words(name: str) -> str:
    """Return the tier as people write it."""
    return "Spot" if current_tier(name) == "spot" else name.replace("_", " ")
