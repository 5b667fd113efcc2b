"""Azure's retail price API on loopback: the recorded shape of its answers, its filter, its pages and its refusals.

The shape is that of answers which users have put on public pages: rows of sizes that share a meter have
``isPrimaryMeterRegion`` false (Standard_E16-4s_v3 in eastus, beside E16 v3, in a comparison of EA price sheets of
2022-03), reservations come with the unit «1 Hour» and the price of the whole term (Standard_D8_v4 in westeurope,
there), and ``NextPageLink`` names the port. Zeros and doubled rows: reported by users, the numbers are ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from werkzeug import Request, Response

from tests.loopback import LoopbackServer

PAGE = 4
"""Items per page; the service has 1000."""


def meter(sku: str = "Standard_NC4as_T4_v3", usd: float = 0.526, suffix: str = "", **changes: Any) -> dict[str, Any]:
    """One item as the service gives it. ``suffix``: " Spot" or " Low Priority"."""
    name = sku.removeprefix("Standard_").replace("_", " ") + suffix
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": "eastus",
        "location": "US East",
        "effectiveStartDate": "2021-11-01T00:00:00Z",
        "meterId": "000a794b-bdb0-58be-a0cd-0c3a0f222923",
        "meterName": name,
        "productId": "DZH318Z0BQ4L",
        "skuId": "DZH318Z0BQ4L/00TG",
        "productName": "Virtual Machines NCasT4 v3 Series",
        "skuName": name,
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": sku,
    } | changes


def listing(sku: str, usd: float, region: str = "eastus", **changes: Any) -> list[dict[str, Any]]:
    """Everything that the service lists for one size in a region, the wanted rows among it: $``usd`` dedicated, a fifth
    of it as low priority, an eighth as spot. ``changes``: to the wanted rows."""
    here = {"armRegionName": region}
    windows = f"Virtual Machines {sku} Series Windows"
    wanted = [
        meter(sku, usd=round(share * usd, 4), suffix=suffix, **here | changes)
        for suffix, share in (("", 1), (" Low Priority", 0.2), (" Spot", 0.125))
    ]
    return [
        meter(sku, usd=round(1.4 * usd, 4), productName=windows, **here),
        meter(sku, usd=round(0.56 * usd, 4), suffix=" Low Priority", productName=windows, **here),
        meter(sku, usd=0.0, productName=f"Virtual Machines {sku} Series Promo", **here),
        meter(sku, usd=round(6000 * usd, 2), type="Reservation", reservationTerm="1 Year", **here),
        meter(sku, usd=round(0.6 * usd, 4), type="DevTestConsumption", **here),
        meter(sku, usd=round(0.9 * usd, 4), productName=f"{sku} Series Dedicated Host", **here),
        meter(sku, usd=round(1.2 * usd, 4), **here | changes | {"effectiveStartDate": "2019-01-01T00:00:00Z"}),
        *wanted,
        *wanted,
    ]


class PriceList:
    """``items``: what it lists. ``first``: (status, headers, body) that it answers before anything else, in order.
    ``busy_every``: each so many queries are answered 429 first; 0: none. ``asked``: the queries so far."""

    def __init__(self) -> None:
        self.busy_every = 0
        self.items: list[dict[str, Any]] = []
        self.first: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[dict[str, str]] = []
        self.url = ""

    def answer(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(query)
        if self.first:
            return self.first.pop(0)
        if self.busy_every and len(self.asked) % self.busy_every == 0:
            return 429, {"Retry-After": "1"}, b'{"error":{"code":"429","message":"Too many requests"}}'
        wanted = query["$filter"]
        skus = re.findall(r"armSkuName eq '([^']+)'", wanted)
        regions = re.findall(r"armRegionName eq '([^']+)'", wanted)
        listed = [item for item in self.items if item["armSkuName"] in skus and item["armRegionName"] in regions]
        start = int(query.get("$skip", 0))
        follows = f"{self.url}?$filter={quote(wanted)}&$skip={start + PAGE}" if start + PAGE < len(listed) else None
        page = {
            "BillingCurrency": "USD",
            "CustomerEntityId": "Default",
            "CustomerEntityType": "Retail",
            "Items": listed[start : start + PAGE],
            "NextPageLink": follows,
            "Count": len(listed[start : start + PAGE]),
        }
        return 200, {}, json.dumps(page).encode()


@contextmanager
def price_list() -> Iterator[PriceList]:
    listed = PriceList()

    def answer(request: Request) -> Response:
        status, headers, body = listed.answer(request.args.to_dict())
        return Response(body, status, headers)

    with LoopbackServer(answer) as server:
        listed.url = server.url_for("/api/retail/prices")
        yield listed
