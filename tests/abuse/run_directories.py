"""Files of a run directory replaced by those that a node, a broken disk or a stranger may leave.

Beside a whole job stands a copy of it, of which one file is damaged. All readers of run directories
(`tests.abuse.run_directory_readers`) are run over both. The whole job must be read unchanged; the damaged one may be
shown, or refused with one of the errors meant for that.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain_dagster.jobs.orders import keep_order
from harness import small_job
from tests.abuse.run_directory_readers import STEPS, read_everything
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig
from trainer.documents.presences import NodePresence
from trainer.elastic.generation import Candidate, Generation
from trainer.elastic.generation_record import Candidacies, path_of, text_of
from trainer.rundir import LAUNCH, STATUS, RunDir, event

MARK = "0a1b2c3d"
WHOLE, DAMAGED = f"train-{MARK}-11111111", f"train-{MARK}-22222222"
"""Ids of the whole job and of its damaged copy."""
MOST_MEMORY = 400 << 20
"""Bytes of memory that the readers of a damaged job may take."""
ADDED: dict[str, Any] = {
    "claim.json": {"claimed_at": 1.7e9, "dagster_run_id": "da7a820b"},
    "owner.json": {"dagster_run_id": "da7a820b"},
    "registration.json": {"alias": "challenger", "name": "forecaster", "version": "1"},
    "tracking.json": {"mlflow_run_id": "cbf5e2df83604c279853c87e6c467161"},
    "plan.json": {
        "basis": "a probe of 24 steps on 1 node(s)", "basis_kind": "probe", "budget_usd": 0.0, "deadline_hours": 0.0,
        "estimate": {
            "node_count": 1, "seconds": {"expected": 10.3, "high": 13.9, "low": 7.6},
            "usd": {"expected": 0.0088, "high": 0.0118, "low": 0.0065}, "usd_per_node_hour": 3.06,
        },
        "fingerprint": "f1256cfb", "pace": "b736e0ad", "learned_factor": 1.0, "node_count": 1, "processes_per_node": 1,
        "job": {
            "dataset": {"uri": "nowhere", "dataset_id": "976785d715242228"}, "loss": {"factory": "student_t"},
            "model": {"factory": "tcn", "args": {"channels": 4}}, "training": {"max_steps": 40, "world_size": 1},
        },
        "phases": {"checkpoint": 0.003, "evaluation": 0.029, "finish": 1.25, "startup": 3.89, "steps": 5.13},
        "price_words": "stand-in price", "rests_on": ["probe-b736e0ad-1n"], "sku": "Standard_NC6s_v3",
        "stop_at_usd": 0.0, "tier": "dedicated",
        "work": {"checkpoints": 6, "evaluations": 6, "samples": 7380, "steps": 30},
    },
    "budget.json": {"max_node_seconds": 3600.0, "stop_at_usd": 2.5},
    "alerts.json": {"news: node 1 was lost": {"sentence": "node 1 was lost", "at": 1.7e9}},
    "cost_alerts.json": {"over": {"sentence": "25% over the estimate", "at": 1.7e9}},
    "paid_by.json": {"job_id": "train-0a1b2c3d-33333333"},
    "tuned.json": {
        "training": {"compile": "off"},
        "evidence": {
            "complete": True, "gain": {"low": 1.0, "median": 1.1, "high": 1.2},
            "candidates": [{"group": "compile", "change": {"compile": "default"}, "verdict": "slower"}],
        },
    },
    "reports/cost_breakdown.json": {
        "metrics": {"total_cost_usd": 0.5}, "training_usd": 0.4, "probe_usd": 0.1, "launches": {"last": {"usd": 0.4}},
    },
    "reports/performance_report.json": {
        "diagnosis": {"cause": "checkpoint", "share": 0.1, "evidence": "saves", "rank": None, "node_id": None},
    },
}  # fmt: skip
"""Documents that an orchestrator writes beside those of the trainer."""
RARE: dict[str, dict[str, Any]] = {
    "hang": {"step": 3, "node_id": 1, "nodes": [0, 1], "waited_seconds": 9.0, "operation": "all-reduce", "sequence": 7,
             "where": "a.py:3", "recent": [{"sequence": 7, "what": "all-reduce", "ended": False}], "stacks": "here"},
    "out_of_memory": {"step": 3, "samples": 8, "activation_checkpointing": True, "device": "cpu"},
    "checkpoint_failed": {"step": 3, "message": "full", "attempt": 1, "gives_up": False},
    "resume": {"path": "checkpoints/g0001-s000000012", "step": 12},
    "error": {"message": "a warning", "fatal": False},
    "profile": {"step": 3, "steps": 2, "path": "profile/t.json",
                "top": [{"name": "mm", "self_seconds": 1.0, "share": 0.5, "calls": 3}]},
    "tune": {"elapsed_seconds": 1.0, "budget_seconds": 9.0, "group": "compile", "candidate": "default",
             "doing": "measures", "samples_per_second": {"low": 1.0, "median": 2.0, "high": 3.0}, "gain": None},
    "link": {"bytes": 1024, "seconds": [[0, 1, 0.1], [1, 0, 0.1]], "step": 3},
    "communication_error": {"step": 3, "operation": "all-reduce", "waited_seconds": 1.0, "error": "x", "attempt": 1},
}  # fmt: skip
"""Events of kinds that a short training has none of."""
ESCAPES = "\x1b]0;taken over\x07\x1b[31mred\x9b2J\r\u202egnp.\u2028[bold]"
"""Text with sequences that a terminal obeys."""

Damage = Callable[[Path], object]


def replaced(change: Callable[[bytes], bytes]) -> Damage:
    """Return a damage that replaces the content of a file."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def instead(make: Callable[[Path], object]) -> Damage:
    """Return a damage that puts something other than a regular file in its place."""
    return lambda path: (path.unlink(), make(path))


