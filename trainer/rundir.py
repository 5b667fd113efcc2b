"""The run directory: the contract between the orchestrator and the trainer. Both sides use this module.

    jobs/<job_id>/
      job.json                            what to train (`trainer.config.JobConfig`)
      launch.json                         how the cluster started it (written by the cluster)
      budget.json                         the node-seconds at which it stops, which may change while it runs
      events/g0001-r00000-000001.jsonl    what happened: generation, rank, running number; each file written once
      checkpoints/g0001-s00000100/        one fresh folder per (generation, step); its manifest.json is written last
      checkpoints/LATEST.json, BEST.json  which folder counts
      membership/g000001.json             who trains in a generation; written once, it arbitrates
      nodes/l0001-n000-s001.json          when each node was there: launch, node, incarnation; the base of every dollar
      result.json                         how it ended, from the trainer (metrics, digests, timings); absent while
                                          it runs; of several ranks that fail, the first says why
      evaluation.json, predictions.npz    the test split, judged against the baselines
      owner.json                          which Dagster run follows
      status.json                         the state of the job, from the cluster (`JobState`, exit codes)
      tuned.json                          the fastest settings, of a job that searched for them (`trainer.tuning.tuner`)
      profile/                            traces of steps, and requests for more (`trainer.observability.trace`)
      logs/node-0.log                     what the processes of a node printed

A *generation* counts the worlds that worked in this run directory: 1 for the first, one more for each restart.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.documents import schemas
from trainer.documents.presences import NODE_FILE, NODES, NodePresence, node_file, presence_document, presence_of
from trainer.documents.reader import EVENTS_BYTES, known_names, parse_events, read_document, warn_once
from trainer.documents.strict_json import parse_strict_json
from trainer.errors import ConfigError, DamagedError
from trainer.runtime import clock
from trainer.storage.open import open_storage
from trainer.storage.regular_files import require_folder

if TYPE_CHECKING:
    from trainer.config import JobConfig

JOB = "job.json"
LAUNCH = "launch.json"
LIMIT = "budget.json"
"""The file of the budget. Its ``max_node_seconds`` takes precedence over that of ``job.json``; None: no limit. Its
``stop_at_usd`` is the dollars that it was computed from, None where it was given in node-seconds."""
STATUS = "status.json"
RESULT = "result.json"
EVALUATION = "evaluation.json"
TRACKING = "tracking.json"
"""The MLflow run, so that a resumed job continues it."""
PREDICTIONS = "predictions.npz"
EVENTS = "events"
CHECKPOINTS = "checkpoints"
MEMBERSHIP = "membership"
LOGS = "logs"
SCRIPT_FOLDER = "DTRAIN_SCRIPT_FOLDER"
"""Variable: the run directory of a program of a user's own, and the folder for those of scripts that name none."""
WEIGHTS, MODEL = "model/weights.pt", "model/model.json"
PROFILE = "profile"
TUNED = "tuned.json"
PROFILE_REQUEST = "profile/request.json"

_log = logging.getLogger(__name__)
_GENERATION = re.compile(r"g(\d{1,12})[-.]")
_EVENT_FILE = re.compile(r"g(\d{1,12})-r(\d{1,12})-(\d{1,12})\.jsonl$")
FOLLOW_BYTES = 16 << 20
"""Bytes of new events that one look reads, and one file more at most: a long job is read in several looks."""
_AT_ONCE = 16
"""Files that are requested together, where storage is remote."""
LIST_SECONDS = 60.0
"""Between two lists of all files of events on remote storage, where a reader may know only what rank 0 has added."""
LONGEST_FLUSH, LONGEST_REMOTE_FLUSH, LONGEST_FLUSH_OF_OTHERS = 30.0, 90.0, 300.0
"""The most seconds whose events share a file: of rank 0, and of ranks that tell of their node alone."""
STEP_FILES = 1000
"""The number of event files, the newest first, in which the last step is looked for."""


