"""What evictions of Spot nodes are expected to cost: the start-up is bought again. Pure arithmetic, and its words.

    evictions = eviction rate of the size and region x nodes x hours
    seconds   = undisturbed seconds + evictions x start-up seconds
    dollars   = nodes x seconds / 3600 x price of a node-hour

All nodes are paid while an evicted one starts again, and count as standing still. Steps since the last checkpoint are
not in it. Where no rate is known, nothing is added, and `tell_evictions` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.prices import SkuPrice, is_of_site, refresh_command
from dtrain_dagster.settings.tiers import Tier, tier_of
from dtrain_dagster.support.formatting import dollars, format_duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Evictions:
    """How often a node is evicted, and what each eviction holds up."""

    per_node_hour: float
    """Expected evictions of one node in an hour."""
    most_per_node_hour: float
    """The upper end of the rate."""
    seconds: float
    """Seconds of the start-up that each of them buys again."""


def evictions_of(price: SkuPrice, tier: Tier, startup_seconds: float | None) -> Evictions | None:
    """Return the evictions on that tier; None on dedicated nodes, and where the rate or the start-up is not known."""
    rate = price.figures["spot"].evictions if tier_of(tier) == "spot" and "spot" in price.figures else None
    if rate is None or startup_seconds is None:
        return None
    return Evictions(per_node_hour=rate.expected, most_per_node_hour=rate.most, seconds=startup_seconds)


def with_evictions(seconds: Interval, evictions: Evictions | None, node_count: int) -> Interval:
    """Return the time with evictions: the lower end without any, the middle with the expected number, and the upper end
    with two standard deviations more than the upper end of the rate (independent evictions: a Poisson process)."""
    if evictions is None:
        return seconds
    most = evictions.most_per_node_hour * node_count * seconds.high / 3600
    return replace(
        seconds,
        expected=seconds.expected * expected_slowdown(evictions, node_count),
        high=seconds.high + evictions.seconds * (most + 2 * math.sqrt(most)),
    )


def expected_slowdown(evictions: Evictions | None, node_count: int) -> float:
    """Return the expected time with evictions relative to that without: 1 without evictions."""
    return 1 + evictions.seconds * evictions.per_node_hour * node_count / 3600 if evictions else 1.0


def without_evictions(seconds: Interval, evictions: Evictions | None, node_count: int) -> Interval:
    """Return the time of an estimate without its evictions, to be priced on other nodes: the expected one exactly, the
    upper end without the expected share of them. The lower end has none."""
    slower = expected_slowdown(evictions, node_count)
    return replace(seconds, expected=seconds.expected / slower, high=seconds.high / slower)


def tell_evictions(usd: float, node_count: int, price: SkuPrice, tier: Tier, startup_seconds: float | None) -> str:
    """Return what evictions are expected to cost in an estimate of ``usd`` dollars, or that it is not known; "" on
    dedicated nodes, and where the price is a site's own."""
    if tier_of(tier) == "dedicated" or is_of_site(price.sku):
        return ""
    evictions, rate = evictions_of(price, tier, startup_seconds), price.figure("spot").evictions
    if evictions is None or rate is None:
        missing, remedy = "the start-up is not known", ""
        if rate is None:
            command = refresh_command(price.region, price.sku, spot_history=True)
            missing, remedy = "how often Spot nodes are evicted is not known", f" (`{command}` asks Azure)"
        return f"{missing}, so what evictions cost is not in these figures{remedy}"
    usd *= 1 - 1 / expected_slowdown(evictions, node_count)
    return (
        f"evictions are expected to cost {dollars(usd)} of it: {rate} of Spot nodes are evicted in an hour "
        f"(Azure, 28 days to {rate.recorded_on}), and each eviction pays for the start-up of "
        f"{format_duration(evictions.seconds)} again, for all nodes"
    )


def tell_spot_price(price: SkuPrice, tier: Tier) -> str:
    """Return how far the price of Spot may move, as the interval of the dollars has it; "" on dedicated nodes, and
    where the price is a site's own."""
    if tier_of(tier) == "dedicated" or is_of_site(price.sku):
        return ""
    if spread := price.figure("spot").spread:
        return f"Spot's price varies: it has been ${spread.low:g} to ${spread.high:g} an hour since {spread.since}"
    if "dedicated" not in price.figures:
        return "Spot's price varies; neither its history nor the pay-as-you-go price is known, so one price is used"
    most = price.figures["dedicated"].usd_per_hour
    return (
        "Spot's price varies, and no history of it is known, so the interval reaches to the pay-as-you-go price of "
        f"${most:g} an hour"
    )
