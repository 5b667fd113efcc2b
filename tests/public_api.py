"""The public API as text: what `docs/architecture.md` names, with signatures, fields and defaults.

``python -m tests.public_api`` writes it anew, where a change is meant and stands in the changelog.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
DOCUMENT, SNAPSHOT = ROOT / "docs" / "architecture.md", ROOT / "tests" / "public_api.txt"


def documented() -> dict[str, list[str]]:
    """Module → public names, from the tables of the documentation and the classes that it describes."""
    text = DOCUMENT.read_text().partition("\n## Public API\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \|$", text, flags=re.MULTILINE)
    found = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    for module, name in re.findall(r"^\.\. autoclass:: ([\w.]+)\.(\w+)$", text, flags=re.MULTILINE):
        if name not in found.setdefault(module, []):
            found[module].append(name)
    return found


def render() -> str:
    """The public API, a line for each function, class, field, method and property."""
    lines = []
    for module, names in documented().items():
        found = importlib.import_module(module)
        for name in names:
            lines += describe(f"{module}.{name}", getattr(found, name))
    return "\n".join(lines) + "\n"


def describe(name: str, item: Any) -> Iterator[str]:
    """The lines of one public name."""
    if not inspect.isclass(item):
        yield f"{name}{signature(item)}" if callable(item) else f"{name}: {type(item).__name__}"
        return
    bases = ", ".join(base.__name__ for base in item.__bases__ if base is not object)
    fields = dict(fields_of(item))
    of_fields = dataclasses.is_dataclass(item) or issubclass(item, BaseModel | BaseException)
    yield f"{name}{f' < {bases}' if bases else ''}{'' if of_fields else signature(item)}"
    yield from (f"{name}.{field}{text}" for field, text in fields.items())
    for member in sorted(vars(item)):
        value = inspect.getattr_static(item, member)
        if member.startswith("_") or member in fields or member.startswith("model_"):
            continue
        if isinstance(value, property):
            yield f"{name}.{member}: property"
        elif isinstance(value, staticmethod | classmethod):
            yield f"{name}.{member}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}.{member}{signature(value)}"


def fields_of(item: type) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass or of a pydantic model, with types and defaults."""
    if issubclass(item, BaseModel):
        for name, field in item.model_fields.items():
            yield name, f" = {default_of(field)}"
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            if not field.name.startswith("_"):
                default = field.default
                if default is dataclasses.MISSING:
                    text = "required" if field.default_factory is dataclasses.MISSING else "made anew"
                else:
                    text = default_of(default) if isinstance(default, FieldInfo) else stable(default)
                yield field.name, f": {field.type} = {text}"


def default_of(field: FieldInfo) -> str:
    """The default of a field of pydantic."""
    if field.default_factory is not None:
        return "made anew"
    return "required" if field.default is PydanticUndefined or field.default is ... else stable(field.default)


def signature(item: Any) -> str:
    """The arguments of something that can be called."""
    return stable(inspect.signature(item), str)


def stable(value: Any, words: Any = repr) -> str:
    """A value in words that do not change from process to process, or with the place of this repository."""
    return re.sub(r" at 0x[0-9a-f]+", "", words(value)).replace(str(ROOT), "…")


if __name__ == "__main__":
    SNAPSHOT.write_text(render())
