"""Traces of optimizer steps, for Perfetto or chrome://tracing: a window that the configuration chooses, and more while
the training runs, by a file in the run directory.

    profile/request.json                 {"steps": 5, "ranks": [0], "python": true}; what is left out, or an empty
                                         file: just these
    profile/request-000001.json          what rank 0 made of it when it took it: every rank answers a number once
    profile/trace-r00000-s000123.json    the trace of rank 0 that ends with step 123; a ``profile`` event sums it up

A trace has `MOST_TRACED_STEPS` steps at most. What a window holds is sorted and summed up in this very process when it
ends, about 50 µs and 5 KB for each operation, and most of that with Python's lock held: a thousand steps of a few
thousand operations would hold up the training for minutes, and take its memory.

A trace holds torch's operations and, unless ``python`` says no, the Python functions that called them. What that costs
is in docs/monitoring.md.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import tempfile
import threading
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from trainer.config import DESCRIBE, MOST_TRACED_STEPS, DistributedTrainingConfig
from trainer.observability.reporter import Reporter
from trainer.rundir import PROFILE, PROFILE_REQUEST, RunDir
from trainer.runtime.packages import load

LOOK_SECONDS, REMOTE_LOOK_SECONDS = 2.0, 15.0
"""Between two looks for a request. A look at remote storage is paid for."""
TOP = 10
MOST_BYTES = 10_000
"""The largest request, in bytes; a larger file is refused."""
CLOSE_SECONDS = 10.0
"""The seconds that the end of a training waits for a trace that is still being written."""
_TAKEN = re.compile(r"request-(\d{6,})\.json$")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class TraceRequest:
    """A request to trace ``steps`` steps on these ranks, with Python's functions where ``python`` says so."""

    steps: int = Field(default=5, ge=1, le=MOST_TRACED_STEPS)
    ranks: list[int] = Field(default_factory=lambda: [0], min_length=1)
    from_step: int = Field(default=0, ge=0)
    """Steps to be done before it begins. 0: at once; where several ranks are asked, when all have had the time to
    notice, so that they trace the same steps."""
    python: bool = True


_REQUEST = TypeAdapter(TraceRequest)


def parse_request(data: bytes) -> TraceRequest:
    """Return the request. Raise ValueError, which names the wrong fields, if it is invalid."""
    try:
        return _REQUEST.validate_json(data) if data.strip() else TraceRequest()
    except ValidationError as error:
        wrong = load(DESCRIBE)(error, TraceRequest).replace("\n", "; ")
        raise ValueError(f"{PROFILE_REQUEST}: {wrong[:400]}") from None


