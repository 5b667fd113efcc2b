"""The space of a search, from plain data: which fields of a job vary, between which bounds, and under which conditions.

    {
      "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
      "training.batch_size_per_gpu": [32, 64, 128],
      "model.factory": ["tcn", "lstm"],
      "model.args.channels": {"low": 16, "high": 64, "step": 16, "when": {"model.factory": "tcn"}},
      "layers of the lstm": {"field": "model.args.layers", "low": 1, "high": 3, "when": {"model.factory": "lstm"}}
    }

A name is the field that it varies, unless ``field`` says another: so one field can have several ranges, each under a
condition of its own, which is on choices that have none. Two whole bounds make whole numbers; ``"type": "float"`` makes
them real. Ranges are Optuna's. Whether the fields are there, and accept what the space says, is checked in
`dtrain_dagster.search.check_space`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.errors import ConfigError
from trainer.setting_errors import describe_errors, explain_unknown

if TYPE_CHECKING:
    import optuna

Value = Any
"""A value of a parameter: None, a truth value, a number, a text, or a list or map of them."""


MOST_VALUES = 10_000
"""The most values of a range that are counted."""


class SpaceError(ConfigError):
    """A space that cannot be searched. The message names the parameter, what is wrong with it, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One thing that varies."""

    name: str
    field: str
    """The field of ``job.json`` that it sets, such as ``training.learning_rate`` or ``model.args.width``."""
    domain: optuna.distributions.BaseDistribution
    when: Mapping[str, Sequence[Value]]
    """Name of another parameter → its values with which this one is there; all of them have to hold."""

    @property
    def choices(self) -> Sequence[Value] | None:
        """Return its choices; None for a range."""
        return getattr(self.domain, "choices", None)

    @property
    def values(self) -> Sequence[Value] | None:
        """Return all its values; None for a range of real numbers without steps, or with a great many."""
        if self.choices is not None:
            return self.choices
        found: Any = self.domain
        if not found.step or (most := round((found.high - found.low) / found.step)) > MOST_VALUES:
            return None
        return [min(found.low + number * found.step, found.high) for number in range(most + 1)]

    @property
    def ends(self) -> Sequence[Value]:
        """Return its least and its greatest value; of choices all of them."""
        found: Any = self.domain
        return (found.low, found.high) if self.choices is None else self.choices

    def is_active(self, values: Mapping[str, Value]) -> bool:
        """Return whether this parameter is there beside these values of others."""
        return all(name in values and values[name] in wanted for name, wanted in self.when.items())


@dataclass(frozen=True, slots=True)
class Space:
    """What a search varies."""

    parameters: tuple[Parameter, ...]
    """Those without a condition first."""

    @property
    def domains(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """Return the ranges of all parameters by name, as Optuna takes them."""
        return {item.name: item.domain for item in self.parameters}

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

    def combinations(self, most: int) -> list[dict[str, Value]] | None:
        """Return the values of all trials that there can be; None for a space with a range of real numbers without
        steps, or with more than ``most`` of them, where what a condition leaves out counts."""
        values = [item.values for item in self.parameters]
        if any(each is None for each in values) or math.prod(len(each or ()) for each in values) > most:
            return None
        found: dict[str, dict[str, Value]] = {}
        for chosen in itertools.product(*(each or () for each in values)):
            by_name = dict(zip(self.domains, chosen, strict=True))
            drawn = self.draw(lambda item, by_name=by_name: by_name[item.name])  # type: ignore[misc]
            found[repr(drawn)] = drawn
        return list(found.values())

    def corners(self) -> list[dict[str, Value]]:
        """Return values of trials that together have each end of each range and each choice, under its condition, and
        else the first value of everything."""
        found: list[dict[str, Value]] = []
        for parameter in self.parameters:
            for end in parameter.ends:
                fixed = {parameter.name: end, **{of: wanted[0] for of, wanted in parameter.when.items()}}
                values = self.draw(lambda item, fixed=fixed: fixed.get(item.name, item.ends[0]))  # type: ignore[misc]
                if values not in found:
                    found.append(values)
        return found


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("it should be a number")
    return value


Number = Annotated[Any, AfterValidator(_number)]


class _Item(BaseModel):
    """A parameter as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    field: str | None = None
    type: Literal["int", "float"] | None = None
    low: Number = None
    high: Number = None
    log: bool = False
    step: Number = None
    choices: list[Any] | None = Field(default=None, min_length=1)
    when: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one_thing(self) -> _Item:
        of_range = self.model_fields_set & {"low", "high", "log", "step", "type"}
        if self.choices is not None and of_range:
            raise ValueError(f"{min(of_range)} belongs to a range, not to choices: give one of the two")
        if self.choices is None and (self.low is None or self.high is None):
            raise ValueError("give either choices, or low and high")
        return self

    def domain(self) -> optuna.distributions.BaseDistribution:
        """Return the range, or the choices. Raise ValueError for one that cannot be."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices is not None:
            if twice := [value for place, value in enumerate(self.choices) if value in self.choices[:place]]:
                raise ValueError(f"{twice[0]!r} is listed twice; list each choice once")
            return CategoricalDistribution(self.choices)
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise ValueError(f"step = {self.step} does not fit between {self.low} and {self.high}")
        numbers = [value for value in (self.low, self.high, self.step) if value is not None]
        are_whole = all(value == int(value) for value in numbers)
        if self.type == "float" or (self.type is None and not (type(self.low) is type(self.high) is int)):
            return FloatDistribution(self.low, self.high, log=self.log, step=self.step)
        if not are_whole:
            raise ValueError("whole numbers need whole bounds and steps; or type float")
        return IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))


def parse_space(document: Any, source: str = "space") -> Space:
    """Return the space that plain data describes. Raise `SpaceError` for what cannot be searched."""
    if not isinstance(document, Mapping) or not document:
        what = "it is empty" if not document else f"it is a {type(document).__name__}"
        raise SpaceError(
            f"{source}: {what}; name at least one field and its range, such as "
            '{"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true}}'
        )
    parameters = [_parameter(str(name), item, f"{source}: {name}") for name, item in document.items()]
    by_name = {item.name: item for item in parameters}
    for place, item in enumerate(parameters):
        for of, wanted in item.when.items():
            _check_condition(of, wanted, by_name, f"{source}: {item.name}")
        for other in parameters[:place]:
            if item.field == other.field and not _exclude_each_other(item, other):
                raise SpaceError(
                    f"{source}: {other.name} and {item.name} both set {item.field}, and can be used at once; give "
                    "them conditions on the same parameter with different values"
                )
    return Space(tuple(sorted(parameters, key=lambda item: bool(item.when))))


def _parameter(name: str, item: Any, where: str) -> Parameter:
    if isinstance(item, list | tuple):
        item = {"choices": list(item)}
    if not isinstance(item, Mapping):
        raise SpaceError(
            f'{where} = {item!r} is not a range: give a list of values, or {{"low": …, "high": …}}; a field that does '
            "not vary belongs in the job itself"
        )
    try:
        given = _Item.model_validate(dict(item))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lists as choices, which Optuna's own files cannot have
            domain = given.domain()
    except ValidationError as error:
        raise SpaceError(describe_errors(error, _Item, where)) from None
    except ValueError as error:
        raise SpaceError(f"{where}: {error}") from None
    when = {of: value if isinstance(value, list) else [value] for of, value in given.when.items()}
    return Parameter(name=name, field=given.field or name, domain=domain, when=when)


def _check_condition(of: str, wanted: Sequence[Value], by_name: Mapping[str, Parameter], where: str) -> None:
    """Raise `SpaceError` for a condition on what is not there, or on values that it cannot have."""
    if of not in by_name:
        raise SpaceError(f"{where}: its condition {explain_unknown(of, of, by_name)}")
    choices = by_name[of].choices
    if choices is None or by_name[of].when:
        raise SpaceError(f"{where}: its condition is on {of}: conditions are on choices that have none themselves")
    if not wanted or any(value not in choices for value in wanted):
        known = ", ".join(map(str, choices))
        raise SpaceError(f"{where}: its condition wants {of} = {wanted!r}, and it has only {known}")


def _exclude_each_other(one: Parameter, other: Parameter) -> bool:
    shared = one.when.keys() & other.when.keys()
    return any(not any(value in other.when[name] for value in one.when[name]) for name in shared)
