"""How Spot prices have moved and how often Spot nodes are evicted, from Azure Resource Graph: 90 days of prices and the
eviction rate of 28 days. It needs a login, unlike the price list. ``dtrain cost --refresh --spot-history`` asks it.

Read: learn.microsoft.com/azure/virtual-machines/spot-vms («Azure Resource Graph»): table ``SpotResources``, types
``microsoft.compute/skuspotpricehistory/ostype/location`` and ``microsoft.compute/skuspotevictionrate/location``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import requests

from dtrain_dagster.costs.meters import RetailError
from dtrain_dagster.costs.retail import CONNECT_SECONDS, READ_SECONDS, ask_again
from dtrain_dagster.costs.spot import EvictionRate, SpotMarket, parse_eviction_band

GRAPH_URL = "https://management.azure.com/providers/Microsoft.ResourceGraph/resources"
API_VERSION = "2022-10-01"


def price_query(region: str, skus: Sequence[str]) -> str:
    """Return the query for the history of the prices of Linux nodes."""
    return (
        "SpotResources | where type =~ 'microsoft.compute/skuspotpricehistory/ostype/location' "
        f"| where location =~ '{region}' | where sku.name in~ ({_listed(skus)}) | where properties.osType =~ 'linux' "
        "| project skuName = tostring(sku.name), spotPrices = properties.spotPrices"
    )


def eviction_query(region: str, skus: Sequence[str]) -> str:
    """Return the query for the eviction rates."""
    return (
        "SpotResources | where type =~ 'microsoft.compute/skuspotevictionrate/location' "
        f"| where location =~ '{region}' | where sku.name in~ ({_listed(skus)}) "
        "| project skuName = tostring(sku.name), evictionRate = tostring(properties.evictionRate)"
    )


def fetch_market(
    region: str,
    skus: Sequence[str],
    token: str,
    url: str = GRAPH_URL,
    now: datetime | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> SpotMarket:
    """Return what Azure tells of these SKUs in a region. ``token``: of Azure's management interface. Raise
    `RetailError` where it cannot be had."""
    day = f"{now or datetime.now(UTC):%Y-%m-%d}"
    prices, rates = (_rows(url, token, query(region, skus), pause) for query in (price_query, eviction_query))
    try:
        return SpotMarket(history=read_history(prices, skus), evictions=read_evictions(rates, skus, day))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RetailError(
            f"{url} does not answer with a history of Spot ({type(error).__name__}: {error}). Nothing was changed"
        ) from None


def read_history(rows: Sequence[Mapping[str, Any]], skus: Sequence[str]) -> dict[str, list[tuple[str, float]]]:
    """Return SKU → prices, the oldest first. Raise ValueError, TypeError, KeyError or AttributeError where the rows
    cannot be read. Pure."""
    names, found = {sku.casefold(): sku for sku in skus}, dict[str, list[tuple[str, float]]]()
    for row in rows:
        if sku := names.get(str(row["skuName"]).casefold()):
            points = [(_day(item["effectiveDate"]), float(item["priceUSD"])) for item in row["spotPrices"] or ()]
            found[sku] = sorted(found.get(sku, []) + [point for point in points if 0 < point[1] < math.inf])
    return found


def read_evictions(rows: Sequence[Mapping[str, Any]], skus: Sequence[str], day: str) -> dict[str, EvictionRate]:
    """Return SKU → eviction rate, asked on ``day``; none of a band that cannot be read. Raise KeyError for rows of
    another shape. Pure."""
    names, found = {sku.casefold(): sku for sku in skus}, dict[str, EvictionRate]()
    for row in rows:
        sku, band = names.get(str(row["skuName"]).casefold()), parse_eviction_band(str(row["evictionRate"]))
        if sku and band:
            source = "Azure Resource Graph, SpotResources, eviction rate of the last 28 days"
            found[sku] = EvictionRate(low=band[0], high=band[1], recorded_on=day, source=source)
    return found


def _rows(url: str, token: str, query: str, pause: Callable[[float], None]) -> list[dict[str, Any]]:
    """The rows of one query: a row per SKU, so one answer holds them all. It is asked of the whole tenant, as the table
    is not there for single subscriptions."""

    def send() -> requests.Response:
        return requests.post(
            url,
            params={"api-version": API_VERSION},
            json={"query": query, "options": {"resultFormat": "objectArray"}},
            headers={"Authorization": f"Bearer {token}"},
            timeout=(CONNECT_SECONDS, READ_SECONDS),
            allow_redirects=False,
        )

    return ask_again(url, send, _read_rows, pause)


def _read_rows(url: str, answer: requests.Response) -> list[dict[str, Any]]:
    try:
        rows = answer.json()["data"]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("its data is not a list of objects")
    except (ValueError, TypeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
        raise RetailError(f"{url} does not answer with a table ({said}). Nothing was changed") from None
    return rows


def _listed(skus: Sequence[str]) -> str:
    return ", ".join(f"'{sku.casefold()}'" for sku in skus)


def _day(text: str) -> str:
    return datetime.fromisoformat(text).date().isoformat()
