"""Text for people: what comes from elsewhere (nodes, storage, services) made safe for a terminal, so that no character
in it is obeyed, and durations in words."""

from __future__ import annotations

import re

_RANGES = (
    (0x00, 0x08), (0x0A, 0x1F), (0x7F, 0x9F),  # control characters but for the tabulator: they begin escape sequences
    (0xAD, 0xAD), (0x61C, 0x61C), (0x180E, 0x180E), (0x200B, 0x200F), (0x2060, 0x206F), (0xFEFF, 0xFEFF),
    (0xFFF9, 0xFFFB), (0xE0000, 0xE007F),  # what is not shown, or changes the direction
    (0x2028, 0x202E),  # ends of lines and paragraphs, and direction
    (0xD800, 0xDFFF),  # halves of characters, which cannot be written
)  # fmt: skip
_NEWLINE = 0x0A


def _pattern(ranges: tuple[tuple[int, int], ...]) -> re.Pattern[str]:
    return re.compile("[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]+")


_UNSAFE = _pattern(_RANGES)
_UNSAFE_BUT_LINES = _pattern(tuple((0x0B, high) if low == _NEWLINE else (low, high) for low, high in _RANGES))


def visible(text: str, keep_lines: bool = False) -> str:
    r"""Return the text with an escape, such as ``\x1b`` or ``\u202e``, for every character that a terminal would obey,
    hide or reorder by; it stays on one line. With ``keep_lines`` newlines are kept, for a text that may have several
    lines."""
    if text.isprintable():
        return text
    return (_UNSAFE_BUT_LINES if keep_lines else _UNSAFE).sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].translate(_ESCAPES)


def _written(code: int) -> str:
    if code in (_NEWLINE, 0x0D):
        return "\\n" if code == _NEWLINE else "\\r"
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"


_ESCAPES = {code: _written(code) for low, high in _RANGES for code in range(low, high + 1)}
"""The escape of each such character, made once, since a text may be full of them."""


def format_duration(seconds: float) -> str:
    """Return ``42 s``, ``3 min 05 s``, ``2 h 10 min``. Pure."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
