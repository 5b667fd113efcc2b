"""Hosts as network namespaces of this machine, joined by a bridge, each behind a link that can be cut or limited.

They are made with ``ip`` and ``tc`` (token buckets in both directions), all in the kernel, so that 10 Gbit/s are
possible. This needs root; `Hosts.close` removes everything. Files are shared by all of them. No host has a default
route, and the first interface of each is ``docker0``, with the same address everywhere: nobody reaches a host there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from harness.faults.switch import enter

RATES = {"10gbit": 10e9, "1gbit": 1e9, "100mbit": 100e6}
"""Names of rates for ``tc``, and the rates in bits per second."""


class NoNamespacesError(RuntimeError):
    """Network namespaces cannot be made on this machine. The message says why."""


class Hosts:
    """A number of hosts on one network, each a network namespace; raises `NoNamespacesError` where none can be made."""

    def __init__(self, count: int) -> None:
        if shutil.which("ip") is None:
            raise NoNamespacesError("no network namespaces here: there is no `ip` command: install iproute2")
        if os.geteuid() != 0:
            raise NoNamespacesError("no network namespaces here: making them needs root")
        own = f"dtrain-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{own}-switch"
        self.names = [f"{own}-{number}" for number in range(count)]
        try:
            for name in (self._switch, *self.names):
                _do(f"ip netns add {name}")
            _do(f"ip -n {self._switch} link add bridge type bridge")
            _do(f"ip -n {self._switch} link set bridge up")
            for number, name in enumerate(self.names):
                _do(f"ip -n {name} link add docker0 type bridge")
                _do(f"ip -n {name} addr add 172.17.0.1/16 dev docker0")
                _do(f"ip -n {name} link set docker0 up")
                _do(f"ip -n {name} link add eth0 type veth peer name port{number} netns {self._switch}")
                _do(f"ip -n {self._switch} link set port{number} master bridge up")
                for address in (self.address(number), self.other_address(number)):
                    _do(f"ip -n {name} addr add {address}/24 dev eth0")
                _do(f"ip -n {name} link set lo up")
                _do(f"ip -n {name} link set eth0 up")
            for name in self.names:
                _wait_until_up(name)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | NoNamespacesError):
                raise NoNamespacesError(f"no network namespaces here: {error}") from error
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def paths(self) -> list[str]:
        """Paths of the namespaces, host by host."""
        return [f"/run/netns/{name}" for name in self.names]

    @property
    def switch_path(self) -> str:
        """The path of the namespace of the bridge, which all traffic between hosts passes."""
        return f"/run/netns/{self._switch}"

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        return f"10.79.0.{host + 1}"

    def other_address(self, host: int) -> str:
        """Return a second address of a host, in a network of its own on the same link."""
        return f"10.79.1.{host + 1}"

    def command(self, host: int) -> list[str]:
        """Return the words before a command that is to run on a host; it is executed in the place of this process."""
        return ["nsenter", f"--net={self.paths[host]}", "--"]

    @property
    def local_cluster(self) -> list[str]:
        """The words before the command of a job of the local cluster that put each of its nodes on the host of its
        number, and have gloo use that host's link instead of loopback."""
        path = self.paths[0].removesuffix("-0")
        line = f'GLOO_SOCKET_IFNAME=eth0 exec nsenter --net="{path}-$NODE_RANK" -- "$@"'
        return ["sh", "-c", line, "node"]

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Be on a host: this thread, and the threads and processes that it starts meanwhile."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(self.paths[host])
            try:
                yield
            finally:
                enter(f"/proc/self/fd/{home}")
        finally:
            os.close(home)

    def cut(self, host: int) -> None:
        """Take down the link of a host at the switch, as a cable that is pulled: nobody is told that it is gone."""
        _do(f"ip -n {self._switch} link set port{host} down")

    def restore(self, host: int) -> None:
        """Bring the link of a host up again."""
        _do(f"ip -n {self._switch} link set port{host} up")
        _wait_until_up(self.names[host])

    def limit(self, rate: str) -> None:
        """Limit the rate at which each host sends and receives to one of `RATES`."""
        burst = max(128 * 1024, round(RATES[rate] / 8 / 250))  # bytes between two ticks of the kernel's clock
        for number, name in enumerate(self.names):
            for where, device in ((name, "eth0"), (self._switch, f"port{number}")):
                _do(f"tc -n {where} qdisc replace dev {device} root tbf rate {rate} burst {burst} latency 100ms")

    def close(self) -> None:
        """Remove all namespaces, and with them the bridge and the links."""
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _do(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NoNamespacesError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def _wait_until_up(name: str) -> None:
    """Wait until the kernel says of a host's link that it is up, which it does some time after it was set so."""
    end = time.monotonic() + 30
    while "state UP" not in _do(f"ip -n {name} -o link show eth0"):
        if time.monotonic() > end:
            raise NoNamespacesError(f"the link of {name} does not come up")
        time.sleep(0.02)
