"""MLflow's scoring server without identity, secrets or network: ``python -I`` runs this file with a JSON order.

It is the server that ``mlflow models serve --env-manager local`` starts, by the same command, but in this process: the
command line of MLflow would cost another interpreter and 3 s of a CPU.

The model's own code runs in the server. Its process is in a network namespace with a loopback of its own, which no
other process reaches and from which nothing is reached. Requests come through one socket, made outside, whose
connections a small process carries in. Where the kernel has no such namespaces the server listens by itself, and the
parent warns. Only the standard library is imported before the namespace is entered, which needs a process with one
thread.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import runpy
import shlex
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 1


def main(order_file: str) -> None:
    """Confine this process as ``order_file`` says, then run the server in it."""
    order = json.loads(Path(order_file).read_text())
    spec = importlib.util.spec_from_file_location("_dtrain_sandbox", order["sandbox"])
    assert spec is not None
    assert spec.loader is not None
    sandbox: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sandbox)
    sandbox.limit(order["memory_bytes"], order["cpu_seconds"], order["file_bytes"])
    outside = socket.socket(fileno=order["socket"])
    held = sandbox.confine(
        order["readable"], order["writable"], serves=True, before_files=lambda: _enter(order, outside)
    )
    outside.close()
    if sandbox.forbid_calls(serves=True):
        held.append("calls")
    Path(order["held"]).write_text(json.dumps(held))
    from mlflow.pyfunc import scoring_server  # not above: it starts threads

    host: Any = HOST  # annotated as a number there
    command, environment = scoring_server.get_cmd(order["model"], order["port"], host, nworkers=1)
    os.environ.update(environment)
    sys.argv = shlex.split(command)
    runpy.run_module(sys.argv[0], run_name="__main__")


def _enter(order: dict[str, Any], outside: socket.socket) -> None:
    """Bring the namespace's loopback up, and start the process that carries connections in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _UP, b""))
    server = os.getpid()
    if os.fork() == 0:
        try:
            _carry(outside, order["port"], server)
        finally:
            os._exit(0)


def _carry(outside: socket.socket, port: int, parent: int) -> None:
    outside.settimeout(1.0)
    while os.getppid() == parent:  # confined as it is, its end gives no signal to a process outside
        try:
            caller, _ = outside.accept()
        except TimeoutError:
            continue
        caller.settimeout(None)
        try:
            server = socket.create_connection((HOST, port))
        except OSError:
            caller.close()
            continue
        for source, target in ((caller, server), (server, caller)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


if __name__ == "__main__":
    main(sys.argv[1])
