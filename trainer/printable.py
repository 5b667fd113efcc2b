"""Text for people: what comes from elsewhere (nodes, storage, services) made safe for a terminal, so that no character
in it is obeyed, and durations in words."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    r"[\x00-\x08\n-\x1f\x7f-\x9f"  # control characters but for the tabulator: they begin escape sequences
    r"\xad\u061c\u180e\u200b-\u200f\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # what is not shown
    r"\u2028-\u202e"  # ends of lines and paragraphs, and what changes the direction
    r"\ud800-\udfff]"  # halves of characters, which cannot be written
)


def visible(text: str, keep_lines: bool = False) -> str:
    r"""Return the text with an escape, such as ``\x1b`` or ``\u202e``, for every character that a terminal would obey,
    hide or reorder by; it stays on one line. With ``keep_lines`` newlines are kept, for a text that may have several
    lines."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: "\n" if keep_lines and found[0] == "\n" else ascii(found[0])[1:-1], text)


def format_duration(seconds: float) -> str:
    """Return ``42 s``, ``3 min 05 s``, ``2 h 10 min``. Pure."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
