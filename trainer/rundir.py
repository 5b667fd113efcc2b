"""The run directory: the one contract between what orchestrates and what trains. Both sides use this module.

    jobs/<job_id>/
      job.json                            what to train (`trainer.config.JobConfig`)
      launch.json                         how the cluster started it (written by the cluster)
      budget.json                         at how many node-seconds it stops, where that may change while it runs
      events/g0001-r00000-000001.jsonl    what happened: generation, rank, running number; each file written once
      checkpoints/g0001-s00000100/        one fresh folder per (generation, step); its manifest.json is written last
      checkpoints/LATEST.json, BEST.json  which folder counts
      membership/g000001.json             who trains in a generation (`trainer.membership`); written once, it arbitrates
      nodes/l0001-n000-s001.json          when each node was there: launch, node, stay; the base of every dollar
      result.json                         how it ended, in the trainer's words (metrics, digests, timings); absent while
                                          it runs; of several ranks that fail, the first says why
      evaluation.json, predictions.npz    the test split, judged against the baselines
      provisioning.json, owner.json       where nodes are bought: what was tried to get them; which Dagster run follows
      status.json                         how it stands, in the cluster's words (`JobState`, exit codes)
      tuned.json                          the fastest settings, of a job that looked for them (`trainer.tune`)
      profile/                            traces of steps, and requests for more (`trainer.profiling`)
      logs/node-0.log                     what the processes of a node printed

A *generation* counts the worlds that worked in this run directory: 1 for the first, one more for each restart.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.storage import Storage

if TYPE_CHECKING:
    from trainer.config import JobConfig

JOB = "job.json"
LAUNCH = "launch.json"
LIMIT = "budget.json"
"""``max_node_seconds``: counts before that of ``job.json``; None: no limit. ``stop_at_usd``: the dollars that it was
made of, None where it was given in node-seconds."""
STATUS = "status.json"
RESULT = "result.json"
EVALUATION = "evaluation.json"
PREDICTIONS = "predictions.npz"
EVENTS = "events"
CHECKPOINTS = "checkpoints"
MEMBERSHIP = "membership"
NODES = "nodes"
LOGS = "logs"
PROFILE = "profile"
TUNED = "tuned.json"
PROFILE_REQUEST = "profile/request.json"

_log = logging.getLogger(__name__)
_GENERATION = re.compile(r"g(\d+)[-.]")
_EVENT_FILE = re.compile(r"g(\d+)-r(\d+)-(\d+)\.jsonl$")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePresence:
    """One stay of a node. Times are Unix seconds; ``ended_at`` is None while it is there."""

    node_id: int
    launch: int
    """Which start of the job by its cluster: 1, 2, …"""
    stay: int = 1
    """1 for the node that the launch began with; one more for each that took its place."""
    started_at: float
    """When its first process was started."""
    ended_at: float | None = None
    """When the last process of it was gone."""
    last_seen_at: float | None = None
    exit_codes: tuple[int, ...] = ()

    def seconds(self, now: float) -> float:
        """Paid seconds so far: until the end, or until ``now``."""
        return max(0.0, (self.ended_at if self.ended_at is not None else now) - self.started_at)


class SeenFiles:
    """Files of events that need not be read any more. Those of one rank in one generation are numbered from 1 on, so
    a number stands for all before it: however long a job runs, what is kept of it does not grow. Any number of threads
    may use it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._until: dict[tuple[int, int], int] = {}
        self._beyond: set[str] = set()
        """Of those that came out of order."""
        self._lock = threading.Lock()
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
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
        """Which of these are files of events, and new."""
        with self._lock:
            return [name for name in names if (match := _EVENT_FILE.match(name)) and self._is_new(name, match)]

    def _is_new(self, name: str, match: re.Match[str]) -> bool:
        until = self._until.get((int(match[1]), int(match[2])), 0)
        return not 0 < int(match[3]) <= until and name not in self._beyond


class RunDir:
    """Reads and writes a run directory, wherever it is."""

    def __init__(self, uri: str) -> None:
        self.storage = Storage(uri)
        self.uri = self.storage.uri

    def make(self) -> None:
        """Make the folder where it is missing. `ConfigError` where it cannot be written; of a remote one only whether
        it can be reached is known before the first write."""
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
        self.storage.write(JOB, job.to_json().encode())

    def read_job(self) -> JobConfig:
        from trainer.config import parse_job

        return parse_job(self.storage.read(JOB).decode(), source=f"{self.uri}/{JOB}")

    def write_json(self, name: str, value: Any) -> None:
        """Strict JSON: a NaN in it is a ValueError here rather than an unreadable file there."""
        self.storage.write(name, json.dumps(value, indent=2, sort_keys=True, allow_nan=False).encode())

    def read_json(self, name: str) -> Any | None:
        """The document, or None where there is none yet."""
        try:
            return json.loads(self.storage.read(name))
        except FileNotFoundError:
            return None

    def append_events(self, generation: int, rank: int, number: int, events: Iterable[dict[str, Any]]) -> None:
        """Write one numbered file of events. It must not exist: numbers are used once."""
        lines = "".join(json.dumps(event, allow_nan=False, sort_keys=True) + "\n" for event in events)
        self.storage.create(f"{EVENTS}/{event_file(generation, rank, number)}", lines.encode())

    def last_generation(self) -> int:
        """The highest generation that left a trace (events, a checkpoint, a record of its members), 0 if none did."""
        names = [name for folder in (EVENTS, CHECKPOINTS, MEMBERSHIP) for name in self.storage.list(folder)]
        return max((int(match[1]) for name in names if (match := _GENERATION.match(name))), default=0)

    def follow(self, seen: SeenFiles) -> list[dict[str, Any]]:
        """Events of the files not in ``seen`` yet, in order of time; adds those files to ``seen``. What is no event is
        left out, with a warning."""
        new = seen.others(self.storage.list(EVENTS))
        found = [parsed(data) for data in self.storage.read_all([f"{EVENTS}/{name}" for name in new])]
        seen.add(new)
        damaged = [name for name, (_, left_out) in zip(new, found, strict=True) if left_out]
        if damaged:
            count = sum(left_out for _, left_out in found)
            _log.warning(
                "%s/%s: %d line(s) are no events and left out: %s", self.uri, EVENTS, count, ", ".join(damaged)
            )
        return sorted((event for events, _ in found for event in events), key=lambda event: event["time"])

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """All events in order of time, or those of one kind."""
        return (event for event in self.follow(SeenFiles()) if kind is None or event["kind"] == kind)

    def steps_reported(self, down_to: int) -> set[int]:
        """Steps from this one on that rank 0 has reported; reads no more files than it takes to know."""
        found: set[int] = set()
        for name in reversed(self.storage.list(EVENTS)):
            match = _EVENT_FILE.match(name)
            if match and int(match[2]) == 0:
                events, _ = parsed(self.storage.read(f"{EVENTS}/{name}"))
                found |= {event["step"] for event in events if event["kind"] == "step"}
                if found and min(found) <= down_to:
                    break
        return found

    def request_trace(self, steps: int = 5, ranks: Iterable[int] = (0,)) -> None:
        """Have a job that runs trace its next steps on these ranks. FileExistsError where a request is waiting, which
        is taken within seconds by a job that trains; ValueError for more than `MOST_TRACED_STEPS` steps, or none."""
        from trainer.config import MOST_TRACED_STEPS

        if not 1 <= steps <= MOST_TRACED_STEPS:
            raise ValueError(f"steps = {steps}: a trace has 1 to {MOST_TRACED_STEPS} steps (`trainer.profiling`)")
        self.storage.create(PROFILE_REQUEST, json.dumps({"steps": steps, "ranks": list(ranks)}).encode())

    def latest_checkpoint(self) -> tuple[str, int] | None:
        """(folder, step) of the checkpoint that counts, as ``checkpoints/LATEST.json`` says; None if there is none."""
        try:
            latest = self.read_json(f"{CHECKPOINTS}/LATEST.json") or {}
            return (latest["path"], latest["step"]) if latest.get("path") else None
        except (ValueError, KeyError, AttributeError):  # damaged; the trainer looks at the folders themselves
            return None

    def write_node(self, presence: NodePresence) -> None:
        self.write_json(_node_file(presence), asdict(presence))

    def begin_stay(self, presence: NodePresence) -> NodePresence:
        """Write a presence as the next stay of its node in its launch; it, with that number."""
        while True:
            try:
                self.storage.create(_node_file(presence), json.dumps(asdict(presence), allow_nan=False).encode())
                return presence
            except FileExistsError:
                presence = replace(presence, stay=presence.stay + 1)

    def nodes(self) -> list[NodePresence]:
        """Every stay of every node, in order of launch, node and stay."""
        presences = []
        for name in self.storage.list(NODES):
            data = self.read_json(f"{NODES}/{name}")
            if data is not None:
                if "generation" in data:  # written before nodes could be replaced
                    data["launch"] = data.pop("generation")
                presences.append(NodePresence(**{**data, "exit_codes": tuple(data["exit_codes"])}))
        return presences


