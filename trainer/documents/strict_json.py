"""A strict JSON parser. It refuses what Python alone would read, and what a browser, a database or a float cannot
hold."""

from __future__ import annotations

import json
import re
from typing import Any

from trainer.errors import DamagedError

DEPTH = 64
"""Objects and lists within each other at most. The deepest document of ours has eight."""
LARGEST_INTEGER, LARGEST_FLOAT = 1 << 64, 1e150
"""Magnitudes beyond these are none of ours: products of two figures stay finite."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_EXPONENT = re.compile(rb"(?:^|[\s:,\[])-?[\d.]+[eE]\+?\d{3}")
"""Of a number. The names of members, which are hexadecimal, have such letters and digits, too."""
_DIGITS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19


class Document(dict[str, Any]):
    """A JSON object that was read. A missing key raises `DamagedError` with the name of the file, not KeyError."""

    __slots__ = ("where",)
    where: str

    def __missing__(self, key: str) -> Any:
        raise DamagedError(getattr(self, "where", "a document"), f"it has no {key!r}")


def parse_strict_json(data: bytes, where: str, is_named: bool = False) -> Any:
    """Return the value of a JSON text; objects are `Document`. ``where``: the file, for messages; with ``is_named`` all
    objects have it, too. Raise `DamagedError` for invalid JSON, NaN, infinities, numbers out of range, lone surrogates,
    duplicate keys and deep nesting."""
    try:
        value = (_named_decoder(where) if is_named else _DECODER).decode(data.decode())
        if _is_suspicious(data):
            _check(value)
        elif data.count(b"[") + data.count(b"{") > DEPTH:
            _check_depth(value)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(where, _words(error)) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> Document:
    found = Document(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


def _named_decoder(where: str) -> json.JSONDecoder:
    """Return a decoder that names the file on each object when it is made, so that none has to be looked for."""

    def named(pairs: list[tuple[str, Any]]) -> Document:
        found = _object(pairs)
        found.where = where
        return found

    return json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=named)


def _is_suspicious(data: bytes) -> bool:
    """Return whether half a character or a number out of range may be in it. That is rare, so most documents are not
    looked at part by part."""
    return _HALF.search(data) is not None or _EXPONENT.search(data) is not None or _LONG in data.translate(_DIGITS)


def _check_depth(value: Any) -> None:
    """Raise ValueError for objects and lists that are nested too deeply. All members of a large world read a record of
    as many objects at once: nothing but these is looked at."""
    level = [value]
    for _ in range(DEPTH):
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [part for found in parts for part in found if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEPTH} levels")


def _check(value: Any) -> None:
    """ValueError for a part of the value that must not be."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEPTH:
            raise ValueError(f"it is nested deeper than {DEPTH} levels")
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, str):
            if any("\ud800" <= character <= "\udfff" for character in item):
                raise ValueError("it contains half a character (a lone surrogate)")
        elif isinstance(item, int | float) and abs(item) > (
            LARGEST_FLOAT if isinstance(item, float) else LARGEST_INTEGER
        ):
            raise ValueError("a number in it is out of range")


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {DEPTH} levels"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    return "a number in it is out of range" if "digits" in str(error) else str(error)
