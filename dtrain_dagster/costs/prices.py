"""The price of a node-hour, by SKU, region and tier. No figure without its source and its date.

Two tables are read: the one in the package, and `prices.json` under ``DTRAIN_HOME``, which ``dtrain cost --refresh``
writes (`dtrain_dagster.costs.retail`). Of two figures for the same thing the newer one counts. Both have one layout:
``sources`` (key → how, recorded_on, source) and ``prices`` (region → SKU → tier → [US dollars per hour, source]).
The hardware of a SKU stands in the package's table alone.

A site that charges for node-hours has a table of its own (``prices`` in ``DTRAIN_SLURM_OPTIONS``). ``SKU@PARTITION``
names nodes of one of its partitions: they cost what the site says, and count as that SKU in all else.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from dtrain_dagster.settings.cluster_kinds import TIERS, Tier, tier_of
from dtrain_dagster.settings.environment import SettingsError, setting
from dtrain_dagster.settings.slurm import read_partition_prices, site_prices_path

STAND_IN, LISTED = "stand-in price, nothing was billed", "list price, not the bill"
"""Meaning of a figure's dollars, in words: for nodes that are priced as a SKU, and for nodes that are bought."""
OF_SITE = "the site's price per node-hour, not its bill"
"""The same for nodes of a partition that a site has priced."""
_AT = "@"
"""Between a SKU and the partition whose price counts."""
REFRESHED = "prices.json"
REFERENCE_SKU = "Standard_NC6s_v3"
"""The node whose training speed is 1."""
_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")


class PriceError(ValueError):
    """Something cannot be priced. The message names the SKU, the tier and the region, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One price: US dollars per node and hour."""

    usd_per_hour: float
    recorded_on: str
    """Day of the price, or month where the day is not known (the earliest possible one)."""
    how: str
    """recorded (the service's own answer), read (somebody's list), asked (refreshed)."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SkuPrice:
    """One SKU in one region."""

    sku: str
    gpu: str
    gpus: int
    gpu_memory_gib: int
    vcpus: int
    memory_gib: int
    infiniband: bool
    low_priority_capable: bool
    """Whether Azure ML gives Spot nodes of it (``lowPriorityCapable``)."""
    retired_on: str | None
    speed: float
    """Training speed of one node relative to one `REFERENCE_SKU`, in fp32: a rough guess."""
    region: str
    figures: Mapping[Tier, Figure]
    """Prices of the tiers that have a known one."""

    def figure(self, tier: Tier) -> Figure:
        """Return the price on that tier. Raise `PriceError` where it is not offered, or not known."""
        tier = tier_of(tier)  # plans of before 2026-03-31 have the old name
        if tier == "spot" and not self.low_priority_capable:
            raise PriceError(
                f"{self.sku} is not offered as Spot nodes of Azure ML in {self.region}: use tier dedicated"
            )
        if tier in self.figures:
            return self.figures[tier]
        known, bound = ", ".join(self.figures), ""
        if tier == "spot" and "dedicated" in self.figures:
            bound = f"; it is at most the pay-as-you-go price of ${self.figures['dedicated'].usd_per_hour:g}"
        raise PriceError(
            f"no {tier} price of {self.sku} in {self.region} is known, or it is not offered there{bound}: use tier "
            f"{known}, or ask Azure with `{refresh_command(self.region, self.sku)}`"
        )

    def usd_per_hour(self, tier: Tier) -> float:
        return self.figure(tier).usd_per_hour

    def range_of(self, tier: Tier) -> tuple[float, float]:
        """Return the lowest and the highest price to expect; that of Spot does not rise above the pay-as-you-go
        price."""
        figure = self.figure(tier)
        most = self.figures.get("dedicated", figure) if tier_of(tier) == "spot" else figure
        return figure.usd_per_hour, max(figure.usd_per_hour, most.usd_per_hour)

    def tell_spot(self, tier: Tier) -> str:
        """Return what the figures of Spot nodes leave open; "" on dedicated nodes, and where the price is a site's."""
        if tier_of(tier) == "dedicated" or is_of_site(self.sku):
            return ""
        low, high = self.range_of(tier)
        reach = "the pay-as-you-go price is not known, so one price is used"
        if "dedicated" in self.figures:
            reach = f"the interval reaches from ${low:g} to the pay-as-you-go price of ${high:g} an hour"
        return (
            f"Spot's price varies: {reach}; nodes may be evicted at any time, and the start-ups of their replacements "
            "are not in these figures"
        )