def parsed(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The events of a file, and how many of its lines are none. Pure."""
    events, left_out = [], 0
    for line in data.splitlines():
        try:
            event = json.loads(line)
            is_event = isinstance(event["kind"], str) and isinstance(event["time"], int | float)
        except (ValueError, TypeError, KeyError, RecursionError):
            is_event = False
        if is_event:
            events.append(event)
        else:
            left_out += 1
    return events, left_out


def heartbeat_seconds(storage: Storage) -> float:
    """Between two signs of life of a node that keeps its own record. Remote ones are paid for."""
    return 2.0 if storage.is_local else 10.0


def stale_seconds(storage: Storage) -> float:
    """A node that has been silent for longer is not well: it has missed five signs of life at least, and on remote
    storage one of them may have been tried for as long as a request is (90 s, `trainer.blob_account`)."""
    return 10.0 if storage.is_local else 120.0


def event_file(generation: int, rank: int, number: int) -> str:
    return f"g{generation:04d}-r{rank:05d}-{number:06d}.jsonl"


def _node_file(presence: NodePresence) -> str:
    return f"{NODES}/l{presence.launch:04d}-n{presence.node_id:03d}-s{presence.stay:03d}.json"


def event(kind: str, rank: int, generation: int, **fields: Any) -> dict[str, Any]:
    """One event. ``time`` is Unix seconds; every other field carries its unit in its name.

    Kinds: ``phase`` (name), ``step`` (step, epoch, loss, learning_rate, grad_norm, samples_per_second, step_seconds,
    eta_seconds), ``timing`` (of the steps since the one before, on each rank: steps, seconds, nodes, samples, segments,
    typical, collectives, topology, backend, device…; see `trainer.timing` and `trainer.communication`), ``link`` (a
    probe: step, bytes, seconds as [from rank, to rank, seconds], reason), ``communication`` (what ``auto`` sums
    gradients by from here on: step, choice, before, reason, step_seconds of each, latency_seconds,
    bandwidth_bytes_per_second; see `trainer.choice`), ``node`` (a sample of utilisation, see
    `trainer.monitor.NodeMonitor`), ``evaluation`` (step, split, loss…), ``checkpoint`` (step, path, seconds, is_best),
    ``checkpoint_failed`` (step, attempt, message, gives_up), ``resume`` (step, path), ``membership`` (a new generation:
    world_size, nodes, joined, lost, topology, reason, step, seconds), ``communication_error`` (step, operation,
    waited_seconds, error, peers, attempt), ``out_of_memory`` (step, samples, activation_checkpointing), ``hang`` (no
    progress, as one rank sees it: step, node_id, nodes, operation, sequence, waited_seconds, where, stacks, recent; see
    `trainer.watchdog`), ``tune`` (group, candidate, doing, samples_per_second, gain, elapsed_seconds, budget_seconds),
    ``profile`` (a trace: its last step, steps, path, top operations), ``error`` (message, fatal),
    ``end`` (status).
    """
    return {"kind": kind, "time": time.time(), "rank": rank, "generation": generation, **fields}