class TraceRequests:
    """A thread that looks for requests now and then: storage that hangs must hold up neither the training nor its
    watchdog."""

    def __init__(self, rundir: RunDir, reporter: Reporter, step: int) -> None:
        self.rundir, self.reporter = rundir, reporter
        self.step = self._step_before = step
        """The steps done, kept up to date by the `StepProfiler`."""
        self._pace = 0
        """Steps between the last two looks; 0 if unknown."""
        self.asked: queue.SimpleQueue[TraceRequest] = queue.SimpleQueue()
        """The requests that this rank has to trace."""
        self._answered: set[str] | None = None
        self._complained = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trace-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; a look at storage that hangs is not waited for."""
        self._stop.set()
        self._thread.join(1.0)  # a look at storage that hangs is not waited for

    def _work(self) -> None:
        seconds = LOOK_SECONDS if self.rundir.storage.is_local else REMOTE_LOOK_SECONDS
        while True:
            try:
                self._look()
                self._complained = ""
            except (OSError, ValueError) as error:
                self._complain(str(error))
            if self._stop.wait(seconds):
                return

    def _look(self) -> None:
        self._pace, self._step_before = self.step - self._step_before, self.step
        names = self.rundir.storage.list(PROFILE)
        taken = {name: int(match[1]) for name in names if (match := _TAKEN.match(name))}
        if self._answered is None:  # those of before this process began are not for it
            self._answered, self._pace = set(taken), 0
        if self.reporter.rank == 0 and PROFILE_REQUEST in (f"{PROFILE}/{name}" for name in names):
            taken |= self._take(max(taken.values(), default=0) + 1)
        for name in sorted(taken.keys() - self._answered):
            self._answered.add(name)
            request = parse_request(self._read(f"{PROFILE}/{name}"))
            if self.reporter.rank in request.ranks:
                self.asked.put(request)

    def _take(self, number: int) -> dict[str, int]:
        """Give the request a number, as its new name. An invalid one is deleted, so that it is complained about only
        once. A request to several ranks waits until the steps between two looks are known: only then can a step be
        chosen before which all have noticed it."""
        name = f"request-{number:06d}.json"
        try:
            request = parse_request(self._read(PROFILE_REQUEST))
        except (OSError, ValueError):
            self.rundir.storage.delete(PROFILE_REQUEST)
            raise
        if len(request.ranks) > 1 and not request.from_step:
            if not self._pace:
                return {}
            request = replace(request, from_step=self.step + 2 * self._pace + 1)
        self.rundir.storage.delete(PROFILE_REQUEST)
        self.rundir.storage.create(f"{PROFILE}/{name}", json.dumps(asdict(request)).encode())
        return {name: number}

    def _read(self, name: str) -> bytes:
        return self.rundir.storage.read_bounded(name, MOST_BYTES)

    def _complain(self, message: str) -> None:
        """Report a message, unless it is the same as the last one."""
        if message != self._complained:
            self._complained = message
            _log.warning(message)
            self.reporter.emit("error", message=f"no trace: {message}", fatal=False)


class StepProfiler:
    """A profiler that traces steps of this process: those of the configuration, and those of requests.

    Tracing costs time: the step times of these steps differ from those of the others, and so do the next few, because a
    thread of this process writes the trace. A profiler that fails loses its trace and nothing else.
    """

    def __init__(
        self, config: DistributedTrainingConfig, rundir: RunDir, reporter: Reporter, device: torch.device, step: int
    ) -> None:
        """Start with ``step`` steps done."""
        self.rundir, self.reporter, self.device = rundir, reporter, device
        self.requests = TraceRequests(rundir, reporter, step)
        self._asked: list[TraceRequest] = []
        if config.profile_steps:
            self._asked.append(
                TraceRequest(
                    steps=config.profile_steps, from_step=config.profile_from_step, python=config.profile_python
                )
            )
        self._profile: torch.profiler.profile | None = None
        self._steps = self._left = 0
        self._writer: threading.Thread | None = None
        self._begin_if_due(step)

    def step(self, step: int) -> None:
        """Count a step: ``step`` steps are done. To be called after each step."""
        self.requests.step = step
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._end(step)
        else:  # not in the step that ended a trace: CUPTI is detached in the next one, and would see nothing of it
            self._begin_if_due(step)

    def close(self, step: int) -> None:
        """End tracing, if it has not ended, and wait until the traces are written."""
        self.requests.close()
        if self._profile is not None:
            self._end(step)
        if self._writer is not None:
            self._writer.join(CLOSE_SECONDS)

    def _begin_if_due(self, step: int) -> None:
        if self._writer is not None and self._writer.is_alive():
            return  # torch reads the events of one trace while it ends another one: now and then that is a crash
        while not self.requests.asked.empty():
            self._asked.append(self.requests.asked.get())
        due = next((item for item in self._asked if step >= item.from_step), None)
        if due is None:
            return
        self._asked.remove(due)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            # Without this CUPTI stays attached after the trace, and each later step pays for it (`benchmarks.gpu`).
            # Below CUDA 12.6 it crashed with CUDA graphs; the pinned torch is built with a later one.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
        if torch.autograd.profiler._is_profiler_enabled:  # two at once end in a crash
            return self._failed(step, "the model's own code is tracing already")
        # Collectives happen on a thread that was there before.
        all_threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        profile = torch.profiler.profile(activities=activities, with_stack=due.python, experimental_config=all_threads)
        try:
            profile.start()
        except Exception as error:  # CUPTI is taken, or not permitted
            return self._failed(step, str(error))
        self._profile, self._steps, self._left = profile, due.steps, due.steps

    def _end(self, step: int) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None
        try:
            profile.stop()
        except Exception as error:
            return self._failed(step, str(error))
        done = self._steps - self._left
        if done:
            path = f"{PROFILE}/trace-r{self.reporter.rank:05d}-s{step:06d}.json"
            args = profile, path, step, done
            self._writer = threading.Thread(target=self._write, args=args, name="trace", daemon=True)
            self._writer.start()

    def _failed(self, step: int, why: str) -> None:
        self.reporter.emit("error", message=f"no trace at step {step}: {why}", fatal=False)

    def _write(self, profile: torch.profiler.profile, path: str, step: int, steps: int) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                profile.export_chrome_trace(str(file))
                self.rundir.storage.write(path, file.read_bytes())
            top = top_operations(profile, self.device.type == "cuda")
        except Exception as error:  # a full disk, storage that is away: nothing that a training should end of
            self.reporter.emit("error", message=f"the trace {path} was not written: {error}", fatal=False)
            return
        self.reporter.emit("profile", step=step, steps=steps, path=path, top=top)


def top_operations(profile: torch.profiler.profile, on_gpu: bool) -> list[dict[str, Any]]:
    """Return the ten operations with the longest time of their own; on a GPU that of the kernels that they started.
    ``share`` is that of the time of all operations, some of which happen at the same time. Python's functions are none
    of them: most threads wait in one."""
    own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        # Kernels have entries of their own besides.
        if event.device_type == torch.autograd.DeviceType.CPU and not _is_python(event):
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            own[event.key][0] += microseconds / 1e6
            own[event.key][1] += 1
    rows = sorted(((seconds, name, int(calls)) for name, (seconds, calls) in own.items()), reverse=True)
    total = sum(seconds for seconds, _, _ in rows) or 1.0
    return [
        {"name": name[:200], "self_seconds": round(seconds, 9), "share": round(seconds / total, 6), "calls": calls}
        for seconds, name, calls in rows[:TOP]
    ]


def _is_python(event: Any) -> bool:
    """Return whether an event is a call of a Python function, which older versions of torch tell by its name
    alone."""
    told = getattr(event, "is_python_function", None)
    return bool(_PYTHON.search(event.key) if told is None else told)


_PYTHON = re.compile(r"\(\d+\): |^nn\.Module: |^<built-in ")