def every(kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Damage:
    """Return a damage of every value of a type in a JSON text, in its first line if it has several."""

    def damage(path: Path) -> None:
        text = path.read_text()
        line, end, rest = text.partition("\n") if path.suffix == ".jsonl" else (text, "", "")
        path.write_text(json.dumps(_mapped(json.loads(line), kind, change)) + end + rest)

    return damage


def _mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(part, kind, change) for key, part in value.items()}
    if isinstance(value, list):
        return [_mapped(part, kind, change) for part in value]
    return change(value) if isinstance(value, kind) and not isinstance(value, bool) else value


OTHER_VALUES: tuple[Any, ...] = (None, True, "x", -1, 2.5, 10**18, [], {}, ["x"], {"x": [None]}, [1, 2])
"""Values of all types of JSON, to be put in each other's place."""


def each_change(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value again and again, each time changed in one place, and where: a key is left out or added, or a
    value is of another type. Of a list, the first part stands for all."""
    for path in _paths_of(document):
        for value in OTHER_VALUES:
            changed = copy.deepcopy(document)
            _at(changed, path[:-1])[path[-1]] = value
            yield f"{path} = {value!r}", changed
        if isinstance(path[-1], str):
            changed = copy.deepcopy(document)
            del _at(changed, path[:-1])[path[-1]]
            yield f"{path} is left out", changed
    for path in ((), *_paths_of(document)):
        changed = copy.deepcopy(document)
        if isinstance(inner := _at(changed, path), dict):
            inner["of_a_later_version"] = {"a": [1]}
            yield f"{path} has one more", changed


def _paths_of(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*above, key)
        yield from _paths_of(part, (*above, key))


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        short = Path(tempfile.gettempdir()) / f"s{uuid.uuid4().hex[:8]}"  # paths of sockets must be short
        server.bind(str(short))
        short.rename(path)


def _large(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(400 << 20)


ANY: dict[str, Damage] = {
    "cut": replaced(lambda data: data[: len(data) * 2 // 3]),
    "flipped": replaced(lambda data: bytes([*data[:9], data[9] ^ 64, *data[10:-5], data[-5] ^ 2, *data[-4:]])),
    "empty": replaced(lambda data: b""),
    "no text": replaced(lambda data: b"\xff\xfe" + data),
    "pipe": instead(os.mkfifo),
    "socket": instead(_socket),
    "folder": instead(lambda path: path.mkdir()),
    "device": instead(lambda path: path.symlink_to("/dev/zero")),
    "terminal": instead(lambda path: path.symlink_to("/dev/stdin")),
    "400 MB": instead(_large),
}
"""Damages of any file."""
JSON: dict[str, Damage] = {
    "half a character": every(str, lambda _: "\ud800"),
    "NaN": every((int, float), lambda _: float("nan")),
    "infinity": every((int, float), lambda _: float("inf")),
    "deep": replaced(lambda data: b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "deeper": replaced(lambda data: b"[" * 200_000),
    "twice": replaced(lambda data: b'{"state":"running","state":"failed",' + data.lstrip()[1:]),
    "other type": every((str, int, float), lambda value: [[value]]),
    "no text where one should be": every(str, lambda _: 7),
    "no object": replaced(lambda data: b"[1]"),
    "huge": every((int, float), lambda _: 10**400),
    "large": every((int, float), lambda _: 1e308),
    "digits": replaced(lambda data: b'{"state": ' + b"9" * 50_000 + b"}"),
    "escapes": every(str, lambda text: text + ESCAPES),
}
"""Damages of a text in JSON."""


@dataclass(slots=True)
class Stage:
    """A home with a whole job and, at any time, one copy of it that is damaged."""

    home: Path
    secret: str = field(default_factory=lambda: f"SECRET-{uuid.uuid4().hex}")

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        outside = self.home / "outside.json"
        outside.write_text(json.dumps({"state": self.secret, "message": self.secret, "kind": self.secret, "time": 1}))

    @property
    def jobs(self) -> Path:
        """The folder of run directories."""
        return self.home / "storage" / "jobs"

    def train(self) -> None:
        """Train the whole job, with the product's own code, and put beside it what a cluster of two nodes writes."""
        folder = self.jobs / WHOLE
        small_job.train(self.home / "storage", small_job.write_dataset(self.home / "dataset"), WHOLE, steps=STEPS)
        rundir = RunDir(str(folder))
        keep_order(self.home, rundir.read_job(), None)
        write_cluster_files(rundir, "succeeded")
        seats = tuple(
            Candidate(member=f"n{node}p0-ab", node=node, local_rank=0, launch=1, host="127.0.0.1", port=9)
            for node in range(2)
        )
        for seat in seats:
            Candidacies(rundir.storage, 1).submit(1, seat)
        rundir.storage.write(path_of(1), text_of(Generation(number=1, launch=1, members=seats)))
        for name, document in ADDED.items():
            rundir.write_json(name, document)
        rundir.append_events(1, 1, 9, [event(kind, 1, 1, **fields) for kind, fields in RARE.items()])

    def copy(self) -> Path:
        """Make a fresh copy of the whole job, under another id, and return its folder."""
        folder = self.jobs / DAMAGED
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.jobs / WHOLE, folder)
        for name in ("job.json", "launch.json", "status.json"):
            path = folder / name
            path.write_text(path.read_text().replace(WHOLE, DAMAGED))
        order = (self.home / "orders" / f"{WHOLE}.json").read_text()
        (self.home / "orders" / f"{DAMAGED}.json").write_text(order.replace(WHOLE, DAMAGED))
        return folder

    def link_folder(self, name: str) -> None:
        """Put a link out of the run directory in the place of one of its folders."""
        folder, elsewhere = self.copy() / name, self.home / "elsewhere"
        shutil.rmtree(elsewhere, ignore_errors=True)
        folder.rename(elsewhere)
        (elsewhere / "node-7.log").write_text(self.secret)
        folder.symlink_to(elsewhere)

    def add_strangers(self) -> None:
        """Put files that dtrain never writes into every folder and beside the marks."""
        copy, clusters = self.copy(), self.home / "clusters"
        within = [path for base in (copy, clusters) for path in base.rglob("*") if path.is_dir()]
        for folder in [copy, self.jobs, *within]:
            leave_strangers(folder)

    def read(self) -> None:
        """Run all readers over both jobs. Raise where one of them fails, or takes too much memory."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of this process's memory begins anew
        before = resident_bytes("VmRSS")
        read_everything(self.home, WHOLE, DAMAGED, self.secret)
        assert resident_bytes("VmHWM") - before <= MOST_MEMORY


def resident_bytes(name: str) -> int:
    """Return a figure of this process's memory; 0 where the system does not tell."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10
    return 0


