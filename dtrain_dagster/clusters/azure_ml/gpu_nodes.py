"""What a GPU size of Azure needs of its job, which sizes cannot train here, and which are tried where none are set.

The numbers of GPUs, and which sizes have InfiniBand or are retired, are in the price table (`costs.prices`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date

from dtrain_dagster.clusters.azure_ml.sku_chain import DEFAULT_CHAIN, DEFAULT_CHAINS
from dtrain_dagster.costs.prices import PriceError, hardware_of, price_of
from dtrain_dagster.settings.environment import BUYABLE_GPU_TYPE
from dtrain_dagster.settings.tiers import tier_of

INTERFACES = "eth"
"""Prefix of the interfaces over which nodes of Azure reach each other; without it NCCL would prefer ``ib0``, which need
not have an address in a container."""
_SHARED = re.compile(r"(?i)standard_nv(6|12|18)ads_a10_v5|.*mig.*|standard_nv\d+as_v4|standard_nv(4|8|12)ads_v710_v5")
"""Sizes with a part of a GPU: vGPUs of an A10, MIG instances."""


def default_chain(ranks: int, tiers: Sequence[str]) -> tuple[str, ...]:
    """Return the sizes to try where none are set: those with a GPU for each rank of a node that have a known price in
    the region (``DTRAIN_REGION``) on each of these tiers. What has no price is not bought."""
    return tuple(
        sku for sku in DEFAULT_CHAINS.get(ranks, DEFAULT_CHAIN) if all(_has_price(sku, tier) for tier in tiers)
    )


def _has_price(sku: str, tier: str) -> bool:
    try:
        price_of(sku).figure(tier_of(tier))
    except PriceError:
        return False
    return True


def node_environment_of(sku: str) -> dict[str, str]:
    """Return the variables that NCCL needs on nodes of this size: over InfiniBand where it has it, else over Ethernet
    without a search for it. Nothing for one that the price table does not know: NCCL finds its own way there."""
    try:
        return {"NCCL_IB_DISABLE": "0" if hardware_of(sku).infiniband else "1", "NCCL_SOCKET_IFNAME": INTERFACES}
    except PriceError:
        return {}


def spell_sku(name: str) -> str:
    """Return a size as the price table spells it: the service answers ``STANDARD_NC6S_V3``. Unknown ones stay as they
    are."""
    try:
        return hardware_of(name).sku
    except PriceError:
        return name


def explain_shared_gpu(sku: str, ranks: int) -> str:
    """Return why this size cannot train with that many ranks, "" if it can: NCCL sums between whole GPUs only."""
    if ranks < 2 or not _SHARED.fullmatch(sku):
        return ""
    return (
        f"{sku} has a part of a GPU (a vGPU or a MIG instance), which NCCL cannot connect, but {ranks} ranks are to "
        "train together: take a size with whole GPUs"
    )


def explain_retired(sku: str, today: date) -> str:
    """Return a sentence on a size that Azure has retired, with one to take instead; "" for any other."""
    try:
        retired_on = hardware_of(sku).retired_on
    except PriceError:
        return ""
    if retired_on is None or date.fromisoformat(retired_on) > today:
        return ""
    return (
        f"Azure retired {sku} on {retired_on}, so it can hardly be bought, even where it is listed: set "
        f"DTRAIN_GPU_TYPE={BUYABLE_GPU_TYPE}, or another of `dtrain cost`"
    )