Prices = dict[tuple[str, str, Tier], Figure]


def price_of(sku: str, region: str | None = None) -> SkuPrice:
    """Return the price of a SKU, in any case of letters (region None: ``DTRAIN_REGION``). Raise `PriceError`."""
    if _AT in sku:
        return _price_of_site(hardware_of(sku), sku.partition(_AT)[2])
    region = region_of(region)
    regions = _tables()
    found = _by_any_case(regions.get(region, {}), sku)
    if found is not None:
        return found
    elsewhere = [name for name, rows in regions.items() if _by_any_case(rows, sku)]
    if elsewhere:
        raise PriceError(
            f"no price of {sku} is known in region {region!r}, only in {', '.join(elsewhere)}: ask Azure with "
            f"`{refresh_command(region, sku)}`, or set DTRAIN_REGION to the region of the nodes"
        )
    raise PriceError(
        f"no price is known for SKU {sku!r} in {region}. Use one of these (DTRAIN_GPU_TYPE, chain in "
        f"DTRAIN_AZURE_OPTIONS): {', '.join(skus())}"
    )


def price_table(region: str | None = None) -> Mapping[str, SkuPrice]:
    """Return SKU → price of a region (None: ``DTRAIN_REGION``). Raise `PriceError` where none is known."""
    region = region_of(region)
    regions = _tables()
    if region not in regions:
        raise PriceError(
            f"no prices are known in region {region!r}, only in {', '.join(regions)}: ask Azure with "
            f"`{refresh_command(region)}`, or set DTRAIN_REGION to one of these"
        )
    return regions[region]


def hardware_of(sku: str) -> SkuPrice:
    """Return a SKU of any region, for facts that do not depend on it. Raise `PriceError` for an unknown SKU."""
    name, at, partition = sku.partition(_AT)
    rows = (_by_any_case(rows, name) for rows in _tables().values())
    found = next((row for row in rows if row), None) or price_of(name)
    return replace(found, sku=f"{found.sku}{at}{partition}") if at else found


def name_at_site(sku: str, partition: str | None) -> str:
    """Return the SKU as nodes of a partition, where the site has a table of prices; else, or without a partition, as it
    is. Raise `PriceError` where that table lacks the partition."""
    if partition is None or site_prices_path() is None:
        return sku
    _price_of_site(hardware_of(sku), partition)
    return f"{sku}{_AT}{partition}"


def is_of_site(sku: str) -> bool:
    """Return whether a site's own price counts for nodes of this SKU."""
    return _AT in sku


def price_words(sku: str, is_bought: bool) -> str:
    """Return what the dollars of such nodes are, in words. ``is_bought``: they are bought from a cloud."""
    return OF_SITE if is_of_site(sku) else LISTED if is_bought else STAND_IN


def alternatives_to(sku: str) -> Mapping[str, SkuPrice]:
    """Return the SKUs that may be taken in its place: all of the region, or, at a site's price, it alone."""
    return {sku: price_of(sku)} if is_of_site(sku) else price_table()


def known_regions() -> tuple[str, ...]:
    return tuple(_tables())


def skus() -> tuple[str, ...]:
    return tuple(_package()["skus"])


def region_of(region: str | None = None) -> str:
    """Return the region as Azure's interfaces write it (``eastus``), also from ``East US``; None: ``DTRAIN_REGION``."""
    return (region or setting("region")).replace(" ", "").casefold()


def refresh_command(region: str, sku: str = "") -> str:
    """Return the command that refreshes prices of a region, or of one SKU there."""
    return f"dtrain cost --refresh --region {region}" + (f" --sku {sku}" if sku else "")


def refreshed_path() -> Path:
    return Path(os.path.abspath(os.path.expanduser(setting("home")))) / REFRESHED


def packaged_prices() -> Prices:
    return read_prices(_package())


def refreshed_prices(path: Path) -> Prices:
    """Return the prices of a refreshed table; none where there is no file. Raise `PriceError` for a damaged one."""
    try:
        document = json.loads(path.read_bytes())
        return read_prices(document)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PriceError(
            f"{path} cannot be read as a table of prices ({type(error).__name__}: {error}). Fetch it again with "
            "`dtrain cost --refresh`, or delete it to go back to the prices of the package"
        ) from None


