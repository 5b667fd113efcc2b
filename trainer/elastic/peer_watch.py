"""`PeerWatch`: the failure detector of a rank, in a process of its own.

Code that holds the rank's interpreter lock, such as the import of a large package, stops every thread of the rank, and
a heartbeat among them: healthy ranks would be thrown out. So heartbeats are given by a process beside the rank. It ends
with the rank, and the other members know that at once. It falls silent while the rank is stopped, and where the rank
has given no sign of life for the time after which a silence is always too long.

Here are both ends of it: what the rank calls, and `main` of the process. They exchange lines of JSON over a socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import trainer
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.tls import CertificateFiles, TLSContexts
from trainer.elastic.failure_detector import FailureDetector, Inbox, line_of, open_port
from trainer.elastic.peer import Address, PeerStatus
from trainer.exit_codes import LOST
from trainer.runtime.parent_death import die_with

if TYPE_CHECKING:
    from trainer.config import DistributedTrainingConfig


class PeerWatch(Inbox):
    """The rank's end: it has the methods of `trainer.elastic.failure_detector.FailureDetector`. ``on_change`` is called
    on a thread of its own."""

    def __init__(
        self,
        me: str,
        secret: LaunchSecret,
        job: str,
        host: str,
        source: str,
        config: DistributedTrainingConfig,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``source``: where the certificates of its connections come from
        (`trainer.comm.encryption.CertificateSource`)."""
        super().__init__()
        self.me, self.on_change = me, on_change
        self._views: dict[str, PeerStatus] = {}
        self._heard_at: dict[str, float] = {}
        self._since: dict[str, int] = {}
        """By member: the number of the call of `follow` that began with it; what was seen before is of another one."""
        self._calls = 0
        self._closed = False
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._interval = config.health_check_seconds
        self._socket, other = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        tls = None if config.tls is None else {name: getattr(config.tls, name) for name in ("certificate", "key", "ca")}
        about = {"me": me, "job": job, "secret": secret.value.hex(), "source": source, "tls": tls}
        seconds = {"interval": self._interval, "timeout": config.peer_timeout_seconds}
        self._tell(about | seconds | {"adapts": config.adaptive_detection})
        with open_port(host) as listening, other:
            self.address: Address = listening.getsockname()[:2]
            has_begun = threading.Event()
            threading.Thread(
                target=self._live, args=(other.fileno(), listening.fileno(), has_begun), name="peers-alive", daemon=True
            ).start()
            has_begun.wait()
        if self._process is None:
            raise OSError("the process that watches this rank's peers could not be started")
        threading.Thread(target=self._read, name="peers", daemon=True).start()

    def follow(self, addresses: Mapping[str, Address]) -> None:
        """Watch exactly these members from now on, except this process itself."""
        wanted = {member: address for member, address in addresses.items() if member != self.me}
        with self._lock:
            if wanted.keys() == self._views.keys():
                return
            self._calls += 1
            self._since = {member: self._since.get(member, self._calls) for member in wanted}
            self._views = {member: self._views.get(member, "unknown") for member in wanted}
            now = time.monotonic()
            self._heard_at = {member: self._heard_at.get(member, now) for member in wanted}
            self._tell({"follow": wanted, "call": self._calls})

    def expect(self, members: int) -> None:
        """Be ready for a world of so many members, all of which may call at once."""
        self._tell({"expect": members})

    def statuses(self) -> dict[str, PeerStatus]:
        """Return the status of each followed member as this process sees it."""
        with self._lock:
            return dict(self._views)

    def seconds_since_heard(self) -> dict[str, float]:
        """Return the seconds since each followed member was last heard; 0 for one that is here."""
        now = time.monotonic()
        with self._lock:
            return {
                member: 0.0 if view == "here" else now - self._heard_at[member] for member, view in self._views.items()
            }

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Send a message to all followers of this process, without an answer or a guarantee of delivery."""
        self._tell({"broadcast": dict(message)})

    def close(self) -> None:
        """End the process; its connections end with it."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.wait()

    def _tell(self, order: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError), self._sending:  # `_read` says that it has ended
            self._socket.sendall(line_of(order))

    def _live(self, orders: int, listening: int, has_begun: threading.Event) -> None:
        """Start the process, and give it a sign of life at each beat, for as long as threads of this one run. The
        kernel ends it with the thread that has started it, which is this one."""
        # The process inherits it: what asks this rank to end, a signal to all its processes, must not end the other one
        # first. No handler of this process runs on this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        try:
            self._process = _start(orders, listening)
        finally:
            has_begun.set()
        while not self._closed:
            self._tell({})
            time.sleep(self._interval)

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                self._take(json.loads(line))
                self._news.set()
                self.on_change()
        if not self._closed:  # without it the others take this rank for dead
            print(f"the process that watches the peers of {self.me} has ended: this rank ends, too", file=sys.stderr)  # noqa: T201
            os._exit(LOST)

    def _take(self, said: Mapping[str, Any]) -> None:
        with self._lock:
            if (message := said.get("message")) is not None:
                self._put(message)
            for member, (view, heard_at) in said.get("views", {}).items():
                if self._since.get(member, said["call"] + 1) <= said["call"]:
                    self._views[member], self._heard_at[member] = view, heard_at


