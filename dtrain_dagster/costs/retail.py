"""Fresh prices from Azure's public retail price API, which needs no account. ``dtrain cost --refresh`` asks it.

It lists several meters for one size; `dtrain_dagster.costs.meters` picks from them. What the API does not list stays as
it was, and is said. A price that cannot be true refuses the whole table. With ``--spot-history``, and a login, it also
asks Azure Resource Graph for 90 days of Spot prices and the eviction rate of 28 days.

Read: learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices (2023-01-01-preview), and
learn.microsoft.com/azure/virtual-machines/spot-vms («Azure Resource Graph»): table ``SpotResources``.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from dtrain_dagster.costs.meters import RetailError, choose_prices
from dtrain_dagster.costs.prices import (
    Figure,
    PriceError,
    Prices,
    merge,
    packaged_prices,
    refreshed_prices,
)
from dtrain_dagster.costs.spot import EvictionRate, SpotMarket, as_extras, kept_history, parse_eviction_band
from dtrain_dagster.settings.tiers import Tier
from trainer.runtime.retry import PASSING_STATUSES, RetryPolicy, retry_after_seconds
from trainer.storage.open import open_storage

_T = TypeVar("_T")
RETAIL_URL = "https://prices.azure.com/api/retail/prices"
API_VERSION = "2023-01-01-preview"
GRAPH_URL = "https://management.azure.com/providers/Microsoft.ResourceGraph/resources"
GRAPH_API_VERSION = "2022-10-01"
SKUS_PER_QUERY = 10
"""SKUs of one query. They all stand in the address, whose length is limited."""
MAX_PAGES = 50
"""Pages of one query. A page has up to 1000 prices, and ten sizes in one region have some dozens."""
RETRIES = RetryPolicy(first_pause_seconds=1.0, max_attempts=5)
LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause that is accepted from the service: somebody waits at a terminal."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
LARGEST_RATIO = 10.0
"""A price that differs by a larger factor from the packaged one is taken for an error of the list, or of this
module."""


class _PassingError(Exception):
    """The list did not answer, or asked for a pause."""

    def __init__(self, problem: str, asked_seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.asked_seconds = asked_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A requested figure. ``before``: the previous figure; None: nothing was known."""

    region: str
    sku: str
    tier: Tier
    before: Figure | None
    after: Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The result of a refresh: what was written, and what stays as it was."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def refresh_price_table(
    path: Path,
    regions: Sequence[str],
    skus: Sequence[str],
    url: str = RETAIL_URL,
    now: datetime | None = None,
    pause: Callable[[float], None] = time.sleep,
    ask_market: Callable[[str, Sequence[str]], SpotMarket] | None = None,
) -> Refreshed:
    """Request the prices of these SKUs in these regions, and write them into the table at ``path`` as a whole. Figures
    of other SKUs and regions stay in it. ``ask_market``: returns what is known of Spot in a region beside its price;
    without it, what the table has stays. Raise `RetailError` where prices cannot be had; the table then stays as
    before."""
    now = now or datetime.now(UTC)
    packaged = packaged_prices()
    notes = []
    try:
        known = refreshed_prices(path)
    except PriceError as error:
        known = {}
        notes.append(f"started again, without the previous table: {error}")
    before = merge([packaged, known])
    found: Prices = {}
    for region in regions:
        items = [
            item
            for first in range(0, len(skus), SKUS_PER_QUERY)
            for item in fetch(url, region, skus[first : first + SKUS_PER_QUERY], pause)
        ]
        source = f"Azure's retail price API, {url}?api-version={API_VERSION}&$filter={_filter(region)}"
        prices, doubts = choose_prices(items, region, skus, now)
        if not prices:
            raise RetailError(
                f"{url} lists no price of {', '.join(skus)} in region {region!r}: is the name right? Names look like "
                "eastus (`az account list-locations`). Nothing was changed"
            )
        notes += [f"{region}: {line}" for line in doubts]
        market = ask_market(region, skus) if ask_market else None
        for (sku, tier), usd in prices.items():
            figure = Figure(usd_per_hour=usd, recorded_on=f"{now:%Y-%m-%d}", how="asked", source=source)
            if tier == "spot":
                figure = with_history(figure, known.get((region, sku, tier)), market, sku)
            found[region, sku, tier] = figure
        for sku in skus:
            if (sku, "dedicated") not in prices:
                old = before.get((region, sku, "dedicated"))
                rest = f"stays at {old.usd_per_hour:g} of {old.recorded_on}" if old else "is not known"
                notes.append(f"{sku} in {region}: no dedicated price is listed; it {rest}")
    _refuse_what_cannot_be(found, packaged, url)
    _write(path, as_document({**known, **found}))
    changes = tuple(
        Change(region=region, sku=sku, tier=tier, before=before.get((region, sku, tier)), after=after)
        for (region, sku, tier), after in found.items()
    )
    return Refreshed(changes=changes, notes=tuple(notes))