def write_cluster_files(rundir: RunDir, state: str, words: str = "") -> None:
    """Write the files that a cluster of two nodes leaves beside those of a trainer. ``words``: said in all of them."""
    job_id, ended = Path(rundir.uri).name, time.time() - 60
    launch = {"job_id": job_id, "node_count": 2, "processes_per_node": 1, "launch": 1, "token": "t" * 32}
    rundir.write_json(LAUNCH, launch | {"sku": "Standard_NC6s_v3", "submitted_at": ended - 60, "studio_url": words})
    times = {"started_at": ended - 60, "ended_at": ended}
    rundir.write_json(STATUS, {"job_id": job_id, "state": state, "message": words, "launch": 1, "pid": 1, **times})
    for node in range(2):
        rundir.write_node(NodePresence(node_id=node, launch=1, exit_codes=(0,), **times))
        rundir.storage.write(f"logs/node-{node}.log", b"2026-01-01 10:00:00 step 1\n2026-01-01 10:00:01 step 2\n")


def leave_strangers(folder: Path) -> None:
    """Put files into a folder as network file systems, editors and half-done copies leave them, and a pipe."""
    for name in (".nfs0000000000000abc00000001", "x.json.tmp", "#x#", "x.json~", ".x.swp", "x\x1b[31m.json", "g.json"):
        (folder / name).write_bytes(b'{"half": ')
    pipe = folder / "pipe.json"
    if not pipe.exists():
        os.mkfifo(pipe)


def job_of(folder: Path, dataset: Path) -> JobConfig:
    """Return the job of a training that takes seconds on two nodes."""
    config = DistributedTrainingConfig(world_size=2, threads_per_rank=1, max_steps=STEPS, warmup_steps=3)
    return JobConfig(
        job_id=folder.name, run_dir=str(folder), dataset=DatasetRef(uri=str(dataset)), training=config,
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip
