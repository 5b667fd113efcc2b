"""The space of a search, from plain data: which fields of a job vary, and between which bounds.

    {
      "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
      "training.batch_size_per_gpu": [32, 64, 128],
      "model.factory": ["tcn", "lstm"]
    }

A name is the field of ``job.json`` that it varies. Two whole bounds make whole numbers; ``"type": "float"`` makes them
real. Ranges are Optuna's distributions. Before anything is bought, a space is checked against the job that it varies:
every field is there and accepts both ends of its range, and the least and the greatest trial with each model and loss
could be trained.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.config import PARTS, ConfigError, DistributedTrainingConfig, JobConfig, parse_job
from trainer.setting_errors import describe_errors, explain_unknown

if TYPE_CHECKING:
    import optuna

OF_CLUSTER = frozenset({
    "world_size", "backend", "master_addr", "master_port", "max_node_seconds", "resume", "regroup", "tls",
    "threads_per_rank", "checkpoint_frequency", "keep_checkpoints", "monitor_interval_seconds",
})  # fmt: skip
"""Fields of ``training`` that say where and how a job runs. What is learned does not depend on them."""
ARGUMENT = "args."
"""What a field begins with that is an argument of a script (`dtrain_dagster.search.script`)."""
Value = Any
"""A value of a parameter: None, a truth value, a number, a text, or a list or map of them."""
Space = Mapping[str, Any]
"""What a search varies: of each field, such as ``training.learning_rate``, Optuna's distribution."""
MakeTrial = Callable[[JobConfig, Mapping[str, Value], str], JobConfig]
"""Makes the job of a trial, as `job_of_trial` does."""


class SpaceError(ConfigError):
    """A space that cannot be searched. The message names the parameter, what is wrong with it, and the remedy."""


def ends_of(domain: Any) -> Sequence[Value]:
    """Return the least and the greatest value of a range; of choices all of them."""
    return (domain.low, domain.high) if (choices := getattr(domain, "choices", None)) is None else choices


def count_values(domain: Any) -> float:
    """Return the number of values of a range; infinity for one of real numbers without steps."""
    if (choices := getattr(domain, "choices", None)) is not None:
        return len(choices)
    if domain.single():
        return 1
    return round((domain.high - domain.low) / domain.step) + 1 if domain.step else math.inf


def count_trials(space: Space) -> float:
    """Return the number of trials that there can be; infinity where a parameter has a range of real numbers."""
    return math.prod(map(count_values, space.values()))


def values_of(domain: Any) -> Sequence[Value]:
    """Return all values of a range that has finitely many."""
    if (choices := getattr(domain, "choices", None)) is not None:
        return list(choices)
    if domain.single():
        return [domain.low]
    return [min(domain.low + place * domain.step, domain.high) for place in range(int(count_values(domain)))]


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
    return {str(name): _domain_of(item, f"{source}: {name}") for name, item in document.items()}


def _domain_of(item: Any, where: str) -> optuna.distributions.BaseDistribution:
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
            return given.domain()
    except ValidationError as error:
        raise SpaceError(describe_errors(error, _Item, where)) from None
    except ValueError as error:
        raise SpaceError(f"{where}: {error}") from None


def job_of_trial(base: JobConfig, values: Mapping[str, Value], source: str = "the search") -> JobConfig:
    """Return the job with these values in it. Where another model or loss is drawn than that of ``base``, the arguments
    of that one do not go along. Raise `ConfigError` for values that do not go together."""
    document = asdict(base)
    for part in PARTS:
        factory = values.get(f"{part}.factory")
        if factory is not None and factory != document[part]["factory"]:  # which `_check_field` has seen
            document[part] = {"factory": factory, "args": {}}
    for field, value in values.items():
        if field.startswith(ARGUMENT):
            continue
        *path, last = field.split(".")
        node = document
        for name in path:
            node = node[name]
        node[last] = value
    return parse_job(json.dumps(document), source=source)


def check_space(
    space: Space,
    base: JobConfig,
    check: Callable[[JobConfig], Sequence[str]] = lambda job: (),
    source: str = "space",
    make: MakeTrial = job_of_trial,
) -> list[str]:
    """Check the space against the job that it varies, and return what could not be checked, in sentences. ``check`` is
    called with the jobs at the ends of what models and losses are given: it raises `ConfigError` where such a one could
    not be trained, and returns what it could not find out. ``make`` makes the job of a trial. Raise `SpaceError`."""

    def job_of(make: MakeTrial, values: Mapping[str, Value]) -> JobConfig:
        try:
            return make(base, values, source)
        except ConfigError as error:
            said = str(error).removeprefix(f"{source}: ")
            raise SpaceError(f"{source}: a trial with {shown_values(values)}: {said}") from None

    for field in space:
        _check_field(field, base, source)
    first = {field: ends_of(domain)[0] for field, domain in space.items()}
    for field, domain in space.items():
        for end in ends_of(domain):
            job_of(job_of_trial, first | {field: end})
    said: list[str] = []
    for values in extremes(space):
        job = job_of(make, values)
        try:
            said += check(job)
        except ConfigError as error:
            raise SpaceError(
                f"{source}: a trial with {shown_values(values)} could not be trained: {error}; narrow the range, or "
                "search each model by itself"
            ) from None
    return list(dict.fromkeys(said))


def extremes(space: Space) -> list[dict[str, Value]]:
    """Return values of the least and the greatest trial with each model and loss."""
    parts = [f"{part}.factory" for part in PARTS if f"{part}.factory" in space]
    found: list[dict[str, Value]] = []
    for place in (0, -1):
        end = {field: ends_of(domain)[0 if field in parts else place] for field, domain in space.items()}
        found += [end, *(end | {part: factory} for part in parts for factory in ends_of(space[part]))]
    return [values for number, values in enumerate(found) if values not in found[:number]]


def shown_values(values: Mapping[str, Value]) -> str:
    """Return values for a person: ``training.learning_rate = 0.001, model.args.width = 32``."""
    return ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values.items()
    )


def _check_field(field: str, base: JobConfig, source: str) -> None:
    """Raise `SpaceError` for a field that no search can vary. Whether it is there is found out with the job."""
    where = f"{source}: {field}"
    section, _, rest = field.partition(".")
    if section == "training" and rest in OF_CLUSTER:
        raise SpaceError(f"{where}: {field} says how a job runs, not what it learns; set it for all trials")
    if section == "args" and rest and "=" not in rest and not any(map(str.isspace, rest)):
        if not base.is_of_script:
            raise SpaceError(
                f"{where}: args are the arguments of a script, and this job has none: name model.args.{rest}"
            )
        return
    if section in PARTS and base.is_of_script:
        raise SpaceError(
            f"{where}: the {section} of a script is the script's own: vary fields of training, or an argument of the "
            "script as args.NAME"
        )
    if section in PARTS and getattr(base, section) is None:
        raise SpaceError(f"{where}: the job has no {section} of its own; give it one that the search can begin from")
    is_argument = rest.startswith("args.") and rest.count(".") == 1 and rest != "args."
    is_setting = section == "training" and "." not in rest
    if is_setting or (section in PARTS and (rest == "factory" or is_argument)):
        return
    if section == "dataset" and is_argument and base.dataset.factory is not None:
        return
    places = [f"training.{item.name}" for item in fields(DistributedTrainingConfig) if item.name not in OF_CLUSTER]
    said = explain_unknown(field, field if rest else f"training.{section}", [*places, "model.factory", "loss.factory"])
    raise SpaceError(
        f"{where}: {said}; fields are training.NAME, model.factory, model.args.NAME; loss, optimizer and lr_scheduler "
        "alike"
    )
