"""Where a launch of a job runs, as its ``launch.json`` has it, and the words for a job that goes on elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain_dagster.settings.tiers import current_tier, tier_in_words

BEFORE = "before"
"""The field of ``launch.json`` with the place of the launch before it."""
_PLACE = ("engine", "cluster_name", "sku", "tier", "node_count")


def place_of(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a launch that say where it runs."""
    place = {name: launch[name] for name in _PLACE if launch.get(name) is not None}
    return place | ({"tier": current_tier(place["tier"])} if "tier" in place else {})


def describe_move(launch: Mapping[str, Any]) -> str:
    """Return what of a launch's place is another than before, such as ``on 2 x Standard_NC6s_v3 (Spot), before
    on 3 x Standard_NC6s_v3 (dedicated)``; "" where nothing is, or where it is not known."""
    history = launch.get("history") or []
    before = place_of(launch.get(BEFORE) or (history[-1] if history else {}))
    now = place_of(launch)
    changed = {name for name in before if name in now and before[name] != now[name]}
    if not changed:
        return ""
    named = bool(changed & {"engine", "cluster_name"})
    return f"on {_in_words(now, named)}, before on {_in_words(before, named)}"


def _in_words(place: Mapping[str, Any], named: bool) -> str:
    words = f"{place.get('node_count', '?')} x {place.get('sku', 'nodes')}"
    if "tier" in place:
        words += f" ({tier_in_words(str(place['tier']))})"
    return f"{words} of {place.get('engine', 'cluster')} {place.get('cluster_name', '')}".strip() if named else words
