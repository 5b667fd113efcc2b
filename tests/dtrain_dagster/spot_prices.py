"""Spot prices with what Azure tells only to those who are logged in: their history and the rate of evictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain_dagster.costs.prices import REFRESHED, SkuPrice, price_of
from dtrain_dagster.costs.spot import EvictionRate

RATE = EvictionRate(low=0.05, high=0.10, recorded_on="2026-11-20", source="a test")
"""A band that Azure has: 7.5 % of the nodes in an hour are expected."""


def with_spot(price: SkuPrice, **known: Any) -> SkuPrice:
    """Return the same price with ``known`` fields of its Spot figure."""
    return replace(price, figures={**price.figures, "spot": replace(price.figures["spot"], **known)})


def write_rates(home: Path, skus: Sequence[str], region: str = "eastus") -> None:
    """Write the packaged Spot prices of these SKUs with `RATE`, as a refresh with a login leaves them."""
    rate = {"low": RATE.low, "high": RATE.high, "recorded_on": RATE.recorded_on, "source": RATE.source}
    rows = {
        sku: {"spot": [price_of(sku, region).usd_per_hour("spot"), "s", {"evictions": rate}]} for sku in skus
    }  # fmt: skip
    sources = {"s": {"how": "asked", "recorded_on": "2026-11-20", "source": "a test"}}
    home.mkdir(exist_ok=True)
    document = {"currency": "USD", "sources": sources, "prices": {region: rows}}
    (home / REFRESHED).write_text(json.dumps(document))
