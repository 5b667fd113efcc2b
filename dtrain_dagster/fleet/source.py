"""Where the jobs of a fleet come from: `JobSource`. A list that is known beforehand is the simplest one, and a file in
YAML or JSON has such a list: the fleet's limits, and its jobs with what `dtrain train` takes as options. Each of its
fields is checked before anything else happens; what a job trains, and whether that can be done, is checked by whoever
makes orders of it.

A source remembers nothing: after the orchestrator was killed, a new one is told which jobs were given before, with what
it has noted on each (`FleetJob.facts`), and asked which ends it wants to be told again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dtrain_dagster.fleet.jobs import FleetError, FleetJob, Standing
from trainer.documents.events import EvaluationEvent
from trainer.setting_errors import describe_error


class JobSource:
    """Gives jobs to a fleet, and judges them as they run; by itself it gives none. All calls come from one thread."""

    def resume(self, given: Sequence[FleetJob]) -> Collection[str]:
        """Take over the jobs that were given before, in their order, and return the ids of those of whose end it has to
        be told again, if they are over. Called once, first. Raise `FleetError` where they cannot be its own."""
        return ()

    def next_job(self) -> FleetJob | None:
        """Return one more job; None where there is none now. The fleet is over when it gives none and no job runs or
        can be continued."""
        return None

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        """Return why a running job is to be ended now, for people to read; "" where it goes on. ``evaluations``: all
        that it has had of its validation split, in order of steps. It is asked at each look."""
        return ""

    def on_end(self, standing: Standing, evaluations: Sequence[EvaluationEvent]) -> None:
        """Take note that a job is over, and of its evaluations."""


class ListedJobs(JobSource):
    """The jobs of a list, which all wait from the beginning; none is ever ended for what it has learned."""

    def __init__(self, jobs: Iterable[FleetJob]) -> None:
        self._left = list(jobs)[::-1]

    def resume(self, given: Sequence[FleetJob]) -> Collection[str]:
        """Leave out what was given before."""
        known = {job.job_id for job in self._left}
        if lost := [job.job_id for job in given if job.job_id not in known]:
            raise FleetError(
                f"job {lost[0]} was given before, and is not there now: give the same jobs, or the fleet another name"
            )
        ids = {job.job_id for job in given}
        self._left = [job for job in self._left if job.job_id not in ids]
        return ()

    def next_job(self) -> FleetJob | None:
        """Return the next job of the list."""
        return self._left.pop() if self._left else None


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
MOST_JOBS = 10_000


class JobEntry(BaseModel):
    """A job in the file of a fleet."""

    model_config = _STRICT

    name: str = Field(pattern=_NAME)
    """Its id on the cluster is ``<fleet>-<name>``."""
    dataset: str | None = None
    """A folder, an id, ``latest``, or a function that makes it, as ``--dataset``."""
    config: str | None = None
    """A job.json, as ``--config``."""
    script: str | None = None
    """A script that calls Trainer(…).fit(…), as ``--script``, with these:"""
    arguments: list[str] = Field(default_factory=list)
    model: str | None = None
    loss: str | None = None
    epochs: int | None = Field(default=None, ge=1)
    set: dict[str, Any] = Field(default_factory=dict)
    """Any field, as ``--set``: ``training.learning_rate: 0.001``."""
    expected_node_minutes: float | None = Field(default=None, gt=0)
    """Minutes that its nodes are expected to need, added up; None: what past runs tell, or a guess. The job corrects it
    as it runs."""
    startup_seconds: float | None = Field(default=None, ge=0)
    """None: what past runs took, where the job's work is expected by them, else 20."""
    priority: int = 0
    nodes: int = Field(default=1, ge=1)
    deadline_hours: float | None = Field(default=None, gt=0)
    """Hours from the beginning of the fleet."""

    @model_validator(mode="after")
    def _trains_one_thing(self) -> JobEntry:
        given = [name for name in ("dataset", "config", "script") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"it has {' and '.join(given)}, which cannot be combined: keep one"
                if given
                else "it has no data: give dataset, config or script"
            )
        if self.script is None and self.arguments:
            raise ValueError("arguments belong to a script")
        own = [name for name in ("model", "loss") if getattr(self, name) is not None]
        if self.script is not None and own:
            raise ValueError(f"{own[0]} cannot be combined with script: the script has its own")
        return self


class FleetFile(BaseModel):
    """The file of a fleet."""

    model_config = _STRICT

    name: str = Field(pattern=_NAME)
    budget_usd: float = Field(gt=0)
    nodes: int | None = Field(default=None, ge=1)
    """Nodes that its jobs may have at once; None: DTRAIN_NODES."""
    deadline_hours: float | None = Field(default=None, gt=0)
    """Hours from its beginning."""
    margin_seconds: float = Field(default=30.0, gt=0)
    """See `dtrain_dagster.fleet.jobs.FleetLimits`."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Fields of every job that does not give them itself."""
    jobs: list[JobEntry] = Field(min_length=1, max_length=MOST_JOBS)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Put the defaults into every job; those of ``set`` field by field."""
        if not isinstance(data, dict) or not isinstance(data.get("jobs"), list):
            return data
        if "slice_seconds" in data:  # else the remedy would be a name that is nearly the same
            raise ValueError("slice_seconds is no longer a setting: each job is promised the dollars to its end")
        defaults = data.get("defaults") or {}
        if not isinstance(defaults, dict):
            return data
        if "name" in defaults:
            raise ValueError("defaults.name: each job has a name of its own")
        return data | {"jobs": [_with_defaults(job, defaults) for job in data["jobs"]]}

    @model_validator(mode="after")
    def _names_differ(self) -> FleetFile:
        names = [job.name for job in self.jobs]
        for number, name in enumerate(names):
            if names.index(name) != number:
                raise ValueError(f"jobs.{number}.name: {name!r} is the name of jobs.{names.index(name)} already")
        return self


def parse_fleet(text: str, source: str) -> FleetFile:
    """Return the fleet of a file's text. Raise `FleetError`, which names the field, for one that cannot be used."""
    import yaml

    try:
        data = yaml.safe_load(text)  # of which JSON is a part
    except yaml.YAMLError as error:
        raise FleetError(f"{source} is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise FleetError(f"{source} must be an object with name, budget_usd and jobs, not {type(data).__name__}")
    try:
        return FleetFile.model_validate(data)
    except ValidationError as error:
        raise FleetError(
            "\n".join(f"{source}: {_words(item, data)}" for item in error.errors(include_url=False))
        ) from None


def _words(item: ErrorDetails, data: Mapping[str, Any]) -> str:
    """Return the sentence on one fault, with the name of its job."""
    said, place = describe_error(item, FleetFile, is_of_file=True), item["loc"]
    job = data["jobs"][place[1]] if len(place) > 1 and place[0] == "jobs" else None
    return f"{said} (job {job['name']!r})" if isinstance(job, dict) and isinstance(job.get("name"), str) else said


def _with_defaults(job: Any, defaults: Mapping[str, Any]) -> Any:
    if not isinstance(job, dict):
        return job
    sources = ("dataset", "config", "script")
    own = any(name in job for name in sources)
    filled = {name: value for name, value in defaults.items() if not (own and name in sources)} | job
    both = (defaults.get("set"), job.get("set"))
    if all(isinstance(part, dict) for part in both):
        filled["set"] = {**both[0], **both[1]}  # type: ignore[dict-item]
    return filled
