"""Exact arithmetic for bills: integers, so that the parts of a bill always sum to it.

Time is in whole microseconds, a price in whole nano-dollars per hour, and an amount is their product: the internal unit
is the 3.6e18th part of a dollar. Nothing is ever rounded but for people to read, and then rows still sum to their total
(`shown`): what rounding takes from one row it gives to another, largest remainder first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

SECOND = 10**6
HOUR = 3600 * SECOND
NANO = 10**9
USD = HOUR * NANO
_FINE = 1 << 40


def microseconds(seconds: float) -> int:
    """Return seconds in microseconds. Raise OverflowError or ValueError where they are no finite number."""
    return round(float(seconds) * SECOND)


def nano_usd(usd_per_hour: float) -> int:
    """Return a price in nano-dollars per hour; price lists have no more digits than that."""
    return round(Decimal(str(usd_per_hour)) * NANO)


def units_of_usd(dollars: float) -> int:
    """Return dollars in units, to the nano-dollar."""
    return nano_usd(dollars) * HOUR


def usd(units: int) -> float:
    return units / USD


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole parts of a whole amount in proportion to ``weights``, which are not negative and not all zero."""
    largest = max(weights)
    shares = [round(weight / largest * _FINE) for weight in weights]
    whole = sum(shares)
    parts = [total * share // whole for share in shares]
    order = sorted(range(len(shares)), key=lambda place: (-(total * shares[place] % whole), place))
    for place in order[: total - sum(parts)]:
        parts[place] += 1
    return parts


def shown(amounts: Sequence[int], digits: int, unit: int = USD) -> list[Decimal]:
    """Return amounts in dollars (or another ``unit``) rounded to ``digits``, whose sum is that of `total_shown`."""
    if not amounts:
        return []
    step = 10**digits
    total = _rounded(sum(amounts) * step, unit)
    floors = [amount * step // unit for amount in amounts]
    left = total - sum(floors)
    order = sorted(range(len(amounts)), key=lambda place: (-(amounts[place] * step % unit), place))
    for place in order[:left]:
        floors[place] += 1
    return [Decimal(value).scaleb(-digits) for value in floors]


def total_shown(amounts: Sequence[int], digits: int) -> Decimal:
    """Return the sum of the amounts in dollars, rounded to ``digits``."""
    return Decimal(_rounded(sum(amounts) * 10**digits, USD)).scaleb(-digits)


def digits_of(units: int) -> int:
    """Return how many digits of a bill are worth reading: cents, or, of a few dollars, hundredths of a cent."""
    return 2 if units >= 10 * USD else 4 if units >= USD // 10 else 6


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rounded(value: int, unit: int) -> int:
    """The quotient to the nearest whole, half up."""
    return (2 * value + unit) // (2 * unit)
