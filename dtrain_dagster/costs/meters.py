"""Which of several listed prices is the price of a node-hour. Pure; `dtrain_dagster.costs.retail` fetches the lists.

Azure lists one size many times: Windows beside Linux, several tiers, reservations, prices for developers, meters of
several regions, prices that are no more or not yet, and zeros where it does not sell. `choose_meter` says which row
wins, and why; `choose_prices` applies it to a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.settings.tiers import Tier

_BEGINNING = datetime.min.replace(tzinfo=UTC)
_NO_LINUX_VM = ("windows", "cloud services", "cloudservices", "dedicated host")
"""Words in the names of products that are not a Linux machine by the hour."""
_RETIRED_METER = "low priority"
"""Words in the names of meters by which Azure ML billed until 2026-03-31, and which may still be listed."""


class RetailError(PriceError):
    """The price list could not be fetched, or cannot be believed. Nothing was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """One listed price of a size on a tier, for a Linux machine by the hour."""

    usd_per_hour: float
    since: datetime
    is_primary: bool
    """Whether the row is that of the meter's own region. Sizes that share a meter with another have no such row."""
    product: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The price that counts, and what there is to say about it."""

    usd_per_hour: float | None
    """None where only zeros are listed: such a size is not sold, or not yet."""
    doubt: str = ""
    """Prices that are listed beside it with equal right; "" where there are none."""


def choose_meter(meters: Sequence[Meter]) -> Choice:
    """Return the price that counts among the meters of one size on one tier, at least one. In this order:

    1. a zero is no price: Azure lists it for sizes that it does not sell;
    2. the meter's own region before others, which stay where there is no other (sizes such as E16-4s v3 have no
       primary row: they are billed on the meter of E16 v3);
    3. the newest price: an older row is what it was before;
    4. a product that is called ``Virtual Machines …`` before special ones;
    5. the lowest: a doubled row was seen to carry the price of Windows, which is that of Linux and a licence.
    """
    left = [meter for meter in meters if meter.usd_per_hour != 0]
    if not left:
        return Choice(usd_per_hour=None)
    left = [meter for meter in left if meter.is_primary] or left
    newest = max(meter.since for meter in left)
    left = [meter for meter in left if meter.since == newest]
    left = [meter for meter in left if meter.product.casefold().startswith("virtual machines")] or left
    prices = sorted({meter.usd_per_hour for meter in left})
    doubt = "" if len(prices) == 1 else f"listed at {' and at '.join(map(str, prices))}: the lowest is taken"
    return Choice(usd_per_hour=prices[0], doubt=doubt)


def choose_prices(
    items: Iterable[Mapping[str, Any]], region: str, skus: Sequence[str], now: datetime
) -> tuple[dict[tuple[str, Tier], float], list[str]]:
    """Return (SKU, tier) → US dollars per hour, of the prices that count now, and in words those that are in doubt.
    Raise `RetailError` for items that are not of the known shape."""
    names = {sku.casefold(): sku for sku in skus}
    meters: dict[tuple[str, Tier], list[Meter]] = {}
    for item in items:
        try:
            sku = names.get(str(item.get("armSkuName", "")).casefold())
            if sku is None or not is_linux_by_the_hour(item, region):
                continue
            since, until = (_time(item.get(f"effective{end}Date")) for end in ("Start", "End"))
            if (since or _BEGINNING) <= now and (until is None or until > now):
                meter = Meter(
                    usd_per_hour=float(item["retailPrice"]),
                    since=since or _BEGINNING,
                    is_primary=item.get("isPrimaryMeterRegion") is not False,
                    product=str(item.get("productName", "")),
                )
                meters.setdefault((sku, tier_of_meter(item)), []).append(meter)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RetailError(
                f"the price list has an item that cannot be read ({type(error).__name__}: {error}): {item!r:.300}. "
                "Nothing was changed"
            ) from None
    chosen: dict[tuple[str, Tier], float] = {}
    doubts = []
    for (sku, tier), listed in meters.items():
        choice = choose_meter(listed)
        if choice.usd_per_hour is not None:
            chosen[sku, tier] = choice.usd_per_hour
        if choice.doubt:
            doubts.append(f"{sku}, {tier}: {choice.doubt}")
    return chosen, doubts


def is_linux_by_the_hour(item: Mapping[str, Any], region: str) -> bool:
    """Return whether this is the general price of an hour of a Linux machine in that region. Raise `RetailError` if it
    is not in US dollars."""
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
        raise RetailError(f"asked for US dollars, got {item.get('currencyCode')!r}: {item!r:.300}. Nothing was changed")
    return True


def tier_of_meter(item: Mapping[str, Any]) -> Tier:
    """Return the tier by the suffix of the item's names: ``NC6s v3``, ``NC6s v3 Spot``; bills of before 2026-03-31 have
    ``NC6s v3 Low Priority`` for what is Spot now."""
    names = f"{item.get('skuName', '')} {item.get('meterName', '')}".casefold()
    return "spot" if _RETIRED_METER in names or "spot" in names.split() else "dedicated"


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
