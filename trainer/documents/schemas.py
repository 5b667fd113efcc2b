"""The types of the fields that are read from the documents of a run directory and from the marks beside them.

A field that is not listed may hold anything. One that is listed may be missing, as in documents of older versions,
unless it is `needed`; reading a missing key raises `DamagedError` (`trainer.documents.strict_json.Document`). What is
read as a dataclass is checked by its annotations (`record_of`). Plain functions instead of pydantic: supervisors and
sensors read thousands of these, and a supervisor must start in a moment. Events are `trainer.documents.events`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Check = Callable[[Any], str]
"""A function that returns the error of a value in words, or ""."""
_NUMBERS = int, float
LATEST = 253402214400.0
"""The last day of the year 9999, in Unix seconds: no time is later, and each is a date in every time zone."""
STATES = ("queued", "running", "succeeded", "failed", "cancelled")
"""The states of a job (`dtrain_dagster.clusters.base.JobState`)."""


def text(value: Any) -> str:
    """Check for text."""
    return "" if isinstance(value, str) else "not text"


def flag(value: Any) -> str:
    """Check for true or false."""
    return "" if isinstance(value, bool) else "neither true nor false"


def number_between(low: float = -1e150, high: float = 1e150) -> Check:
    """Return a check for a number of that range, whole or not."""

    def check(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, _NUMBERS):
            return "not a number"
        return "" if low <= value <= high else "out of range"

    return check


def whole(low: int = 0, high: int = 1 << 53) -> Check:
    """Return a check for a whole number of that range."""

    def check(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int):
            return "not a whole number"
        return "" if low <= value <= high else "out of range"

    return check


def optional(check: Check) -> Check:
    """Return a check for null, or what another check accepts."""
    return lambda value: "" if value is None else check(value)


def one_of(*values: str) -> Check:
    """Return a check for one of these texts."""
    return lambda value: "" if isinstance(value, str) and value in values else f"not one of {', '.join(values)}"


def many(check: Check) -> Check:
    """Return a check for a list whose parts pass another check."""

    def each(value: Any) -> str:
        if not isinstance(value, list | tuple):
            return "not a list"
        return next((f"a part of it is {wrong}" for part in value if (wrong := check(part))), "")

    return each


def mapping(check: Check) -> Check:
    """Return a check for an object with any keys whose values pass another check."""

    def each(value: Any) -> str:
        if not isinstance(value, dict):
            return "not an object"
        return next((f"{key!r} in it is {wrong}" for key, part in value.items() if (wrong := check(part))), "")

    return each


def every(*checks: Check) -> Check:
    """Return a check that all of these checks must pass."""
    return lambda value: next((wrong for check in checks if (wrong := check(value))), "")


def matching(pattern: str) -> Check:
    """Return a check for text that the whole pattern matches."""
    form = re.compile(pattern)
    return lambda value: "" if isinstance(value, str) and form.fullmatch(value) else "not of its form"


class Record:
    """A check for an object with fields of these types."""

    def __init__(self, needed: Mapping[str, Check], fields: Mapping[str, Check]) -> None:
        self.needed, self.fields = tuple(needed), {**needed, **fields}

    def __call__(self, value: Any) -> str:
        if not isinstance(value, dict):
            return "not an object"
        for name in self.needed:
            if name not in value:
                return f"an object without {name!r}"
        for name, test in self.fields.items():
            if name in value and (wrong := test(value[name])):
                return f"an object whose {name!r} is {wrong}"
        return ""


def record(needed: Mapping[str, Check] | None = None, /, **fields: Check) -> Record:
    """Return a check for an object with these fields; those of ``needed`` must be there."""
    return Record(needed or {}, fields)


def columns(key: str, of_one: Record) -> Check:
    """Return a check for many objects of equal fields that are stored by columns: under each field a list with its
    values in all objects, or one value that all have. Each object has its own value of the field ``key``."""
    tests = of_one.fields

    def check(value: Any) -> str:
        if not isinstance(value, dict):
            return "neither a list nor columns"
        for name in of_one.needed:
            if name not in value:
                return f"columns without {name!r}"
        if not isinstance(value[key], list):
            return f"columns whose {key!r} is not a list"
        for name in value.keys() & tests.keys():
            column, test = value[name], tests[name]
            if isinstance(column, list) and len(column) != len(value[key]):
                return f"columns whose {name!r} has another length"
            if wrong := next((wrong for part in _telling_parts(column) if (wrong := test(part))), ""):
                return f"columns whose {name!r} is {wrong}"
        return ""

    return check


def either_list(check: Check, other: Check) -> Check:
    """Return a check that passes lists whose parts pass one check, and what is no list if it passes the other."""
    each = many(check)
    return lambda value: each(value) if isinstance(value, list) else other(value)


def _telling_parts(column: Any) -> list[Any]:
    """Return the values of a column that its check has to look at: of whole numbers, whose checks all are ranges, the
    smallest and the largest. All members of a large world read such a record at once."""
    if not isinstance(column, list):
        return [column]
    return [min(column), max(column)] if set(map(type, column)) == {int} else column


def alike(names: str, check: Check) -> dict[str, Check]:
    """Return the same check for each of these fields."""
    return dict.fromkeys(names.split(), check)


moment = number_between(0.0, LATEST)
"""Unix seconds."""
seconds = number_between(0.0, 1e12)
count = whole()
figure = optional(number_between())
anything: Check = lambda value: ""  # noqa: E731
obj = mapping(anything)


@functools.cache
def record_of(kind: Any) -> Record:
    """Return a check for an object with the fields of a dataclass, by their annotations; those without a default must
    be there. ``Annotated[…, check]`` is for what another check has to say."""
    hints = get_type_hints(kind, include_extras=True)
    given = [each for each in fields(kind) if each.init]
    tests = {each.name: check_of(hints[each.name]) for each in given}
    needed = [each.name for each in given if each.default is MISSING and each.default_factory is MISSING]
    return Record({name: tests[name] for name in needed}, tests)


def check_of(hint: Any) -> Check:
    """Return the check for the values of an annotation."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        check: Check = parts[1]
        return check
    if kind in (Union, UnionType):
        [one] = [part for part in parts if part is not NoneType]
        return optional(check_of(one))
    if kind is Literal:
        return one_of(*parts)
    if kind in (tuple, Sequence):
        return many(check_of(parts[0]))
    if kind in (dict, Mapping):
        return mapping(check_of(parts[1]))
    return record_of(hint) if is_dataclass(hint) else _OF_TYPE[hint]  # type: ignore[arg-type]


