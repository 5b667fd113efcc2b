"""Fresh prices from Azure's public retail price API, which needs no account. ``dtrain cost --refresh`` asks it.

Azure lists one size many times: Windows beside Linux, several tiers, reservations, prices for developers, meters of
several regions, prices that are no more or not yet, and zeros where it does not sell. `rank_meter` says which row wins,
and why. What the API does not list stays as it was, and is said. A price that cannot be true refuses the whole table.

Read: learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices (2023-01-01-preview).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import requests

from dtrain_dagster.costs.prices import Figure, PriceError, Prices, merge, packaged_prices, refreshed_prices
from dtrain_dagster.settings.cluster_kinds import Tier
from trainer.runtime.retry import PASSING_STATUSES, RetryPolicy, retry_after_seconds
from trainer.storage.open import open_storage

RETAIL_URL = "https://prices.azure.com/api/retail/prices"
API_VERSION = "2023-01-01-preview"
SKUS_PER_QUERY = 10
"""SKUs of one query. They all stand in the address, whose length is limited."""
MAX_PAGES = 50
"""Pages of one query. A page has up to 1000 prices, and ten sizes in one region have some dozens."""
RETRIES = RetryPolicy(first_pause_seconds=1.0, max_attempts=5)
LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause that is accepted from the service: somebody waits at a terminal."""
SECONDS = (10, 60)
"""Patience with a connection and with an answer."""
LARGEST_RATIO = 10.0
"""A price that differs by a larger factor from the packaged one is taken for an error."""
_NO_LINUX_VM = ("windows", "cloud services", "cloudservices", "dedicated host")
"""Words in the names of products that are not a Linux machine by the hour."""
_RETIRED_METER = "low priority"
"""Words in the names of meters by which Azure ML billed until 2026-03-31, and which may still be listed."""