class SeenFiles:
    """The files of events that have been read. Those of one rank in one generation are numbered from 1 on, so a number
    stands for all before it: the record does not grow with the job. Any number of threads may use it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._until: dict[tuple[int, int], int] = {}
        self._beyond: set[str] = set()
        """Files that came out of order."""
        self._lock = threading.Lock()
        self.is_behind = False
        """Whether the last look (`RunDir.follow`) has left files for the next one."""
        self.left_out = 0
        """The number of lines and files that were no events."""
        self.listed_at = -math.inf
        """When all files were last listed (`time.monotonic`)."""
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        """Record these files as read; names of other files are ignored."""
        with self._lock:
            for name in names:
                if (match := _EVENT_FILE.match(name)) is None or not self._is_new(name, match):
                    continue
                writer = int(match[1]), int(match[2])
                self._beyond.add(name)
                while (after := event_file(*writer, self._until.get(writer, 0) + 1)) in self._beyond:
                    self._beyond.remove(after)
                    self._until[writer] = self._until.get(writer, 0) + 1

    def others(self, names: Iterable[str]) -> list[str]:
        """Return those of these names that are files of events not read yet."""
        with self._lock:
            return [name for name in names if (match := _EVENT_FILE.match(name)) and self._is_new(name, match)]

    def expected(self) -> list[tuple[int, int]]:
        """Return the files that rank 0 writes next, as (generation, number): one of the newest generation that is
        known, or the first of the one after."""
        with self._lock:
            newest = max((generation for generation, rank in self._until if rank == 0), default=0)
            return [(newest, self._until.get((newest, 0), 0) + 1), (newest + 1, 1)] if newest else []

    def _is_new(self, name: str, match: re.Match[str]) -> bool:
        until = self._until.get((int(match[1]), int(match[2])), 0)
        return not 0 < int(match[3]) <= until and name not in self._beyond


class RunDir:
    """A run directory, which this class reads and writes on any storage."""

    def __init__(self, uri: str) -> None:
        self.storage = open_storage(uri)
        self.uri = self.storage.uri

    def make(self) -> None:
        """Make the folder where it is missing. Raise `ConfigError` where it cannot be written; for a remote one, only
        whether it can be reached is checked."""
        if not self.storage.is_local:
            self.storage.exists(JOB)
            return
        try:
            os.makedirs(self.storage.path(), exist_ok=True)
            if not os.access(self.storage.path(), os.W_OK | os.X_OK):
                raise PermissionError("no permission to write")
        except OSError as error:
            raise ConfigError(f"run_dir = {self.uri!r} cannot be written: {error}; choose another folder") from error

    def write_job(self, job: JobConfig) -> None:
        """Write ``job.json``."""
        self.storage.write(JOB, job.to_json().encode())

    def read_job(self) -> JobConfig:
        """Return the configuration. Raise FileNotFoundError where there is no ``job.json``, `DamagedError` for a
        damaged one."""
        from trainer.config import parse_job

        where = f"{self.uri}/{JOB}"
        if (document := self.read_json(JOB)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
        try:
            return parse_job(json.dumps(document), source=JOB, is_stored=True)
        except ConfigError as error:
            raise DamagedError(where, str(error)) from None

    def write_json(self, name: str, value: Any) -> None:
        """Write strict JSON. Raise ValueError for a NaN, rather than write a file that cannot be read."""
        self.storage.write(name, json.dumps(value, indent=2, sort_keys=True, allow_nan=False).encode())

    def read_json(self, name: str) -> Any | None:
        """Return the document, None where there is none yet. Raise `DamagedError` where something else is in its
        place."""
        return read_document(self.storage, name)

    def read_result(self) -> dict[str, Any] | None:
        """Return the trainer's result, None where there is none; a damaged ``result.json`` counts as none."""
        try:
            found: dict[str, Any] | None = self.read_json(RESULT)
            return found if found is None or found["status"] else None
        except DamagedError as error:
            warn_once(f"what it says about the job's end is ignored: {error}")
            return None

    def append_events(self, generation: int, rank: int, number: int, events: Iterable[dict[str, Any]]) -> None:
        """Write one numbered file of events. It must not exist: numbers are used once."""
        lines = "".join(json.dumps(event, allow_nan=False, sort_keys=True) + "\n" for event in events)
        self.storage.create(f"{EVENTS}/{event_file(generation, rank, number)}", lines.encode())

    def last_generation(self) -> int:
        """Return the highest generation with events, a checkpoint or a record of its members; 0 if there is none."""
        names = [name for folder in (EVENTS, CHECKPOINTS, MEMBERSHIP) for name in self.storage.list(folder)]
        return max((int(match[1]) for name in names if (match := _GENERATION.match(name))), default=0)

    def follow(self, seen: SeenFiles, is_live: bool = False) -> list[dict[str, Any]]:
        """Return the events of the files not in ``seen`` yet, in order of time, and add those files to ``seen``. Lines
        that are no events are left out, with a warning. One call reads about `FOLLOW_BYTES`: ``seen.is_behind`` says
        whether another is due. ``is_live``: of a job that goes on, whose other ranks' events may come later, by
        `LIST_SECONDS` on remote storage, where a list of all files is dear."""
        new = sorted(self._new_files(seen, is_live), key=_in_time)
        events: list[dict[str, Any]] = []
        damaged: list[str] = []
        size = left_out = done = 0
        at_once = 1 if self.storage.is_local else _AT_ONCE
        while done < len(new) and size < FOLLOW_BYTES:
            names = new[done : done + at_once]
            done += len(names)
            for name, data in zip(names, self.storage.read_each(_in(EVENTS, names), EVENTS_BYTES), strict=True):
                found, wrong = ([], 1) if isinstance(data, DamagedError) else parse_events(data)
                size += 0 if isinstance(data, DamagedError) else len(data)
                events += found
                left_out += wrong
                damaged += [name] if wrong else []
        seen.add(new[:done])
        seen.is_behind = done < len(new)
        if damaged:
            seen.left_out += left_out
            more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
            _log.warning(
                "%s/%s: %d line(s) are not events and were skipped: %s%s",
                self.uri,
                EVENTS,
                left_out,
                ", ".join(damaged[:5]),
                more,
            )
        return sorted(events, key=lambda event: event["time"])

    def _new_files(self, seen: SeenFiles, is_live: bool) -> list[str]:
        now = time.monotonic()
        if self.storage.is_local or seen.is_behind or not is_live or now - seen.listed_at > LIST_SECONDS:
            seen.listed_at = now
            return seen.others(self._names(EVENTS))
        found = list[str]()
        for generation, number in seen.expected():
            with suppress(FileNotFoundError):
                for following in itertools.count(number):
                    self.storage.size(f"{EVENTS}/{(name := event_file(generation, 0, following))}")
                    found.append(name)
        return found

    def looks(self, seen: SeenFiles | None = None, is_live: bool = False) -> Iterator[list[dict[str, Any]]]:
        """Call `follow` until nothing is left to be read, and yield the events of each call, so that not all are held
        at once."""
        seen = SeenFiles() if seen is None else seen
        while True:
            yield self.follow(seen, is_live)
            if not seen.is_behind:
                return

    def events(self, kind: str | None = None, strict: bool = False) -> Iterator[dict[str, Any]]:
        """Yield all events in order of time, or those of one kind. With ``strict``, raise `DamagedError` where any had
        to be left out, for callers that add them up."""
        seen = SeenFiles()
        found = [event for look in self.looks(seen) for event in look if kind is None or event["kind"] == kind]
        if strict and seen.left_out:
            raise DamagedError(f"{self.uri}/{EVENTS}", f"{seen.left_out} line(s) or file(s) of it are not events")
        return iter(sorted(found, key=lambda event: event["time"]))

    def newest_events(self, most_files: int = STEP_FILES) -> Iterator[list[dict[str, Any]]]:
        """Yield the events of rank 0, one file after the other, the newest first. Lines that are no events are left
        out."""
        return (parse_events(data)[0] for data in self._newest_files(most_files))

    def _newest_files(self, most_files: int = STEP_FILES) -> Iterator[bytes]:
        mine = [name for name in self._listed(EVENTS) if (match := _EVENT_FILE.match(name)) and int(match[2]) == 0]
        mine, at_once = mine[-most_files:], 1 if self.storage.is_local else _AT_ONCE
        for end in range(len(mine), 0, -at_once):
            names = mine[max(0, end - at_once) : end]
            for data in reversed(self.storage.read_each(_in(EVENTS, names), EVENTS_BYTES)):
                if not isinstance(data, DamagedError):
                    yield data

    def first_event_at(self) -> float | None:
        """Return the time of the first event, None where there is none."""
        for name in self._listed(EVENTS)[:1]:
            events, _ = parse_events(self.storage.read_bounded(f"{EVENTS}/{name}", EVENTS_BYTES))
            return float(events[0]["time"]) if events else None
        return None

    def last_step_reported(self) -> int:
        """Return the last step that rank 0 has reported, -1 where none is; reads no more than needed."""
        lines = (line for data in self._newest_files() for line in reversed(data.splitlines()) if b'"step"' in line)
        for line in lines:  # not as events, whose classes a training that goes on would wait for
            with suppress(DamagedError):
                item = parse_strict_json(line, EVENTS)
                if isinstance(item, dict) and item.get("kind") == "step" and type(item.get("step")) is int:
                    return int(item["step"])
        return -1

    def _listed(self, folder: str) -> list[str]:
        """Return the names in a folder of this one, none where it is missing. Raise `DamagedError` where it is no
        folder."""
        return sorted(self._names(folder))

    def _names(self, folder: str) -> Iterator[str]:
        """Return the same names in no order, as `Storage.names` does."""
        if self.storage.is_local and not require_folder(self.storage.path(), folder):
            return iter(())
        return self.storage.names(folder)

    def request_trace(self, steps: int = 5, ranks: Iterable[int] = (0,), python: bool = True) -> None:
        """Ask a running job to trace its next steps on these ranks; ``python``: with the Python functions that call the
        operations. Raise FileExistsError where a request is waiting, which a training job takes within seconds;
        ValueError for more than `MOST_TRACED_STEPS` steps, or none."""
        from trainer.config import MOST_TRACED_STEPS

        if not 1 <= steps <= MOST_TRACED_STEPS:
            raise ValueError(f"steps = {steps}: a trace has 1 to {MOST_TRACED_STEPS} steps")
        asked = {"steps": steps, "ranks": list(ranks), **({} if python else {"python": False})}
        self.storage.create(PROFILE_REQUEST, json.dumps(asked).encode())  # older nodes know no "python"

    def latest_checkpoint(self) -> tuple[str, int] | None:
        """Return (folder, step) of the checkpoint that ``checkpoints/LATEST.json`` names; None if there is none."""
        try:
            latest = self.read_json(f"{CHECKPOINTS}/LATEST.json") or {}
            return (latest["path"], latest["step"]) if latest.get("path") else None
        except ValueError:  # damaged: the trainer then searches the folders
            return None

    def write_node(self, presence: NodePresence) -> None:
        """Write a presence, in place of an earlier one of the same incarnation."""
        self.write_json(node_file(presence), presence_document(presence))

    def begin_incarnation(self, presence: NodePresence) -> NodePresence:
        """Write a presence as the next incarnation of its node in its launch, and return it with that number."""
        while True:
            try:
                document = json.dumps(presence_document(presence), allow_nan=False)
                self.storage.create(node_file(presence), document.encode())
                return presence
            except FileExistsError:
                if not self.storage.exists(node_file(presence)):
                    raise  # a file is in the way of the folder: no other number would help
                presence = replace(presence, incarnation=presence.incarnation + 1)

    def begin_presence(self, presence: NodePresence) -> bool:
        """Write a presence where its incarnation has none, and return whether it had none: an incarnation runs once."""
        try:
            document = json.dumps(presence_document(presence), allow_nan=False)
            self.storage.create(node_file(presence), document.encode())
        except FileExistsError:
            return False
        return True

    def read_node(self, launch: int, node_id: int, incarnation: int) -> NodePresence | None:
        """Return one presence, None where it has not begun. Raise `DamagedError` where it cannot be read."""
        name = node_file(NodePresence(node_id=node_id, launch=launch, incarnation=incarnation, started_at=0.0))
        data = read_document(self.storage, name, schemas.PRESENCE)
        return None if data is None else presence_of(data)

    def nodes(self, skip_damaged: bool = False) -> list[NodePresence]:
        """Return every incarnation of every node, in order of launch, node and incarnation. Raise `DamagedError` where
        one of them cannot be read, since the sum that was paid is then unknown; with ``skip_damaged`` leave it out."""
        presences = []
        for name in known_names(self.storage, NODES, self._listed(NODES), NODE_FILE):
            try:
                data = read_document(self.storage, f"{NODES}/{name}", schemas.PRESENCE)
            except DamagedError:
                if not skip_damaged:
                    raise
                data = None
            if data is not None:
                presences.append(presence_of(data))
        return presences


