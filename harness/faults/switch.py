"""A switch in user space: hosts are network namespaces; every frame between two of them passes through this process.

Each host's only interface besides loopback is a TAP device whose other end is a file descriptor here, so a link (one
direction from one host to another) can be cut, delayed and throttled at will, which the kernel of many machines cannot
(netem). `Link` is pure; the rest moves frames. Run as a program it is told what to do by lines of JSON on its control
socket, its standard input; when that closes, it ends, and the namespaces vanish with the last process inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

QUEUE_BYTES = 512 * 1024
"""What waits for a throttled link at most; more is lost, as in any switch, and TCP slows down."""
MTU = 9000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Link:
    """One direction from one host to another. Times are seconds of any one clock."""

    cut: bool = False
    delay: float = 0.0
    rate: float | None = None
    """Bytes per second; None: as fast as can be."""
    _free_at: float = 0.0
    _last_arrival: float = 0.0

    def arrival(self, size: int, now: float) -> float | None:
        """When a frame of ``size`` bytes that is sent now arrives; None if it is lost. Frames never overtake."""
        if self.cut:
            return None
        sent = now
        if self.rate is not None:
            waiting = max(0.0, self._free_at - now) * self.rate
            if waiting + size > QUEUE_BYTES:
                return None
            sent = self._free_at = max(now, self._free_at) + size / self.rate
        self._last_arrival = max(sent + self.delay, self._last_arrival if self._last_arrival > now else 0.0)
        return self._last_arrival

    def change(self, cut: bool = False, delay: float = 0.0, rate: float | None = None) -> None:
        """Be like this from now on; what is on its way stays so, unless the link is cut."""
        self.cut, self.delay, self.rate = cut, delay, rate
        self._free_at = 0.0
        if cut:
            self._last_arrival = 0.0


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def mac(host: int) -> str:
    return f"02:77:00:00:00:{host + 1:02x}"


def enter(namespace: str) -> None:
    """Move this process (it must have one thread only) into a network namespace, given as a path. OSError."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def make_host(host: int, hosts: int) -> tuple[int, int]:
    """A namespace with a TAP device: (descriptor of the device, descriptor of the namespace). OSError where the kernel
    does not allow it."""
    if _libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    with contextlib.suppress(OSError):  # no chatter of neighbour discovery
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    commands = [
        "link set lo up",
        f"link set eth0 address {mac(host)} mtu {MTU} up",
        f"addr add {address(host)}/24 dev eth0",
        # Known once and for all: a link that comes back must not wait for ARP.
        *(f"neigh add {address(n)} lladdr {mac(n)} dev eth0 nud permanent" for n in range(hosts) if n != host),
    ]
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip: {done.stderr.strip()}")
    return device, os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Switch:
    """Moves frames between the devices of hosts 0 … n - 1."""

    def __init__(self, devices: list[int]) -> None:
        self.devices = devices
        ends = range(len(devices))
        self.links = {(a, b): Link() for a in ends for b in ends if a != b}
        self._by_mac = {bytes.fromhex(mac(host).replace(":", "")): host for host in ends}
        self._flying: list[tuple[float, int, int, int, bytes]] = []  # arrival, number, from, to, frame
        self._number = 0

    def read(self, host: int) -> None:
        """Take what a host has sent."""
        for _ in range(64):  # the others have their turn as well
            try:
                frame = os.read(self.devices[host], MTU + 64)
            except BlockingIOError:
                return
            receiver = self._by_mac.get(frame[:6])
            everybody = receiver is None and frame[0] & 1
            receivers = [receiver] if receiver is not None else [n for n in range(len(self.devices)) if everybody]
            now = time.monotonic()
            for end in receivers:
                arrival = None if end == host else self.links[host, end].arrival(len(frame), now)
                if arrival is not None and arrival <= now:
                    self._deliver(end, frame)
                elif arrival is not None:
                    self._number += 1
                    heapq.heappush(self._flying, (arrival, self._number, host, end, frame))

    def deliver_due(self) -> float | None:
        """Deliver what has arrived; seconds until the next arrival, None if nothing is on its way."""
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, sender, receiver, frame = heapq.heappop(self._flying)
            if not self.links[sender, receiver].cut:
                self._deliver(receiver, frame)
        return self._flying[0][0] - now if self._flying else None

    def _deliver(self, receiver: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue, a device that is down: frames get lost
            os.write(self.devices[receiver], frame)


def serve(switch: Switch, control: socket.socket) -> None:
    """Until the control socket closes."""
    poll = select.epoll()
    hosts = {device: host for host, device in enumerate(switch.devices)}
    for descriptor in [*hosts, control.fileno()]:
        poll.register(descriptor, select.EPOLLIN)
    lines = control.makefile("rb")
    while True:
        wait = switch.deliver_due()
        for descriptor, _ in poll.poll(-1 if wait is None else wait):
            if descriptor in hosts:
                switch.read(hosts[descriptor])
                continue
            line = lines.readline()  # one at a time: each is answered before the next is sent
            if not line:
                return
            for order in json.loads(line):
                switch.links[order.pop("from"), order.pop("to")].change(**order)
            control.sendall(b"{}\n")


def main() -> int:
    """``switch.py HOSTS``, with the control socket as standard input."""
    control = socket.socket(fileno=os.dup(0))
    hosts = int(sys.argv[1])
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        made = [make_host(host, hosts) for host in range(hosts)]
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return 1
    finally:
        _libc.setns(home, _CLONE_NEWNET)
    paths = [f"/proc/{os.getpid()}/fd/{namespace}" for _, namespace in made]
    control.sendall(json.dumps({"namespaces": paths}).encode() + b"\n")
    serve(Switch([device for device, _ in made]), control)
    return 0


if __name__ == "__main__":
    sys.exit(main())
