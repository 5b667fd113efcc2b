"""Decisions about what can be bought: sizes, tiers, retirements, quotas and prices of the whole chain. Pure, but for
the price table, which is read."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain_dagster.clusters.azure_ml.doctor.lines import DoctorLine
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.sku_chain import Quota, Size, SkuChoice, examine, quotas_of
from dtrain_dagster.costs.prices import PriceError, hardware_of, price_of, refresh_command
from dtrain_dagster.settings.tiers import SPOT_QUOTA, tier_of

COMPUTE_TYPE = "AmlCompute"
"""The kind of compute that a size has to support: clusters, not single machines."""
QUOTA_PAGE = "https://ml.azure.com/quota"


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """What a region says it has."""

    region: str
    sizes: Mapping[str, Size]
    """By name in lower case."""
    compute_types: Mapping[str, Sequence[str]]
    """Size in lower case → kinds of compute that it supports; a size that says nothing is not in it."""
    quotas: Sequence[Quota]


def judge_choice(
    choice: SkuChoice, market: Market, node_count: int, ranks: int, today: datetime.date, options: AzureMLOptions
) -> DoctorLine:
    """Return whether this kind of node can be asked for, with the cores that it needs beside those that are free."""
    where = f"--resource-group {options.resource_group} --workspace-name {options.workspace}"
    usage = f"az ml compute list-usage --location {market.region} {where} --output table"
    sizes = f"az ml compute list-sizes --location {market.region} {where} --output table"
    types = market.compute_types.get(choice.sku.casefold())
    retired = retirement_of(choice.sku)
    if retired and retired <= today:
        return DoctorLine(
            check="sizes",
            verdict="warning",
            seen=f"{choice}: retired on {retired}, whatever is still listed",
            remedy="take it out of DTRAIN_GPU_TYPE and DTRAIN_AZURE_CHAIN; the next choice is tried instead",
            command=sizes,
        )
    if types is not None and COMPUTE_TYPE not in types:
        return DoctorLine(
            check="sizes",
            verdict="warning",
            seen=f"{choice}: {market.region} offers it for {', '.join(types) or 'nothing'}, not for {COMPUTE_TYPE}",
            remedy="take it out of the chain, or choose another region",
            command=sizes,
        )
    refusal = examine(choice, market.sizes, market.quotas, node_count, 0, ranks)
    cores = cores_in_words(choice, market, node_count)
    if refusal is None:
        notice = f"; it retires on {retired}" if retired else ""
        return DoctorLine(check="sizes", verdict="ok", seen=f"{choice}: {cores}{notice}")
    by_quota = "Quota" in refusal.code
    return DoctorLine(
        check="sizes",
        verdict="warning",
        seen=f"{choice}: {cores if by_quota and cores else refusal.message} ({refusal.code})",
        remedy=f"ask for more cores ({QUOTA_PAGE}), or for fewer nodes"
        if by_quota
        else "the next choice is tried instead; take it out of the chain if this is permanent",
        command=usage if by_quota else sizes,
    )


def retirement_of(sku: str) -> datetime.date | None:
    """Return the day on which a size retires, None where none is known."""
    try:
        day = hardware_of(sku).retired_on
    except PriceError:
        return None
    return datetime.date.fromisoformat(day) if day else None


def cores_in_words(choice: SkuChoice, market: Market, node_count: int) -> str:
    """Return the cores that the nodes need, and those that are free in each quota that counts; "" for a size that is
    not listed."""
    size = market.sizes.get(choice.sku.casefold())
    if size is None:
        return ""
    free = [
        f"{quota.name} has {quota.limit - quota.used} free of {quota.limit}"
        for quota in quotas_of(choice, size, market.quotas)
        if quota.limit >= 0
    ]
    needed = f"{node_count} node(s) need {node_count * size.vcpus} cores"
    return f"{needed}; {', '.join(free) or 'no quota of its family is listed, the service decides'}"


def judge_chain(choices: Sequence[SkuChoice], lines: Sequence[DoctorLine], node_count: int) -> DoctorLine:
    """Return whether anything of the chain can be asked for. ``lines``: those of `judge_choice`, in the same order."""
    good = [choice for choice, line in zip(choices, lines, strict=True) if line.verdict == "ok"]
    if good:
        return DoctorLine(
            check="sizes",
            verdict="ok",
            seen=f"{len(good)} of {len(choices)} choices can be asked for, {good[0]} first; whether there is "
            "capacity is known only when they are bought",
        )
    return DoctorLine(
        check="sizes",
        verdict="missing",
        seen=f"none of {len(choices)} choices can be asked for, with {node_count} nodes",
        remedy=f"raise a quota ({QUOTA_PAGE}), add sizes to DTRAIN_AZURE_CHAIN or spot to DTRAIN_TIER (its quota: "
        f"{SPOT_QUOTA}), or ask for fewer nodes (DTRAIN_NODES)",
    )


def judge_price(choice: SkuChoice, region: str) -> DoctorLine:
    """Return whether the price of this kind of node is known; a plan is refused where that of one choice is not."""
    try:
        figure = price_of(choice.sku, region).figure(tier_of(choice.tier))
    except PriceError as error:
        return DoctorLine(
            check="prices",
            verdict="missing",
            seen=f"{choice}: {error}",
            remedy="ask Azure's price list, or take the size out of the chain",
            command=refresh_command(region, choice.sku),
        )
    seen = f"{choice}: {figure.usd_per_hour:.4g} US dollars per node and hour ({figure.how}, {figure.recorded_on})"
    return DoctorLine(check="prices", verdict="ok", seen=seen)
