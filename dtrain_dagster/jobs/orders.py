"""The orders of jobs, kept where nodes cannot write: ``<home>/orders`` on the machine of the orchestrator.

A run directory belongs to the nodes of its job: they may have replaced any file in it, ``job.json`` included. What
decides what this process imports, calls or registers is therefore read here:

    orders/<job_id>.json             the `JobConfig` as it was submitted; written before the nodes are bought
    orders/<job_id>.registered.json  the name and version under which it was registered, and the digests of its files
    orders/scripts/<job_id>.json     of a job of `dtrain train --script`: how it was given

On the local cluster, nodes run as the same user and can write here as well: they are trusted as that user's own
programs are. On Azure they cannot reach this folder.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from trainer.config import JOB_ID, ConfigError, JobConfig, parse_job
from trainer.differences import list_differences, show_value
from trainer.rundir import RunDir

SOURCE_TAG = "mlflow.source.name"
GIT_SECONDS = 5.0
"""The longest time that git is waited for."""

FOLDER = "orders"
MODEL_DIGESTS = ("model_json_sha256", "weights_file_sha256")
"""Keys of the digests of ``model/model.json`` and ``model/weights.pt``, as they were registered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOrder:
    """How `dtrain train --script` was given, in words that mean the same in another process."""

    script: str
    """The file, a full path."""
    folder: str
    """The working directory: what the script reads by a relative path is found from there."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments."""
    overrides: tuple[str, ...] = ()
    """Fields as ``--set`` takes them, those of other options included."""
    nodes: Annotated[int, Field(ge=1)]
    processes_per_node: Annotated[int, Field(ge=1)]


_SCRIPT_ORDER = TypeAdapter(ScriptOrder)


class OrderError(ConfigError):
    """A run directory differs from the order. The message says what it holds and what was ordered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A job as this orchestrator ordered it."""

    job: JobConfig
    registered: Mapping[str, Any] = field(default_factory=dict)
    """``name``, ``version`` and `MODEL_DIGESTS`, once the job was registered; empty before."""


def keep_order(home: Path, job: JobConfig, there: JobConfig | None) -> None:
    """Record the order of this job, before its nodes are bought. ``there``: the ``job.json`` of its run directory.

    Without one, the job begins. Otherwise it continues: the document found has to equal the order, or, where no order
    is known (an older version submitted it), to be a training of the same data, model and loss; it goes on with the
    settings of this job. Raise `OrderError` where it is not.
    """
    path = order_file(home, job.job_id)
    if there is None:
        _registered_path(home, job.job_id).unlink(missing_ok=True)
        _script_path(home, job.job_id).unlink(missing_ok=True)
        _write(path, job.to_json())
    elif path.exists():
        ordered = _read(path)
        _refuse_difference(there, ordered, f"{job.run_dir}/job.json")
        if job.training != ordered.training:
            _write(path, replace(ordered, training=job.training).to_json())
    else:
        same = replace(there, dataset=job.dataset, model=job.model, loss=job.loss)
        _refuse_difference(there, same, f"{job.run_dir}/job.json")
        _write(path, same.to_json())


def keep_script(home: Path, job_id: str, order: ScriptOrder) -> None:
    """Record how a script's job was ordered, after it was started."""
    _write(_script_path(home, job_id), json.dumps(asdict(order), sort_keys=True))


def ordered_job(home: Path, job_id: str) -> JobConfig | None:
    """Return a job as it was ordered from this home; None where it was not, or its order cannot be read."""
    with suppress(ConfigError, OSError):
        return _read(order_file(home, job_id))
    return None


def script_of(home: Path, job_id: str) -> ScriptOrder | None:
    """Return how a script was given to `dtrain train --script`; None where it was not, or the record cannot be read."""
    try:
        return _SCRIPT_ORDER.validate_json(_script_path(home, job_id).read_bytes())
    except (OSError, ValueError):
        return None


def script_trouble(script: ScriptOrder | None) -> str:
    """Return why a script's job cannot be started again as it was ordered, and the remedy; "" where it can."""
    if script is None:
        return (
            "a script trains it, but this home does not know how it was started: run `dtrain train --script` again "
            "with the same --name, or materialize it again in Dagster"
        )
    if not os.path.isdir(script.folder):
        return f"its script was started in {script.folder}, which is no longer there: put the folder back"
    if not os.path.isfile(script.script):
        return f"its script {script.script} is no longer there: put it back"
    return ""