class RetailError(PriceError):
    """The price list could not be fetched, or cannot be believed. Nothing was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. Nothing was changed")


class PriceChange(NamedTuple):
    """A requested figure. ``before``: the previous figure; None: nothing was known."""

    region: str
    sku: str
    tier: Tier
    before: Figure | None
    after: Figure


class Refreshed(NamedTuple):
    """The result of a refresh: what was written, and what stays as it was."""

    changes: tuple[PriceChange, ...]
    notes: tuple[str, ...]


def refresh_price_table(
    path: Path,
    regions: Sequence[str],
    skus: Sequence[str],
    url: str = RETAIL_URL,
    now: datetime | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Refreshed:
    """Request these prices and write them into the table at ``path``; others stay in it. Raise `RetailError`, and leave
    the table as it was, where they cannot be had."""
    now, packaged, notes = now or datetime.now(UTC), packaged_prices(), []
    try:
        known = refreshed_prices(path)
    except PriceError as error:
        known = {}
        notes.append(f"started again, without the previous table: {error}")
    before: Prices = merge([packaged, known])
    found: Prices = {}
    for region in regions:
        queries = (skus[first : first + SKUS_PER_QUERY] for first in range(0, len(skus), SKUS_PER_QUERY))
        prices = choose_prices(
            (item for some in queries for item in fetch(url, region, some, pause)), region, skus, now
        )
        if not prices:
            raise RetailError(
                f"{url} lists no price of {', '.join(skus)} in region {region!r}: is the name right? Names look like "
                "eastus (`az account list-locations`)"
            )
        source = f"Azure's retail price API, {url}?api-version={API_VERSION}&$filter={_filter(region)}"
        for (sku, tier), usd in prices.items():
            figure = Figure(usd_per_hour=usd, recorded_on=f"{now:%Y-%m-%d}", how="asked", source=source)
            found[region, sku, tier] = figure
        for sku in skus:
            if (sku, "dedicated") not in prices:
                old = before.get((region, sku, "dedicated"))
                rest = f"stays at {old.usd_per_hour:g} of {old.recorded_on}" if old else "is not known"
                notes.append(f"{sku} in {region}: no dedicated price is listed; it {rest}")
    _refuse_what_cannot_be(found, packaged, url)
    _write(path, as_document({**known, **found}))
    return Refreshed(tuple(PriceChange(*key, before.get(key), after) for key, after in found.items()), tuple(notes))


def fetch(
    url: str, region: str, skus: Sequence[str], pause: Callable[[float], None] = time.sleep
) -> Iterator[dict[str, Any]]:
    """Yield all items of a query, page after page. Links in the answers are not followed."""
    names = " or ".join(f"armSkuName eq '{sku}'" for sku in skus)
    filter_ = f"{_filter(region)} and ({names})"
    query, seen = {"api-version": API_VERSION, "currencyCode": "'USD'", "$filter": filter_}, 0
    for _ in range(MAX_PAGES):
        page = _ask(url, {**query, "$skip": str(seen)} if seen else query, pause)
        try:
            items, goes_on = list(page["Items"]), bool(page.get("NextPageLink"))
        except (TypeError, KeyError, AttributeError) as error:
            raise RetailError(f"{url} does not answer with a price list ({error!r})") from None
        yield from items
        seen += len(items)
        if not (goes_on and items):
            return
    raise RetailError(f"{url} does not end: {MAX_PAGES} pages for one query")


def choose_prices(
    items: Iterable[Mapping[str, Any]], region: str, skus: Sequence[str], now: datetime
) -> dict[tuple[str, Tier], float]:
    """Return (SKU, tier) → US dollars per hour now. Raise `RetailError` for items that are no prices. Pure."""
    names = {sku.casefold(): sku for sku in skus}
    best: dict[tuple[str, Tier], tuple[Any, float]] = {}
    for item in items:
        try:
            sku = names.get(str(item.get("armSkuName", "")).casefold())
            if sku is None or not is_linux_by_the_hour(item, region):
                continue
            usd, since, until = float(item["retailPrice"]), _time(item, "Start"), _time(item, "End")
            if usd and (since or now) <= now and (until is None or until > now):  # a zero: Azure does not sell it there
                key, row = (sku, tier_of_meter(item)), (rank_meter(item, since, usd), usd)
                best[key] = min(best.get(key, row), row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise RetailError(f"the price list has an item that cannot be read ({said}): {item!r:.300}") from None
    return {key: usd for key, (_, usd) in best.items()}


def rank_meter(item: Mapping[str, Any], since: datetime | None, usd: float) -> tuple[Any, ...]:
    """Return the rank of a listed price among those of one size on one tier; the lowest rank counts. In this order:

    1. the meter's own region before others, which stay where there is no other (sizes such as E16-4s v3 have no
       primary row: they are billed on the meter of E16 v3);
    2. the newest price: an older row is what it was before;
    3. a product that is called ``Virtual Machines …`` before special ones;
    4. the lowest: a doubled row was seen to carry the price of Windows, which is that of Linux and a licence.
    """
    is_special = not str(item.get("productName", "")).casefold().startswith("virtual machines")
    return item.get("isPrimaryMeterRegion") is False, -since.timestamp() if since else math.inf, is_special, usd


def is_linux_by_the_hour(item: Mapping[str, Any], region: str) -> bool:
    """Return whether this is the general price of a Linux machine there. Raise `RetailError` if it is not in
    dollars."""
    product = str(item.get("productName", "")).casefold()
    names = f"{item.get('skuName', '')} {item.get('meterName', '')}".casefold()
    if (
        item.get("type", item.get("priceType")) != "Consumption"  # no reservation, none for developers
        or item.get("reservationTerm")
        or str(item.get("armRegionName", "")).casefold() != region
        or item.get("tierMinimumUnits")
        or item.get("unitOfMeasure") != "1 Hour"
        or any(word in product for word in _NO_LINUX_VM)
        or "expired" in names
        or _RETIRED_METER in names
    ):
        return False
    if item.get("currencyCode") != "USD":
        raise RetailError(f"asked for US dollars, got {item.get('currencyCode')!r}: {item!r:.300}")
    return True


def tier_of_meter(item: Mapping[str, Any]) -> Tier:
    """Return the tier by the item's names: ``NC6s v3 Spot``; in older bills ``NC6s v3 Low Priority``."""
    names = f"{item.get('skuName', '')} {item.get('meterName', '')}".casefold()
    return "spot" if _RETIRED_METER in names or "spot" in names.split() else "dedicated"


