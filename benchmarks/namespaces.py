"""Hosts as network namespaces of this machine, joined by a bridge, each behind a link of a given rate.

They are made with ``ip`` and ``tc`` (token buckets in both directions), all in the kernel, so that 10 Gbit/s are
possible. This needs root; `Hosts.close` removes everything.
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

RATES = {"10gbit": 10e9, "1gbit": 1e9, "100mbit": 100e6}
"""Names of rates for ``tc``, and the rates in bits per second."""


class NoNamespacesError(RuntimeError):
    """Network namespaces cannot be made on this machine. The message says why."""


class Hosts:
    """A number of hosts on one network, each a network namespace; raises `NoNamespacesError` where none can be made."""

    def __init__(self, count: int) -> None:
        self._switch = f"dtrain-{os.getpid()}-switch"
        self.names = [f"dtrain-{os.getpid()}-{number}" for number in range(count)]
        try:
            for name in (self._switch, *self.names):
                _do(f"ip netns add {name}")
            _do(f"ip -n {self._switch} link add bridge type bridge")
            _do(f"ip -n {self._switch} link set bridge up")
            for number, name in enumerate(self.names):
                _do(f"ip -n {name} link add eth0 type veth peer name port{number} netns {self._switch}")
                _do(f"ip -n {self._switch} link set port{number} master bridge up")
                _do(f"ip -n {name} addr add {self.address(number)}/24 dev eth0")
                _do(f"ip -n {name} link set lo up")
                _do(f"ip -n {name} link set eth0 up")
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


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NoNamespacesError(f"{command}: {done.stderr.strip()}")