def resolve_start(job: JobConfig) -> JobConfig:
    """Return the job with the run directory and the sha256 of the weights that ``training.start_from`` names: a run
    directory, or a job beside this one. Raise `ConfigError` where there are none."""
    from trainer.config import JOB_ID

    training = job.training
    if training.start_from is None or training.start_sha256 is not None:
        return job
    beside = f"{job.run_dir.rstrip('/').rpartition('/')[0] or '.'}/{training.start_from}"
    found = [training.start_from, *([beside] if JOB_ID.fullmatch(training.start_from) else [])]
    places = [uri if "://" in uri else os.path.abspath(uri) for uri in found]  # nodes work in other folders
    begun = RunDir(job.run_dir)
    if training.resume and begun.storage.exists(JOB) and begun.latest_checkpoint():
        before = begun.read_job().training  # which goes on, whatever has become of those weights
        if before.start_from in places and before.start_sha256 is not None:
            return replace(
                job, training=replace(training, start_from=before.start_from, start_sha256=before.start_sha256)
            )
    for uri in places:
        described = RunDir(uri).read_json(MODEL)
        if described is not None and isinstance(digest := described.get("file_sha256"), str):
            return replace(job, training=replace(training, start_from=uri, start_sha256=digest))
    raise ConfigError(
        f"training.start_from = {training.start_from!r}: there is no {MODEL}; name a training that finished, by its "
        "job or its run directory"
    )


