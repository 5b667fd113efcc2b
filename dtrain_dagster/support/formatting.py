"""The format of figures and foreign texts for people: in Dagster, in the terminal and on pages alike."""

import re

from trainer.printable import format_duration as format_duration

_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([smh])")
_MARKUP = re.compile(r"[\\`*_\[\]<>&|!#~]")
_MOST = 2000
"""The most characters of one foreign text."""


def dollars(usd: float) -> str:
    """Return ``$0.0042``, ``$0.00``, ``$1.23``, ``$1,234``: enough digits to be a figure, not more."""
    if abs(usd) >= 1000:
        return f"${usd:,.0f}"
    return f"${usd:.2f}" if abs(usd) >= 1 or usd == 0 else f"${usd:.4f}"


def seconds_of(text: str) -> float:
    """Return the seconds of a duration as ``90s``, ``30m`` or ``2h``. Raise ValueError for anything else, or none."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(f"{text!r} is no duration: give a number above 0 with its unit, as 90s, 30m or 2h")
    return seconds


def in_markdown(text: object, most: int = _MOST) -> str:
    """Return a text that nodes have written, as inert Markdown: one line, no markup, no HTML, no links, no control
    characters, at most ``most`` characters."""
    line = " ".join(str(text)[:most].split())
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", line).replace("://", "&#58;//")


def in_block(text: object) -> str:
    """Return a text that nodes have printed, as a block of Markdown which it cannot end."""
    shown = str(text)[-100_000:]
    longest = max(map(len, re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{shown}\n{fence}"
