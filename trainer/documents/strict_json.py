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
        if _HALF.search(data) is not None:
            json.dumps(value, ensure_ascii=False).encode()
        if data.count(b"[") + data.count(b"{") > DEPTH:
            _check_depth(value)
        return value
    except (ValueError, RecursionError) as error:
        raise DamagedError(where, _words(error)) from None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [part for found in parts for part in found if isinstance(part, dict | list)]
        if not level:
            return
    raise RecursionError


def _object(pairs: list[tuple[str, Any]]) -> Document:
    found = Document(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _integer(text: str) -> int:
    if len(text) > 21 or abs(value := int(text)) > LARGEST_INTEGER:
        raise ValueError("a number in it is out of range")
    return value


def _float(text: str) -> float:
    if abs(value := float(text)) > LARGEST_FLOAT:
        raise ValueError("a number in it is out of range")
    return value


def _decoder(make: Any) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_constant=_refuse_constant, object_pairs_hook=make, parse_int=_integer, parse_float=_float
    )


_DECODER = _decoder(_object)


def _named_decoder(where: str) -> json.JSONDecoder:
    """Return a decoder that names the file on each object when it is made, so that none has to be looked for."""

    def named(pairs: list[tuple[str, Any]]) -> Document:
        found = _object(pairs)
        found.where = where
        return found

    return _decoder(named)


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {DEPTH} levels"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 at byte {error.start}"
    if isinstance(error, UnicodeEncodeError):
        return "it contains half a character (a lone surrogate)"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    return str(error)
