"""The space of a search, from plain data: which fields of a job vary, between which bounds, and under which conditions.

    {
      "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
      "training.batch_size_per_gpu": [32, 64, 128],
      "model.factory": ["tcn", "lstm"],
      "model.args.channels": {"low": 16, "high": 64, "step": 16, "when": {"model.factory": "tcn"}},
      "layers of the lstm": {"field": "model.args.layers", "low": 1, "high": 3, "when": {"model.factory": "lstm"}}
    }

A name is the field that it varies, unless ``field`` says another: so one field can have several ranges, each under a
condition of its own. Two whole bounds make whole numbers; ``"type": "float"`` makes them real. Whether the fields are
there, and accept what the space says, is checked in `dtrain_dagster.search.check_space`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import ConfigError

Value = Any
"""A value of a parameter: None, a truth value, a number, a text, or a list or map of them."""
KEYS = ("field", "type", "low", "high", "log", "step", "choices", "when")
MOST_STEPS = 10**9
"""Largest number of values that a range in steps may have."""


class SpaceError(ConfigError):
    """A space that cannot be searched. The message names the parameter, what is wrong with it, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False
    """Whether they are drawn evenly by their logarithm."""
    step: float | None = None
    whole: bool = False
    """Whether they are whole numbers."""

    def at(self, share: float) -> int | float:
        """Return the number at this share of the range, from 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        if self.step is not None:
            count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
            value: float = self.low + self.step * min(count - 1, int(share * count))
            return round(value) if self.whole else value
        if self.whole:
            edges = (math.log(self.low - 0.5), math.log(self.high + 0.5)) if self.log else (low - 0.5, high + 0.5)
            value = edges[0] + share * (edges[1] - edges[0])
            return round(min(max(math.exp(value) if self.log else value, self.low), self.high))
        if share in (0.0, 1.0):
            return self.high if share else self.low
        value = low + share * (high - low)
        return min(max(math.exp(value) if self.log else value, self.low), self.high)

    def ends(self) -> tuple[int | float, ...]:
        """Return the least and the greatest number."""
        return (self.at(0.0), self.at(1.0)) if self.low != self.high else (self.at(0.0),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """One of some values."""

    values: tuple[Value, ...]

    def at(self, share: float) -> Value:
        """Return the value at this share of the list, from 0 to 1."""
        return self.values[min(len(self.values) - 1, int(share * len(self.values)))]

    def ends(self) -> tuple[Value, ...]:
        """Return all of them."""
        return self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One thing that varies."""

    name: str
    field: str
    """The field of ``job.json`` that it sets, such as ``training.learning_rate`` or ``model.args.width``."""
    domain: Range | Choices
    when: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    """Name of another parameter → its values with which this one is there; all of them have to hold."""

    def is_active(self, values: Mapping[str, Value]) -> bool:
        """Return whether this parameter is there beside these values of others."""
        return all(name in values and values[name] in wanted for name, wanted in self.when.items())


@dataclass(frozen=True, slots=True)
class Space:
    """What a search varies."""

    parameters: tuple[Parameter, ...]
    """In an order in which each comes after those that its condition names."""

    def draw(self, choose: Callable[[Parameter], Value]) -> dict[str, Value]:
        """Return the values of one trial, by name; ``choose`` is called for each parameter that is there."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.is_active(values):
                values[parameter.name] = choose(parameter)
        return values

    def fields_of(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return field of ``job.json`` → value for the values of a trial."""
        return {item.field: values[item.name] for item in self.parameters if item.name in values}

    def corners(self) -> list[dict[str, Value]]:
        """Return values of trials that together have each end of each range and each choice, under its condition, and
        else the first value of everything."""
        found: list[dict[str, Value]] = []
        for parameter in self.parameters:
            for end in parameter.domain.ends():
                fixed = {parameter.name: end}
                self._fix(parameter, fixed)
                values = self.draw(lambda item, fixed=fixed: fixed.get(item.name, item.domain.at(0.0)))  # type: ignore[misc]
                if values not in found:
                    found.append(values)
        return found

    def _fix(self, parameter: Parameter, fixed: dict[str, Value]) -> None:
        """Add the values of others with which this parameter is there."""
        by_name = {item.name: item for item in self.parameters}
        for name, wanted in parameter.when.items():
            if name not in fixed:
                fixed[name] = wanted[0]
                self._fix(by_name[name], fixed)


def parse_space(document: Any, source: str = "space") -> Space:
    """Return the space that plain data describes. Raise `SpaceError` for what cannot be searched."""
    if not isinstance(document, Mapping) or not document:
        what = "it is empty" if not document else f"it is a {type(document).__name__}"
        raise SpaceError(
            f"{source}: {what}; name at least one field and its range, such as "
            '{"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true}}'
        )
    parameters = [_parameter(str(name), item, source) for name, item in document.items()]
    ordered = _in_order(parameters, source)
    _refuse_twice(ordered, source)
    return Space(tuple(ordered))