def environment_anywhere(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return this environment with absolute folders, so that a command works alike wherever it is started."""
    paths = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    found = {**environment, "DTRAIN_HOME": os.path.abspath(home)}
    return found | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def keep_registration(home: Path, job_id: str, facts: Mapping[str, Any]) -> None:
    """Record the name and version under which a job was registered, and the digests of its files."""
    _write(_registered_path(home, job_id), json.dumps(dict(facts), sort_keys=True))


def order_of(home: str | Path, rundir: RunDir) -> Order | None:
    """Return the order of a job, equal to its ``job.json``; None without one. Raise `OrderError` where it differs."""
    job_id, home = rundir.uri.rsplit("/", 1)[-1], Path(home)
    if not JOB_ID.fullmatch(job_id) or not order_file(home, job_id).exists():
        return None
    job = _read(order_file(home, job_id))
    _refuse_difference(rundir.read_job(), job, f"{rundir.uri}/job.json")
    try:
        registered = json.loads(_registered_path(home, job_id).read_text())
    except FileNotFoundError:
        registered = {}
    return Order(job=job, registered=registered)


def latest_orders(home: str | Path, most: int) -> list[JobConfig]:
    """Return the latest jobs that were ordered from this home, the newest first, without those that cannot be read."""
    found = []
    for path in sorted(_order_files(home), key=lambda path: path.stat().st_mtime, reverse=True)[:most]:
        with suppress(ConfigError, OSError):
            found.append(_read(path))
    return found


def ordered_jobs(home: str | Path) -> list[str]:
    """Return the ids of all jobs that were ordered from this home, in the order of the alphabet."""
    return sorted(path.name.removesuffix(".json") for path in _order_files(home))


def _order_files(home: str | Path) -> list[Path]:
    return [path for path in (Path(home) / FOLDER).glob("*.json") if not path.name.endswith(".registered.json")]


def _refuse_difference(found: JobConfig, ordered: JobConfig, where: str) -> None:
    """Raise `OrderError` for the first field in which a job differs from its order, with both values."""
    for name, (own, its) in list_differences(_comparable(found), _comparable(ordered)).items():
        raise OrderError(
            f"{where} says {name} = {show_value(own)}, ordered was {show_value(its)}: it was changed after it was "
            "submitted, and is not used; train again under another name, and check who can write there"
        )


def _comparable(job: JobConfig) -> dict[str, Any]:
    """Without the budget, which can be raised while a job runs, and the run that follows it, which changes."""
    job = replace(job, training=replace(job.training, max_node_seconds=None), tracking=replace(job.tracking, tags={}))
    return json.loads(job.to_json())


def order_file(home: Path, job_id: str) -> Path:
    """Return the file with the order of a job."""
    return Path(home) / FOLDER / f"{job_id}.json"


def _registered_path(home: Path, job_id: str) -> Path:
    return Path(home) / FOLDER / f"{job_id}.registered.json"


def _script_path(home: Path, job_id: str) -> Path:
    return Path(home) / FOLDER / "scripts" / f"{job_id}.json"


def _read(path: Path) -> JobConfig:
    return parse_job(path.read_text(), source=str(path), is_stored=True)  # it was checked when it was ordered


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all, readable by this user only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plain_order(value: Any) -> Any:
    """Return a dataclass's content as JSON gives it back. Pure."""
    return json.loads(json.dumps(asdict(value)))


def source_tags(entry: str, folder: Path) -> dict[str, str]:
    """Return the tags that say where a training comes from: who started it, by what, and at which commit of the
    repository that the folder lies in, where it is one. The repository's address is left out: it may hold a token."""
    tags = {SOURCE_TAG: entry}
    if commit := _git(folder, "rev-parse", "HEAD"):
        tags["mlflow.source.git.commit"] = commit
        if (branch := _git(folder, "rev-parse", "--abbrev-ref", "HEAD")) and branch != "HEAD":
            tags["mlflow.source.git.branch"] = branch
        tags["mlflow.source.git.dirty"] = str(bool(_git(folder, "status", "--porcelain", "--untracked-files=no")))
    with suppress(KeyError, OSError):  # a container's user without a name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _git(folder: Path, *arguments: str) -> str:
    """Return what a command of git says; "" where there is no repository, or no git."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