_OF_TYPE: Mapping[Any, Check] = {int: count, float: number_between(), bool: flag, str: text, Any: anything}


def make(kind: type[T], data: Mapping[str, Any], /, **others: Any) -> T:
    """Return a dataclass from a document that has passed its `record_of`. Fields of later versions are left out;
    ``others`` are given instead of the document's."""
    names, tuples = _fields_of(kind)  # type: ignore[arg-type]  # a class has its own hash
    given = {name: value for name, value in data.items() if name in names}
    for name in tuples.keys() & given.keys():
        part = tuples[name]
        given[name] = tuple(given[name]) if part is None else tuple(make(part, each) for each in given[name])
    return kind(**given | others)


@functools.cache
def _fields_of(kind: Any) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the names of a dataclass's fields, and of those that are tuples the class of their parts, None for plain
    values."""
    hints, names = get_type_hints(kind), frozenset(each.name for each in fields(kind) if each.init)
    parts = {name: get_args(hint)[0] for name, hint in hints.items() if name in names and get_origin(hint) is tuple}
    return names, {name: part if is_dataclass(part) else None for name, part in parts.items()}


FinishStage = Literal["test split", "baselines", "report", "model"]
"""A stage of the finish: evaluation of the test split, of the baselines, the report on both, the model's files."""
NO_COLLECTIVE = "no collective"
"""The ``operation`` of a ``hang`` event whose rank waits in none."""
START = "start"
"""The reason of the first generation of a launch."""
LEAVING = "a node was asked to leave"
"""The reason of a generation whose lost nodes were asked to end, by an eviction or a cancellation."""