def _in(folder: str, names: Iterable[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


def _in_time(name: str) -> tuple[int, int, int]:
    """Return a key that sorts files of events about by time: generation, running number, rank."""
    match = _EVENT_FILE.match(name)
    assert match is not None
    return int(match[1]), int(match[3]), int(match[2])


def event_file(generation: int, rank: int, number: int) -> str:
    """Return the name of a file of events."""
    return f"g{generation:04d}-r{rank:05d}-{number:06d}.jsonl"


def flush_seconds(age: float, rank: int, is_local: bool) -> float:
    """Return the seconds whose events a rank puts into one file: a hundredth of the ``age`` of its reports, in seconds,
    up to a limit. What happens early is seen at once, and a long training has hundreds of files a day, not thousands.
    Pure."""
    longest = LONGEST_FLUSH_OF_OTHERS if rank else LONGEST_FLUSH if is_local else LONGEST_REMOTE_FLUSH
    return min(age / 100, longest)


def event(kind: str, rank: int, generation: int, **fields: Any) -> dict[str, Any]:
    """Return one event. ``time`` is Unix seconds; every other field carries its unit in its name.

    `trainer.documents.events` has a class for each kind that something reads, with its fields. Besides these there
    is one for people: ``communication_error`` (step, operation, waited_seconds, error, peers, attempt).
    """
    return {"kind": kind, "time": clock.now(), "rank": rank, "generation": generation, **fields}
