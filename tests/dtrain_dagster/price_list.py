"""Azure's retail price API on loopback: the recorded shape of its answers, its filter and its pages."""

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


class PriceList:
    """``items``: what it lists. ``first``: (status, headers, body) that it answers before anything else, in order.
    ``asked``: the queries so far."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.first: list[tuple[int, dict[str, str], bytes]] = []
        self.next_link: str | None = None
        """Instead of the right one."""
        self.asked: list[dict[str, str]] = []
        self.url = ""

    def answer(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(query)
        if self.first:
            return self.first.pop(0)
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
            "NextPageLink": self.next_link or follows,
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