_code = whole(-(1 << 31), 1 << 32)
PRESENCE = record(
    {"node_id": count, "started_at": moment, "ended_at": optional(moment), "exit_codes": many(_code)},
    launch=count,
    generation=count,
    stay=count,
    last_seen_at=optional(moment),
    host=text,
    clock_jump_seconds=number_between(),
    ready_at=optional(moment),
    leaves_at=optional(moment),
    leaves_because=text,
    preflight=text,
    preflight_seconds=number_between(0),
    kept_since=optional(moment),
    kept_until=optional(moment),
)
"""``nodes/l0001-n000-s001.json``"""


def _holds_state(value: Any) -> str:
    """Return what is wrong with the files of a checkpoint: there is neither a state nor a first part of one."""
    if isinstance(value, dict) and any(name == "state.pt" or name.startswith("part-0000-of-") for name in value):
        return ""
    return "an object without 'state.pt'"


AT = record({"at": moment})
"""The marks of jobs and of a cluster's use."""
_file = record({"bytes": count, "sha256": text})
PART = _file
"""``checkpoints/<folder>/part-….json``"""
MANIFEST = record(
    {"fingerprint": text, "files": every(_holds_state, mapping(_file))},
    step=count,
    generation=count,
    writer=text,
    parts=obj,
    position=optional(record(epoch=count, samples=count)),
)
"""``checkpoints/<folder>/manifest.json``"""
_interval = record(low=number_between(), expected=number_between(), high=number_between())
TRAINING = record(
    max_steps=optional(count),
    **alike("world_size batch_size_per_gpu gradient_accumulation_steps checkpoint_frequency", count),
    **alike("learning_rate topk_fraction peer_timeout_seconds", number_between(0.0)),
    **alike("lr_scaling precision communication strategy", text),
)
"""What is read of the section ``training`` of ``job.json`` where `trainer.rundir.RunDir.read_job` is not called."""
_past = record(
    launch=count, sku=text, tier=optional(text), job_name=text, compute=text, node_count=count, submitted_at=moment,
    ended_at=optional(moment), studio_url=optional(text), reason=text,
)  # fmt: skip
_scores = record(
    **alike(
        "loss nll pinball coverage_90 mse_to_zero rank_ic balanced_accuracy log_loss rmse accuracy ece r2 perplexity "
        "bits_per_byte model_gain model_gain_nll model_gain_t",
        figure,
    )
)
"""The figures of a model, or of a baseline, on a split."""
DOCUMENTS: Mapping[str, Check] = {
    "job.json": record(
        job_id=text,
        run_dir=text,
        dataset=record(uri=text, dataset_id=optional(text)),
        model=record(factory=text, args=obj),
        loss=record(factory=text, args=obj),
        training=TRAINING,
        tracking=obj,
    ),
    "launch.json": record(
        job_id=text,
        command=many(text),
        node_count=count,
        processes_per_node=whole(1),
        env=mapping(text),
        master_port=optional(whole(0, 65535)),
        elastic=flag,
        launch=count,
        max_replacements=count,
        replacement_delay_seconds=seconds,
        token=text,
        sku=text,
        cluster_name=text,
        engine=text,
        successor_lead_seconds=seconds,
        preflight=text,
        gpus=count,
        keep_failed_seconds=seconds,
        submitted_at=moment,
        threads_per_rank=optional(whole(1)),
        run_dir=text,
        asked_nodes=count,
        tier=optional(text),
        compute=text,
        job_name=text,
        studio_url=optional(text),
        first_launch=count,
        first_submitted_at=moment,
        confirmed=flag,
        cancel_asked_at=optional(moment),
        stopping=text,
        missing_at=many(moment),  # of an older dtrain, like the next
        missing_cancel=text,
        missing_since=optional(moment),
        nodes_ready=optional(count),
        excluded=many(record(sku=text, tier=optional(text))),
        retry_at=optional(moment),
        waiting_since=optional(moment),
        history=many(_past),
        before=record(engine=text, cluster_name=text, sku=text, tier=optional(text), node_count=count),
        dagster_run_id=optional(text),
    ),
    "status.json": record(
        {"state": one_of(*STATES)},
        job_id=text,
        message=text,
        launch=count,
        replacements=count,
        preemptions=count,
        excluded_hosts=many(record(host=text, why=text, until=moment)),
        is_ending=flag,
        kept=many(record(node_id=count, until=moment, how=text)),
        pid=whole(1, 1 << 31),
        started_at=optional(moment),
        ended_at=optional(moment),
        stop_grace_seconds=seconds,
        exit_code=optional(whole(-(1 << 31), 1 << 32)),
        exit_codes=obj,
        studio_url=optional(text),
        phase=text,
        phase_since=optional(moment),
        starved=optional(record(since=moment, retry_at=moment)),
    ),
    "result.json": record(
        status=text,
        launch=optional(count),
        steps=count,
        error=text,
        node_id=count,
        local_rank=count,
        world_size=whole(1),
        train_seconds=seconds,
        epochs=seconds,
        weights_sha256=text,
        samples_seen=count,
        mlflow_run_id=optional(text),
        consumed=many(anything),
        test=optional(mapping(figure)),
        best_valid_loss=figure,
        best_score=optional(figure),
        best_step=count,
        **alike("early_stopped weights_equal_on_ranks", flag),
        **alike("backend device checkpoint", optional(text)),
        memory=optional(
            record(
                device=text,
                total_bytes=count,
                needed_bytes=optional(count),
            )
        ),
    ),
    "budget.json": record(max_node_seconds=optional(number_between(0.0)), stop_at_usd=optional(number_between(0.0))),
    "tracking.json": record(mlflow_run_id=optional(text)),
    "evaluation.json": record(
        model=_scores,
        baselines=mapping(_scores),
        notes=many(text),
        gate=record(passed=flag, reasons=many(text)),
        calibration=optional(many(_scores)),
        chance=optional(
            record(
                **alike("figure mode samples", text),
                **alike("value shuffled deviation", number_between()),
            )
        ),
        sample=optional(record(temperature=number_between(), **alike("text prompt", optional(text)))),
        **alike("kind task split first_date last_date", optional(text)),
        **alike("windows days", optional(count)),
    ),
    "owner.json": record(dagster_run_id=optional(text), since=moment),
    "claim.json": record({"claimed_at": moment}, dagster_run_id=text),
    "registration.json": record(name=text, version=text, alias=optional(text)),
    "plan.json": record(
        tier=text,
        sku=text,
        node_count=count,
        processes_per_node=whole(1),
        fingerprint=text,
        pace=text,
        price_words=text,
        job=obj,
        work=record(steps=count),
        estimate=record(usd=_interval, seconds=_interval, usd_per_node_hour=number_between(), node_count=count),
        stop_at_usd=optional(number_between(0.0)),
        rests_on=many(text),
    ),
    "alerts.json": obj,
    "cost_alerts.json": obj,
    "tuned.json": record(
        training=obj,
        evidence=record(
            complete=flag, candidates=many(record({"group": text, "change": obj, "verdict": text})), gain=optional(obj)
        ),
    ),
    "reports/cost_breakdown.json": record(
        metrics=record(total_cost_usd=number_between()),
        launches=optional(record(last=optional(record(usd=figure)))),
        **alike("probe_usd training_usd", number_between()),
    ),
    "checkpoints/LATEST.json": record(path=optional(text), step=optional(count), generation=count),
    "checkpoints/BEST.json": record(path=optional(text), step=optional(count), generation=count),
}
"""The forms of documents, by name in the run directory. Others may be any JSON."""