def _time(item: Mapping[str, Any], end: str) -> datetime | None:
    text = item.get(f"effective{end}Date")
    found = datetime.fromisoformat(text) if text else None
    return found.replace(tzinfo=UTC) if found and not found.tzinfo else found


def as_document(prices: Prices) -> dict[str, Any]:
    """Return the prices in the layout that `dtrain_dagster.costs.prices.read_prices` reads."""
    keys: dict[tuple[str, str, str], str] = {}
    rows: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for (region, sku, tier), figure in prices.items():
        key = keys.setdefault((figure.how, figure.recorded_on, figure.source), f"s{len(keys) + 1}")
        rows.setdefault(region, {}).setdefault(sku, {})[tier] = [figure.usd_per_hour, key]
    sources = {key: {"how": how, "recorded_on": day, "source": source} for (how, day, source), key in keys.items()}
    return {"currency": "USD", "sources": sources, "prices": rows}


def _filter(region: str) -> str:
    return f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq '{region}'"


def _ask(url: str, query: Mapping[str, str], pause: Callable[[float], None]) -> Any:
    """Return the JSON of one page. What passes (no connection, throttled, 5xx) is asked again, when the service says
    so."""

    def ask() -> Any:
        answer = requests.get(url, params=query, timeout=SECONDS, allow_redirects=False)
        answer.raise_for_status()
        return answer.json()

    def asked_pause(error: BaseException) -> float:
        return retry_after_seconds(getattr(getattr(error, "response", None), "headers", None))

    def passes(error: Exception) -> bool:
        if isinstance(error, requests.HTTPError) and error.response is not None:
            return error.response.status_code in PASSING_STATUSES and asked_pause(error) <= LONGEST_PAUSE_SECONDS
        return isinstance(error, (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError))

    try:
        return RETRIES.call(url, ask, passes, asked_seconds=asked_pause, pause=pause)
    except requests.JSONDecodeError as error:
        raise RetailError(f"{url} does not answer with a price list ({error})") from None
    except requests.RequestException as error:
        wait = asked_pause(error)
        remedy = f"try again in {wait:.0f} s, as it says" if wait else "try again later"
        if error.response is not None and error.response.status_code in (400, 404):
            remedy = "its address or the region is wrong"
        raise RetailError(f"{url} cannot be queried: {error}; {remedy}") from None


def _refuse_what_cannot_be(found: Prices, packaged: Prices, url: str) -> None:
    """`RetailError` with every figure that is not positive or far from the package's (else from other regions'
    median)."""
    wrong = []
    for (region, sku, tier), figure in found.items():
        known = {place: other.usd_per_hour for (place, *what), other in packaged.items() if what == [sku, tier]}
        usd, usual = figure.usd_per_hour, known.get(region) or statistics.median(known.values() or [0.0])
        if not 0 < usd < math.inf:
            wrong.append(f"{sku} in {region}, {tier}: {usd}")
        elif usual and not 1 / LARGEST_RATIO <= usd / usual <= LARGEST_RATIO:
            wrong.append(f"{sku} in {region}, {tier}: {usd} (the package has {usual:g})")
    if wrong:
        raise RetailError(
            f"{url} lists prices that cannot be true, in US dollars per hour: {'; '.join(wrong)}; look at "
            "Azure's own page, or refresh the others with --sku"
        )


def _write(path: Path, document: Mapping[str, Any]) -> None:
    try:
        open_storage(path.parent).write(path.name, json.dumps(document, indent=1).encode())
    except OSError as error:
        raise RetailError(
            f"{path} cannot be written ({error.strerror or error}); make room there, or set DTRAIN_HOME to a folder "
            "that can be written"
        ) from None
