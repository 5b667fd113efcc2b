"""Orders that a job's page gives: cancel, resume. Each is the command of `dtrain` that a shell would give, run as a
process of its own, which outlives the dashboard.

Who may give orders is decided by `judge_order`. The guard (`dtrain_dagster.web.guard`) has refused other websites'
requests before.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from dtrain_dagster.jobs.facts import DAMAGED
from dtrain_dagster.jobs.orders import environment_anywhere, order_file, ordered_job, script_of, script_trouble
from dtrain_dagster.support.audit import AuditLog
from dtrain_dagster.web.guard import LOOPBACK
from trainer.config import JOB_ID
from trainer.printable import visible
from trainer.rundir import LAUNCH, RunDir
from trainer.secrets.redaction import redact

CANCEL, RESUME = "cancel", "resume"
MOST_SAID = 2000
"""The most characters of what a command has said that are kept: its end."""
MOST_AT_ONCE = 8
MOST_ENDED = 200
"""The most jobs of which the last order is known once it has ended: the latest."""
_DTRAIN = "from dtrain_dagster.cli.main import main; main(prog_name='dtrain')"


class OrderRefusedError(ValueError):
    """An order that is not given. The message says why, and what to do instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderState:
    """The last order that was given for a job."""

    order: str
    command: str
    """The command as a shell would give it."""
    since: float
    code: int | None = None
    """The exit code of the command; None while it runs."""
    said: str = ""
    """The end of what it has printed; "" while it runs."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An order whose command runs."""

    state: OrderState
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def end(self, code: int) -> OrderState:
        """Return the state at the end of the command, and close its output."""
        with self.output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * MOST_SAID))
            text = redact(output.read().decode(errors="replace").strip())[-MOST_SAID:]
        return replace(self.state, code=code, said=visible(text.removeprefix("Error: "), keep_lines=True))


def judge_order(host: str, is_own_user: bool) -> str:
    """Return why a browser may not give orders; "" where it may. Pure. ``host``: the name in the request's ``Host``;
    ``is_own_user``: whether the kernel says that the other end belongs to the user of this process."""
    if host not in LOOPBACK:
        return "orders are taken only at 127.0.0.1: reach the dashboard by ssh -L, or use `dtrain cancel`"
    return "" if is_own_user else "orders are taken only from the user who runs the dashboard"


def allowed_orders(state: str, is_ordered_here: bool, script_trouble: str = "") -> dict[str, str]:
    """Return each order with the reason why it cannot be given to a job in ``state``, "" where it can. Pure.
    ``is_ordered_here``: whether this home has the order of the job (`dtrain_dagster.jobs.orders`); ``script_trouble``:
    why a script's job cannot be started again, "" where it can and for all other jobs."""
    runs = state in ("running", "queued")
    not_running = "" if runs else "it is not running"
    resume = ""
    if runs:
        resume = "it runs"
    elif state == DAMAGED:
        resume = "its run directory is damaged"
    elif state == "succeeded":
        resume = "it has succeeded"
    elif not is_ordered_here:
        resume = "it was not ordered from this home: run `dtrain train` there, with the same --name"
    else:
        resume = script_trouble
    return {CANCEL: not_running, RESUME: resume}


def order_command(order: str, job_id: str, home: Path, launch: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `dtrain` for an order. ``launch``: the ``launch.json`` of the job. Raise
    `OrderRefusedError` for an order that cannot be given."""
    if not JOB_ID.fullmatch(job_id):
        raise OrderRefusedError("there is no job of that name")
    if order == CANCEL:
        return ["cancel", job_id]
    if order == RESUME:
        return _resume(job_id, home, launch)
    raise OrderRefusedError(f"there is no order {order[:40]!r}: give cancel or resume")


def _resume(job_id: str, home: Path, launch: Mapping[str, Any]) -> list[str]:
    """The nodes are as many as were ordered: a run directory, which nodes write, must not raise their number."""
    ordered = ordered_job(home, job_id)
    if ordered is None:
        raise OrderRefusedError(f"the order of job {job_id} cannot be read")
    if ordered.is_of_script:  # the command finds out how the script was given, and where
        if trouble := script_trouble(script_of(home, job_id)):
            raise OrderRefusedError(trouble)
        return ["train", "--name", job_id, "--detach"]
    ranks = ordered.training.world_size
    each = launch.get("processes_per_node")
    each = each if isinstance(each, int) and 0 < each <= ranks and ranks % each == 0 else 1
    sized = ["--nodes", str(ranks // each), "--procs-per-node", str(each)]
    return ["train", "--config", str(order_file(home, job_id)), "--name", job_id, *sized, "--detach"]


class OrderDesk:
    """Takes orders for the jobs of a home, one at a time for each job."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._under_way: dict[str, _UnderWay] = {}
        self._ended: dict[str, OrderState] = {}
        self._lock = threading.Lock()

    def describe(self, job_id: str, state: str) -> dict[str, Any]:
        """Return what the page needs for its buttons: which orders can be given, and the last one."""
        with self._lock:
            self._take_ended()
            given = self._under_way.get(job_id)
            last = given.state if given else self._ended.get(job_id)
        return {"allowed": self._allowed(job_id, state), "last": last and asdict(last)}

    def give(self, rundir: RunDir, job_id: str, state: str, order: str) -> OrderState:
        """Start the command of an order, and return its state. Raise `OrderRefusedError` where it cannot be given, or
        where another order of this job is under way; `AuditError` where it cannot be recorded."""
        if refused := self._allowed(job_id, state).get(order):
            raise OrderRefusedError(f"job {job_id} takes no {order}: {refused}")
        arguments = order_command(order, job_id, self.home, rundir.read_json(LAUNCH) or {})
        made = OrderState(order=order, command=redact(shlex.join(["dtrain", *arguments])), since=time.time())
        with self._lock:
            self._take_ended()
            other = self._under_way.get(job_id)
            if other or len(self._under_way) >= MOST_AT_ONCE:
                which = other.state.order if other else f"{len(self._under_way)} orders"
                raise OrderRefusedError(f"{which} is still under way: wait until it is done")
            # A file, and no pipe: what the command says must not end it when the dashboard has ended.
            output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the command has ended
            with AuditLog(self.home).operation(f"{order} from the dashboard", job_id):
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _DTRAIN, *arguments],  # -P: no file of this folder is a module
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environment_anywhere(os.environ, self.home),
                )
            self._under_way[job_id] = _UnderWay(made, process, output)
        return made

    def _take_ended(self) -> None:
        """Keep what commands have said that have ended since, of the latest jobs. The lock is held."""
        for job_id, given in list(self._under_way.items()):
            if (code := given.process.poll()) is not None:
                del self._under_way[job_id]
                self._ended.pop(job_id, None)
                self._ended[job_id] = given.end(code)
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def _allowed(self, job_id: str, state: str) -> dict[str, str]:
        ordered = ordered_job(self.home, job_id)
        is_of_script = ordered is not None and ordered.is_of_script
        trouble = script_trouble(script_of(self.home, job_id)) if is_of_script else ""
        return allowed_orders(state, ordered is not None, trouble)