def _parameter(name: str, item: Any, source: str) -> Parameter:
    where = f"{source}: {name}"
    if isinstance(item, list | tuple):
        item = {"choices": list(item)}
    if not isinstance(item, Mapping):
        raise SpaceError(
            f'{where} = {item!r} is not a range: give a list of values, or {{"low": …, "high": …}}; a field that does '
            "not vary belongs in the job itself"
        )
    if unknown := [str(key) for key in item if key not in KEYS]:
        raise SpaceError(f"{where} has {unknown[0]!r}, which is unknown{did_you_mean(unknown[0], KEYS)}")
    if ("choices" in item) == ("low" in item or "high" in item):
        raise SpaceError(f"{where}: give either choices, or low and high")
    domain = _choices(item, where) if "choices" in item else _range(item, where)
    when = item.get("when") or {}
    if not isinstance(when, Mapping):
        raise SpaceError(
            f'{where}: when = {when!r} is not a condition: give {{"model.factory": "tcn"}} or a list of values'
        )
    conditions = {str(of): tuple(value) if isinstance(value, list | tuple) else (value,) for of, value in when.items()}
    if empty := [of for of, values in conditions.items() if not values]:
        raise SpaceError(f"{where}: its condition on {empty[0]} names no value, so it would never be used; name one")
    return Parameter(name=name, field=str(item.get("field", name)), domain=domain, when=conditions)


def _choices(item: Mapping[str, Any], where: str) -> Choices:
    if extra := [key for key in ("log", "step", "type") if key in item]:
        raise SpaceError(f"{where}: {extra[0]} belongs to a range with low and high, not to choices; leave it out")
    values = item["choices"]
    if not isinstance(values, list | tuple) or not values:
        raise SpaceError(f"{where}: choices = {values!r} has no value to choose; give a list of at least one")
    marks = [json.dumps(value, sort_keys=True, default=repr) for value in values]
    if twice := [value for value, mark in zip(values, marks, strict=True) if marks.count(mark) > 1]:
        raise SpaceError(f"{where}: {twice[0]!r} is listed twice; list each choice once")
    return Choices(values=tuple(values))


def _range(item: Mapping[str, Any], where: str) -> Range:
    bounds: dict[str, float] = {}
    for key in ("low", "high"):
        value = item.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SpaceError(f"{where}: {key} = {value!r} is not a number; a range needs low and high")
        bounds[key] = value
    low, high, log, step = bounds["low"], bounds["high"], item.get("log", False), item.get("step")
    kind = item.get("type", "int" if isinstance(low, int) and isinstance(high, int) else "float")
    if kind not in ("int", "float"):
        raise SpaceError(
            f"{where}: type = {kind!r} is neither int nor float{did_you_mean(str(kind), ('int', 'float'))}"
        )
    if not isinstance(log, bool):
        raise SpaceError(f"{where}: log = {log!r} is neither true nor false")
    if low > high:
        raise SpaceError(f"{where}: low = {low:g} is above high = {high:g}; swap the two")
    whole = kind == "int"
    if whole and (low != int(low) or high != int(high)):
        raise SpaceError(f"{where}: whole numbers need whole bounds, and low = {low:g}, high = {high:g}; or type float")
    if log and low <= 0:
        raise SpaceError(f"{where}: there is no logarithm of low = {low:g}; take a low above 0, or leave log out")
    if step is not None:
        if isinstance(step, bool) or not isinstance(step, int | float) or not (math.isfinite(step) and step > 0):
            raise SpaceError(
                f"{where}: step = {step!r} is not a number above 0; leave it out for a range without steps"
            )
        if log:
            raise SpaceError(f"{where}: log and step cannot be combined; give choices instead")
        if whole and step != int(step):
            raise SpaceError(f"{where}: step = {step:g} of whole numbers has to be whole; or give type float")
        if step > high - low or (high - low) / step > MOST_STEPS:
            raise SpaceError(f"{where}: step = {step:g} does not fit between {low:g} and {high:g}; take another")
    return Range(low=low, high=high, log=log, step=step, whole=whole)


def _in_order(parameters: Sequence[Parameter], source: str) -> list[Parameter]:
    """Return them so that each comes after those that its condition names. Raise `SpaceError` for a condition on
    what is not there, for values that it cannot have, and for conditions that go in a circle."""
    by_name = {item.name: item for item in parameters}
    for item in parameters:
        for of, wanted in item.when.items():
            where = f"{source}: {item.name}"
            if of not in by_name:
                raise SpaceError(
                    f"{where}: its condition names {of!r}, which the space lacks{did_you_mean(of, by_name)}"
                )
            domain = by_name[of].domain
            if not isinstance(domain, Choices):
                raise SpaceError(f"{where}: its condition is on {of}, which is a range; conditions are on choices")
            if missing := [value for value in wanted if value not in domain.values]:
                known = ", ".join(map(str, domain.values))
                raise SpaceError(f"{where}: its condition wants {of} = {missing[0]!r}, and it has only {known}")
    ordered: list[Parameter] = []
    left = list(parameters)
    while left:
        done = {item.name for item in ordered}
        ready = [item for item in left if done >= item.when.keys()]
        if not ready:
            names = ", ".join(item.name for item in left)
            raise SpaceError(f"{source}: the conditions of {names} form a cycle; remove the condition of one of them")
        ordered += ready
        left = [item for item in left if item not in ready]
    return ordered


def _refuse_twice(parameters: Sequence[Parameter], source: str) -> None:
    """Raise `SpaceError` where two parameters of one field can be there at once."""
    for number, item in enumerate(parameters):
        for other in parameters[:number]:
            if item.field == other.field and not _exclude_each_other(item, other):
                raise SpaceError(
                    f"{source}: {other.name} and {item.name} both set {item.field}, and can be used at once; give "
                    "them conditions on the same parameter with different values"
                )


def _exclude_each_other(one: Parameter, other: Parameter) -> bool:
    shared = one.when.keys() & other.when.keys()
    return any(not any(value in other.when[name] for value in one.when[name]) for name in shared)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that looks like this one, and else at all of them; "" where there are none."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(names)}" if names and len(names) <= 20 else ""