def read_prices(document: Mapping[str, Any]) -> Prices:
    """Return the figures of a table. Raise ValueError, TypeError or KeyError where it is none."""
    if document["currency"] != "USD":
        raise ValueError(f"the currency is {document['currency']!r}, not USD")
    sources = document["sources"]
    undated = [name for name, source in sources.items() if not _DATE.fullmatch(source["recorded_on"])]
    if undated:
        raise ValueError(f"the source {undated[0]!r} has no date")
    found: Prices = {}
    for region, rows in document["prices"].items():
        for sku, tiers in rows.items():
            for tier, (usd, source) in tiers.items():
                if tier not in TIERS or not 0 < usd < math.inf:
                    raise ValueError(f"{sku} in {region}: {tier} at {usd} is not a price")
                found[region, sku, tier] = Figure(usd_per_hour=usd, **sources[source])
    return found


def merge(tables: Iterable[Prices]) -> Prices:
    """Return the newest of several figures for the same thing, the last of equally old ones."""
    merged: Prices = {}
    for table in tables:
        for key, figure in table.items():
            if key not in merged or figure.recorded_on >= merged[key].recorded_on:
                merged[key] = figure
    return merged


def _price_of_site(hardware: SkuPrice, partition: str) -> SkuPrice:
    """Return what nodes of a partition cost, on whatever tier, and the hardware that they are taken for."""
    path = site_prices_path()
    if path is None:
        raise PriceError(
            f"the price of partition {partition!r} is not known: set prices in DTRAIN_SLURM_OPTIONS to the site's table"
        )
    try:
        day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
        prices = read_partition_prices()
    except (OSError, SettingsError) as error:
        raise PriceError(f"the site's prices cannot be read: {error}") from None
    if partition not in prices:
        known = ", ".join(prices) or "none"
        raise PriceError(
            f"DTRAIN_SLURM_OPTIONS: prices={path} has no price of partition {partition!r}, only of {known}: add it "
            "there, or leave prices out to have the list price of DTRAIN_GPU_TYPE stand in"
        )
    figure = Figure(usd_per_hour=prices[partition], recorded_on=day, how="read", source="the site's table")
    name = f"{hardware.sku.partition(_AT)[0]}{_AT}{partition}"
    figures = dict.fromkeys(TIERS, figure)
    return replace(hardware, sku=name, figures=figures, low_priority_capable=True, retired_on=None)


@cache
def _package() -> dict[str, Any]:
    return json.loads(resources.files("dtrain_dagster.costs").joinpath("price_table.json").read_text())


def _tables() -> Mapping[str, Mapping[str, SkuPrice]]:
    """Region → SKU → price. Read again only when the refreshed table has changed: it is asked for often."""
    path = refreshed_path()
    try:
        stat = path.stat()
        return _read_tables(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except OSError:
        return _read_tables(path, None)


@lru_cache(maxsize=4)
def _read_tables(path: Path, version: tuple[int, ...] | None) -> Mapping[str, Mapping[str, SkuPrice]]:
    figures: dict[str, dict[str, dict[Tier, Figure]]] = {}
    for (region, sku, tier), figure in merge([packaged_prices(), refreshed_prices(path)]).items():
        if sku in _package()["skus"]:
            figures.setdefault(region, {}).setdefault(sku, {})[tier] = figure
    return {
        region: {sku: _sku_price(sku, region, rows[sku]) for sku in skus() if sku in rows}
        for region, rows in figures.items()
    }


def _sku_price(sku: str, region: str, figures: Mapping[Tier, Figure]) -> SkuPrice:
    table = _package()
    make = {key: value for key, value in table["skus"][sku].items() if key not in ("source", "retired_source")}
    own, reference = (table["gpus"][table["skus"][name]["gpu"]] for name in (sku, REFERENCE_SKU))
    ratios = (own[key] / reference[key] for key in ("fp32_tflops", "gb_per_second"))  # as table["speed"]["rule"] says
    return SkuPrice(
        sku=sku,
        region=region,
        figures=figures,
        speed=round(min(ratios) * make["gpus"], 2),
        **make,
    )


def _by_any_case(rows: Mapping[str, SkuPrice], sku: str) -> SkuPrice | None:
    folded = sku.casefold()
    return rows.get(sku) or next((row for name, row in rows.items() if name.casefold() == folded), None)
