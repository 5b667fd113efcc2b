"""What a node costs per hour: a dated table that comes with the package. No figure without its source and date."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

Tier = Literal["dedicated", "low_priority"]


def tier_of(name: str) -> Tier:
    """The tier of that name, as clusters and settings give it."""
    return "low_priority" if name == "low_priority" else "dedicated"


class PriceError(ValueError):
    """Something cannot be priced. The message names the SKU, the tier and the region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkuPrice:
    """One SKU in one region. Prices are US dollars per node and hour."""

    sku: str
    gpu: str
    gpus: int
    gpu_memory_gib: int
    vcpus: int
    memory_gib: int
    infiniband: bool
    dedicated_usd_per_hour: float
    low_priority_usd_per_hour: float
    low_priority_capable: bool
    retired_on: str | None
    region: str
    recorded_on: str
    source: str
    speed: float = 1.0
    """Of training on one node, relative to Standard_NC6s_v3."""

    def usd_per_hour(self, tier: Tier) -> float:
        """Price of one node-hour. `PriceError` where the SKU is not offered on that tier."""
        if tier == "dedicated":
            return self.dedicated_usd_per_hour
        if not self.low_priority_capable:
            raise PriceError(f"{self.sku} is not offered on the low-priority tier in {self.region}: use tier dedicated")
        return self.low_priority_usd_per_hour


@cache
def price_table() -> dict[str, SkuPrice]:
    """SKU → price, from the table in the package."""
    text = resources.files("dtrain_dagster.costs").joinpath("price_table.json").read_text()
    table = json.loads(text)
    common = {key: table[key] for key in ("region", "recorded_on", "source")}
    return {row["sku"]: SkuPrice(**{**common, **row}) for row in table["rows"]}


def price_of(sku: str) -> SkuPrice:
    """The price row of a SKU, in whichever case Azure writes it. `PriceError` for one that is not in the table."""
    table = price_table()
    found = {name.casefold(): row for name, row in table.items()}.get(sku.casefold())
    if found is None:
        region = next(iter(table.values())).region
        raise PriceError(
            f"no price is known for SKU {sku!r} in {region}. Use one of these (DTRAIN_GPU_TYPE, DTRAIN_AZURE_CHAIN): "
            f"{', '.join(table)}"
        )
    return found
