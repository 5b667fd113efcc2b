"""The space of a search, from plain data: which fields of a job vary, and between which bounds.

    {
      "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
      "training.batch_size_per_gpu": [32, 64, 128],
      "model.factory": ["tcn", "lstm"]
    }

A name is the field of ``job.json`` that it varies. Two whole bounds make whole numbers; ``"type": "float"`` makes them
real. Ranges are Optuna's. Whether the fields are there, and accept what the space says, is checked in
`dtrain_dagster.search.check_space`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.errors import ConfigError
from trainer.setting_errors import describe_errors

if TYPE_CHECKING:
    import optuna

Value = Any
"""A value of a parameter: None, a truth value, a number, a text, or a list or map of them."""


class SpaceError(ConfigError):
    """A space that cannot be searched. The message names the parameter, what is wrong with it, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One thing that varies."""

    name: str
    """The field that it sets, such as ``training.learning_rate`` or ``model.args.width``."""
    domain: optuna.distributions.BaseDistribution

    @property
    def choices(self) -> Sequence[Value] | None:
        """Return its choices; None for a range."""
        return getattr(self.domain, "choices", None)

    @property
    def count(self) -> float:
        """Return the number of its values; infinity for a range of real numbers without steps."""
        found: Any = self.domain
        if self.choices is not None:
            return len(self.choices)
        return round((found.high - found.low) / found.step) + 1 if found.step else math.inf

    def value(self, place: int) -> Value:
        """Return one of finitely many values by its place among them, counted from 0."""
        found: Any = self.domain
        return min(found.low + place * found.step, found.high) if self.choices is None else self.choices[place]

    @property
    def ends(self) -> Sequence[Value]:
        """Return its least and its greatest value; of choices all of them."""
        found: Any = self.domain
        return (found.low, found.high) if self.choices is None else self.choices


@dataclass(frozen=True, slots=True)
class Space:
    """What a search varies."""

    parameters: tuple[Parameter, ...]

    @property
    def domains(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """Return the ranges of all parameters by name, as Optuna takes them."""
        return {item.name: item.domain for item in self.parameters}

    @property
    def size(self) -> float:
        """Return the number of trials that there can be; infinity where a parameter has a range of real numbers."""
        return math.prod(item.count for item in self.parameters)

    def values(self, place: int) -> dict[str, Value]:
        """Return the values of one of finitely many trials by its place among them, counted from 0."""
        found = {}
        for item in self.parameters:
            place, own = divmod(place, int(item.count))
            found[item.name] = item.value(own)
        return found

    def corners(self) -> list[dict[str, Value]]:
        """Return values of trials that together have each end of each range and each choice, and else the first value
        of everything."""
        first = {item.name: item.ends[0] for item in self.parameters}
        found = [first | {item.name: end} for item in self.parameters for end in item.ends]
        return [values for place, values in enumerate(found) if values not in found[:place]]


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("it should be a number")
    return value


Number = Annotated[Any, AfterValidator(_number)]


class _Item(BaseModel):
    """A parameter as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["int", "float"] | None = None
    low: Number = None
    high: Number = None
    log: bool = False
    step: Number = None
    choices: list[Any] | None = Field(default=None, min_length=1)

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
    return Space(tuple(_parameter(str(name), item, f"{source}: {name}") for name, item in document.items()))


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
    return Parameter(name=name, domain=domain)
