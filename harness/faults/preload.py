"""A process that has imported what a node needs, and forks jobs from it: a node starts in milliseconds, not seconds.

It forks supervisors (the real one), and those fork their nodes instead of executing a command;
all else is as on the local cluster. It never makes a thread or touches a tensor, so that forking is safe. Run as a
program it takes jobs as lines of JSON on its standard input, a socket, and ends all it has started when that closes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from trainer.runtime.launch import Launch

# Before anything is imported that would start threads of its own.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "DTRAIN_FACTORY_MODULES": "paced",
}
_MODULES = (
    "dtrain_dagster.clusters.supervise", "paced", "pyarrow.parquet", "torch._dynamo", "trainer.__main__",
    "trainer.evaluation.window_baselines", "trainer.engine.trainer", "harness.faults.loop_rank",
)  # fmt: skip
_POLL_SECONDS = 0.05


def main() -> int:
    control = socket.socket(fileno=os.dup(0))
    os.environ.update(ENVIRONMENT)
    gc.disable()
    for name in _MODULES:
        __import__(name)
    gc.enable()
    gc.freeze()  # or the collector of every child would copy all of it
    threads = len(os.listdir("/proc/self/task"))
    control.sendall(json.dumps({"ready": os.getpid(), "threads": threads}).encode() + b"\n")
    lines = control.makefile("rb")
    running: set[int] = set()
    while True:
        if select.select([control], [], [], _POLL_SECONDS)[0]:
            line = lines.readline()
            if not line:
                break
            order = json.loads(line)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                lines.close()
                control.close()
                os._exit(_supervise(order))
            running.add(pid)
            control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.discard(ended[0])
            control.sendall(json.dumps({"ended": ended[0], "status": ended[1]}).encode() + b"\n")
    for pid in running:  # whoever asked is gone: a supervisor that dies takes its nodes along
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


def _supervise(order: Mapping[str, Any]) -> int:
    """In a process of its own: the life of a supervisor, as its `main` does it."""
    from dtrain_dagster.clusters import presence
    from dtrain_dagster.clusters.supervision.local_placer import LocalPlacer
    from dtrain_dagster.clusters.supervision.supervisor import Supervisor, begin_clock
    from dtrain_dagster.support.job_lock import acquire
    from trainer.rundir import RunDir

    os.setsid()
    _redirect(order["log"])
    rundir = RunDir(order["run_dir"])
    if acquire(rundir.storage.local_path()) is None:
        print("another supervisor has this job", flush=True)
        return 1
    clock = begin_clock(rundir)
    secret = Path(f"{order['run_dir']}-secrets/launch")
    placer = LocalPlacer(rundir, secret, clock, spawn=partial(_fork, order))
    supervisor = Supervisor(rundir, placer, clock, lambda *news: None)
    _note(order, {"supervisor": os.getpid(), "time": time.time()})
    state = supervisor.run()
    presence.close(rundir, time.time())
    print(json.dumps({"state": state}), flush=True)
    return 0


def _fork(
    order: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str], pipe: int, group: int | None
) -> _Child:
    """Start a process of a node as a fork of this one."""
    node, me = int(environment["NODE_RANK"]), os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_node(command, {**environment, **_address(order, node)}, pipe, group, me, order, node)
    with contextlib.suppress(OSError):  # whichever of the two comes first
        os.setpgid(pid, group or pid)
    launch = Launch.read(environment)
    stay = {"launch": launch.number, "incarnation": launch.incarnation}
    _note(order, {"node": node, **stay, "pid": pid, "time": time.time()})
    return _Child(pid)


class _Child:
    """What the supervisor needs of a process it has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _address(order: Mapping[str, Any], node: int) -> dict[str, str]:
    if not order["addresses"]:
        return {}
    own, first = order["addresses"][node], order["addresses"][0]
    return {"DTRAIN_HOST": own, "MASTER_ADDR": first, "GLOO_SOCKET_IFNAME": "eth0"}


def _note(order: Mapping[str, Any], line: Mapping[str, Any]) -> None:
    with open(order["notes"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _be_node(
    command: Sequence[str], environment: Mapping[str, str], pipe: int, group: int | None, parent: int,
    order: Mapping[str, Any], node: int,
) -> NoReturn:  # fmt: skip
    """The life of a process that ``command`` (``… -m trainer …``) would have started."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, as the supervisor's own children have it
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, group or 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (1, 2):
            os.dup2(pipe, descriptor)
        import trainer.__main__
        from harness.faults import loop_rank

        if order["namespaces"]:
            from harness.faults import switch

            switch.enter(order["namespaces"][node])
        os.closerange(3, 1024)  # the pipe's other end, the lock's
        os.environ.clear()
        os.environ.update(environment)
        arguments = list(command[list(command).index("trainer") + 1 :])
        code = (loop_rank if loop_rank.IS_LOOP in environment else trainer.__main__).run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    try:  # as the interpreter does when it ends
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _redirect(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
