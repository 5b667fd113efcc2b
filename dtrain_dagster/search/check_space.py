"""The check of a space against the job that it varies, before anything is bought: every field is there and accepts both
ends of its range, and the least and the greatest trial with each model and loss could be trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields

from dtrain_dagster.search.space import Parameter, Space, SpaceError, Value
from trainer.config import PARTS, ConfigError, DistributedTrainingConfig, JobConfig, parse_job
from trainer.setting_errors import explain_unknown

OF_CLUSTER = frozenset({
    "world_size", "backend", "master_addr", "master_port", "max_node_seconds", "resume", "regroup", "tls",
    "threads_per_rank", "checkpoint_frequency", "keep_checkpoints", "monitor_interval_seconds",
})  # fmt: skip
"""Fields of ``training`` that say where and how a job runs. What is learned does not depend on them."""
ARGUMENT = "args."
"""What a field begins with that is an argument of a script (`dtrain_dagster.search.script`)."""


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
    space: Space, base: JobConfig, check: Callable[[JobConfig], Sequence[str]] = lambda job: (), source: str = "space"
) -> list[str]:
    """Check the space against the job that it varies, and return what could not be checked, in sentences. ``check`` is
    called with the jobs at the ends of what models and losses are given: it raises `ConfigError` where such a one could
    not be trained, and returns what it could not find out. Raise `SpaceError`."""
    for parameter in space.parameters:
        _check_field(parameter, base, source)
    for values in space.corners():
        try:
            job_of_trial(base, values, source)
        except ConfigError as error:
            said_of_it = str(error).removeprefix(f"{source}: ")
            raise SpaceError(f"{source}: a trial with {shown_values(values)}: {said_of_it}") from None
    said: list[str] = []
    for values in extremes(space):
        try:
            said += check(job_of_trial(base, values, source))
        except ConfigError as error:
            raise SpaceError(
                f"{source}: a trial with {shown_values(values)} could not be trained: {error}; narrow the range, or "
                "search each model by itself"
            ) from None
    return list(dict.fromkeys(said))


def extremes(space: Space) -> list[dict[str, Value]]:
    """Return values of the least and the greatest trial with each model and loss."""
    parts = [item for item in space.parameters if item.name in [f"{part}.factory" for part in PARTS]]
    found: list[dict[str, Value]] = []
    for place in (0, -1):
        end = {item.name: item.ends[0 if item in parts else place] for item in space.parameters}
        found += [end, *(end | {part.name: factory} for part in parts for factory in part.ends)]
    return [values for number, values in enumerate(found) if values not in found[:number]]


def shown_values(values: Mapping[str, Value]) -> str:
    """Return values for a person: ``training.learning_rate = 0.001, model.args.width = 32``."""
    return ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values.items()
    )


def _check_field(parameter: Parameter, base: JobConfig, source: str) -> None:
    """Raise `SpaceError` for a field that no search can vary. Whether it is there is found out with the job."""
    where, field = f"{source}: {parameter.name}", parameter.name
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
    if section == "training" or (section in PARTS and (rest == "factory" or is_argument)):
        return
    if section == "dataset" and is_argument and base.dataset.factory is not None:
        return
    places = [f"training.{item.name}" for item in fields(DistributedTrainingConfig) if item.name not in OF_CLUSTER]
    said = explain_unknown(field, field if rest else f"training.{section}", [*places, "model.factory", "loss.factory"])
    raise SpaceError(
        f"{where}: {said}; fields are training.NAME, model.factory, model.args.NAME; loss, optimizer and lr_scheduler "
        "alike"
    )
