"""The sentence on a setting that cannot be used, whoever gave it: a script, a file, a launchpad, an option.

Only pydantic's findings are put into words here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ArgsKwargs, ErrorDetails

from trainer.errors import REMOVED
from trainer.secrets.redaction import redact

_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
"""Pydantic's findings on a name that is none, of a dataclass and of a model."""
_FEW = 12
"""The most names that a sentence lists."""
_LONGEST = 120
"""The most letters of a value that a sentence shows."""
_SUBJECT = re.compile(r"^(Input|String|Value|List|Dictionary|Tuple|Set|Number|URL) should ")


def describe_errors(error: ValidationError, kind: Any, source: str = "", section: str = "") -> str:
    """Return one sentence on each wrong setting of ``kind``, one to a line: its place, its value, and what would be
    accepted; on a name that is none, the nearest. ``source``: what has the settings, which begins each line;
    ``section``: their place in it, such as ``training``."""
    begin = f"{source}: " if source else ""
    items = error.errors(include_url=False)
    meant = [_nearest(item["loc"], kind) for item in items if item["type"] in _UNKNOWN]
    told = [item for item in items if not (item["type"].startswith("missing") and _dotted(item["loc"]) in meant)]
    return "\n".join(f"{begin}{describe_error(item, kind, section, bool(source))}" for item in told)


def describe_error(item: ErrorDetails, kind: Any, section: str = "", is_of_file: bool = False) -> str:
    """Return the sentence on one wrong setting. ``is_of_file``: the names of settings are told with their sections."""
    path, what, value = item["loc"], item["type"], item["input"]
    above = f"{section}." if section else ""
    here = _dotted(path)
    if what in _UNKNOWN:
        if path[-1] in REMOVED:
            return f"{above}{here} is no longer a setting: {REMOVED[str(path[-1])]}; leave it out"
        if (near := _nearest(path, kind)) is None:
            return explain_unknown(above + here, "", _names(_kind_at(kind, path[:-1])))
        within = _dotted(path[:-1])
        is_beside = near.rpartition(".")[0] == within and not is_of_file
        return f"{above}{here} is not a setting: did you mean {near.rpartition('.')[2] if is_beside else above + near}?"
    if what.startswith("missing"):
        return f"{above}{here} is missing"
    said = words_of(item)
    is_whole = what == "value_error" and (isinstance(value, Mapping | ArgsKwargs | BaseModel) or is_dataclass(value))
    if is_whole or not path:  # several settings do not go together: the message names them
        return said if not path or above + here in said else f"{above}{here}: {said}"
    return f"{above}{here} = {_shown(value)}: {said}"


def explain_unknown(place: str, name: str, known: Collection[str]) -> str:
    """Return the sentence on a ``name`` at a ``place`` that is none of those ``known``."""
    if close := difflib.get_close_matches(name, known, n=1):
        return f"{place} is not a setting: did you mean {close[0]}?"
    listed = f"choose from {', '.join(known)}" if len(known) <= _FEW else "the reference lists all"
    return f"{place} is not a setting: {listed}"


def words_of(item: ErrorDetails) -> str:
    """Return what is wrong with a value."""
    return _SUBJECT.sub("it should ", item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _shown(value: Any) -> str:
    text = repr(redact(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _dotted(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path))


def _nearest(path: tuple[int | str, ...], kind: Any) -> str | None:
    """Return the place of the setting whose name is nearest to one that is none, first of those beside it; None where
    all differ much."""
    *section, name = path
    beside = {each: _dotted((*section, each)) for each in _names(_kind_at(kind, path[:-1]))}
    for places in (beside, dict(_places(kind))):
        if close := difflib.get_close_matches(str(name), places, n=1):
            return places[close[0]]
    return None


def _names(kind: Any) -> dict[str, Any]:
    """Return the settings of a class of settings, and their types."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if not is_dataclass(kind):
        return {}
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the classes of settings in a type."""
    if _names(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def _kind_at(kind: Any, path: tuple[int | str, ...]) -> Any:
    """Return the class of the settings at a place; None where there is none."""
    for part in path:
        if isinstance(part, str):
            kind = next(_kinds(_names(kind).get(part)), None)
    return kind


def _places(kind: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting of a class and of the classes in it, and its place."""
    for name, annotation in _names(kind).items():
        yield name, place + name
        for inner in _kinds(annotation):
            yield from _places(inner, f"{place}{name}.")