def with_history(now: Figure, old: Figure | None, market: SpotMarket | None, sku: str) -> Figure:
    """Return a Spot price that was just asked for, with its history and the rate of evictions: those of the figure that
    it replaces, and those of the market where it was asked. Pure."""
    points = [*old.history, (old.recorded_on, old.usd_per_hour)] if old else []
    evictions = old.evictions if old else None
    if market:
        points += market.history.get(sku, ())
        evictions = market.evictions.get(sku, evictions)
    return replace(now, history=kept_history(points, now.recorded_on), evictions=evictions)


def fetch(
    url: str, region: str, skus: Sequence[str], pause: Callable[[float], None] = time.sleep
) -> Iterator[dict[str, Any]]:
    """Yield all items of a query, page after page, never from another host than that of ``url``."""
    _place(url)
    names = " or ".join(f"armSkuName eq '{sku}'" for sku in skus)
    params: dict[str, str] | None = {
        "api-version": API_VERSION,
        "currencyCode": "'USD'",
        "$filter": f"{_filter(region)} and ({names})",
    }
    link, seen = url, set[str]()
    with requests.Session() as session:
        while link:
            page = ask_again(link, partial(_get, session, link, params), _page, pause)
            yield from page["Items"]
            seen.add(link)
            link, params = page.get("NextPageLink") or "", None
            if link and _place(link) != _place(url):
                raise RetailError(
                    f"{url} continues at another address, {link!r}, which was not queried. Nothing was changed"
                )
            if link in seen or len(seen) >= MAX_PAGES:
                raise RetailError(f"{url} does not end: {len(seen)} pages for one query. Nothing was changed")


def as_document(prices: Prices) -> dict[str, Any]:
    """Return the prices in the layout that `dtrain_dagster.costs.prices.read_prices` reads."""
    keys: dict[tuple[str, str, str], str] = {}
    rows: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for (region, sku, tier), figure in prices.items():
        key = keys.setdefault((figure.how, figure.recorded_on, figure.source), f"s{len(keys) + 1}")
        extras = as_extras(figure.history, figure.evictions)
        row = [figure.usd_per_hour, key, *([extras] if extras else [])]
        rows.setdefault(region, {}).setdefault(sku, {})[tier] = row
    sources = {key: {"how": how, "recorded_on": day, "source": source} for (how, day, source), key in keys.items()}
    return {"currency": "USD", "sources": sources, "prices": rows}


def _filter(region: str) -> str:
    return f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq '{region}'"