def _start(orders: int, listening: int) -> subprocess.Popen[bytes]:
    # The package may have been found by a path that a new interpreter does not know.
    paths = (str(Path(trainer.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(orders), str(listening), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        pass_fds=(orders, listening),
    )


# What follows runs in the process.


class _Watcher:
    """A detector that carries out the rank's orders."""

    def __init__(self, orders: socket.socket, listening: socket.socket, rank_pid: int) -> None:
        self._socket, self._lines = orders, orders.makefile("rb")
        about = json.loads(self._lines.readline())
        self._rank, self._timeout, self._alive_at = psutil.Process(rank_pid), about["timeout"], time.monotonic()
        self._call, self._formed, self._told = 0, 0, dict[str, PeerStatus]()
        secret = LaunchSecret(bytes.fromhex(about["secret"]))
        self._lock = threading.Lock()
        self._detector = FailureDetector(
            about["me"], secret.key("peers", about["job"]), "", about["interval"], about["timeout"],
            _contexts(about, secret), self._tell_changes, about["adapts"], listening,
        )  # fmt: skip
        threading.Thread(target=self._look, args=(about["interval"],), daemon=True).start()

    def carry_out(self) -> None:
        """Carry out orders until the rank ends."""
        for line in self._lines:
            order = json.loads(line)
            self._alive_at = time.monotonic()
            if "follow" in order:
                with self._lock:
                    self._call = order["call"]
                    self._told = {member: view for member, view in self._told.items() if member in order["follow"]}
                    self._detector.follow({member: tuple(address) for member, address in order["follow"].items()})
            elif "expect" in order:
                self._detector.expect(order["expect"])
            elif "broadcast" in order:
                self._detector.broadcast(order["broadcast"])

    def _look(self, interval: float) -> None:
        """Be silent while the rank is stopped, or has not lived for too long."""
        while True:
            with contextlib.suppress(psutil.Error):
                stopped = self._rank.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                self._detector.is_mute = stopped or time.monotonic() - self._alive_at > self._timeout
            if os.getppid() != self._rank.pid:
                os._exit(0)
            time.sleep(interval)

    def _tell_changes(self) -> None:
        with self._lock:
            views = self._detector.statuses()
            silence = self._detector.seconds_since_heard()
            now = time.monotonic()
            changed = {name: view for name, view in views.items() if self._told.get(name, "unknown") != view}
            self._told = views
            lines: list[dict[str, Any]] = [{"message": message} for message in self._detector.take_messages()]
            if self._detector.formed > self._formed:
                self._formed = self._detector.formed
                lines.append({"message": {"formed": self._formed}})
            if changed:
                seen = {name: (view, now - silence.get(name, 0.0)) for name, view in changed.items()}
                lines.append({"views": seen, "call": self._call})
            with contextlib.suppress(OSError):
                self._socket.sendall(b"".join(map(line_of, lines)))


def _contexts(about: Mapping[str, Any], secret: LaunchSecret) -> TLSContexts | None:
    if about["source"] == "files":
        from trainer.config import TLSConfig

        return CertificateFiles(TLSConfig(**about["tls"]))
    if about["source"] == "launch":
        from trainer.comm.launch_certificate import LaunchCertificate

        return LaunchCertificate(secret, about["job"])
    return None


def main(orders: int, listening: int, rank_pid: int) -> None:
    """Watch the peers of a rank, by the orders of the rank, until it ends."""
    die_with(rank_pid)
    with socket.socket(fileno=orders) as channel, socket.socket(fileno=listening) as door:
        _Watcher(channel, door, rank_pid).carry_out()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