def _place(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an address."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise RetailError(f"{url!r} is not the address of a price list, such as {RETAIL_URL}") from None
    return parts.scheme, (parts.hostname or "").casefold(), port


def _get(session: requests.Session, url: str, params: Mapping[str, str] | None) -> requests.Response:
    return session.get(url, params=params, timeout=(CONNECT_SECONDS, READ_SECONDS), allow_redirects=False)


def ask_again(
    url: str,
    send: Callable[[], requests.Response],
    read: Callable[[str, requests.Response], _T],
    pause: Callable[[float], None],
) -> _T:
    """Return what ``read`` makes of the answer to one request. What passes (no connection, throttled, 5xx) is asked
    again, when the service says so. Raise `RetailError` where there is no answer with status 200, as ``read`` does."""

    def ask() -> _T:
        try:
            answer = send()
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _PassingError(f"cannot be reached ({type(error).__name__}: {error})") from None
        except requests.RequestException as error:
            raise RetailError(f"{url} cannot be queried: {error}. Nothing was changed") from None
        if answer.status_code == 200:
            return read(url, answer)
        problem = f"answers {answer.status_code}: {answer.text[:200]!r}"
        if answer.status_code not in PASSING_STATUSES:
            raise RetailError(f"{url} {problem}. Nothing was changed")
        raise _PassingError(problem, retry_after_seconds(answer.headers))

    try:
        return RETRIES.call(
            url,
            ask,
            lambda error: isinstance(error, _PassingError) and _asked(error) <= LONGEST_PAUSE_SECONDS,
            asked_seconds=_asked,
            pause=pause,
        )
    except _PassingError as error:
        if (wait := error.asked_seconds) > LONGEST_PAUSE_SECONDS:
            why = f". It asks to be queried again in {wait:.0f} s"
        else:
            why = f", {RETRIES.max_attempts} times in a row; try again later"
        raise RetailError(f"{url} {error}{why}. Nothing was changed") from None


def _asked(error: BaseException) -> float:
    return error.asked_seconds if isinstance(error, _PassingError) else 0.0


def _page(url: str, answer: requests.Response) -> dict[str, Any]:
    try:
        page = answer.json()
        if not isinstance(page["Items"], list) or not all(isinstance(item, dict) for item in page["Items"]):
            raise ValueError("its Items are not a list of objects")
        if not isinstance(page.get("NextPageLink") or "", str):
            raise ValueError("its NextPageLink is not text")
    except (ValueError, TypeError, KeyError) as error:
        said = f"{type(error).__name__}: {error}"
        raise RetailError(f"{url} does not answer with a price list ({said}). Nothing was changed") from None
    return page


def _refuse_what_cannot_be(found: Prices, packaged: Prices, url: str) -> None:
    """`RetailError` with every figure that is not positive or far from what the package has."""
    wrong = []
    for (region, sku, tier), figure in found.items():
        usd, usual = figure.usd_per_hour, _usual(packaged, region, sku, tier)
        if not 0 < usd < math.inf:
            wrong.append(f"{sku} in {region}, {tier}: {usd}")
        elif usual and not 1 / LARGEST_RATIO <= usd / usual <= LARGEST_RATIO:
            wrong.append(f"{sku} in {region}, {tier}: {usd} (the package has {usual:g})")
    if wrong:
        raise RetailError(
            f"{url} lists prices that cannot be true, in US dollars per hour: {'; '.join(wrong)}. Nothing was changed; "
            "look at Azure's own page, or refresh the others with --sku"
        )


def _usual(packaged: Prices, region: str, sku: str, tier: Tier) -> float | None:
    """Return the package's price there, or the median of other regions; None if it has none."""
    everywhere = {place: figure.usd_per_hour for (place, *what), figure in packaged.items() if what == [sku, tier]}
    return everywhere.get(region) or (statistics.median(everywhere.values()) if everywhere else None)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    try:
        open_storage(path.parent).write(path.name, json.dumps(document, indent=1).encode())
    except OSError as error:
        raise RetailError(
            f"{path} cannot be written ({error.strerror or error}); make room there, or set DTRAIN_HOME to a folder "
            "that can be written. Nothing was changed"
        ) from None


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
            params={"api-version": GRAPH_API_VERSION},
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
