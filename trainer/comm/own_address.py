"""The address under which other nodes reach this one.

The decision, a pure function, and the probe of this host's interfaces, routes and free ports belong here. Who listens
at the address does not.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

from trainer.errors import ConfigError

HOST = "DTRAIN_HOST"
"""Variable: the address, or the name, under which other nodes reach this one."""
INTERFACE = "DTRAIN_INTERFACE"
"""Variable: the interface whose address that is."""
LOOPBACK = "127.0.0.1"
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that nobody has: what leads there is the default route."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """What the kernel says of this host."""

    interfaces: Mapping[str, Sequence[str]]
    """The addresses of each interface that is up, those of IPv4 first; link-local ones are left out."""
    towards: str | None = None
    """The address from which packets to the target would be sent; None without a target, or without a way to it."""
    default: str | None = None
    """The address of the default route; None where there is none."""


def own_address(environment: Mapping[str, str], towards: str | None = None) -> str:
    """Return the address under which other nodes reach this node.

    It is the first that there is of: DTRAIN_HOST; the address of the interface that DTRAIN_INTERFACE,
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names; the address from which the kernel would send to ``towards`` (the
    address or name of a peer; None: MASTER_ADDR, else the name by which SLURM knows this node, SLURMD_NODENAME); that
    of the default route; that of the first interface; loopback.
    Raise `ConfigError` if DTRAIN_INTERFACE names no interface with an address.
    """
    if given := environment.get(HOST):
        return given
    target = towards or environment.get("MASTER_ADDR") or environment.get("SLURMD_NODENAME")
    address, warning = choose_address(environment, target, _look(target))
    if warning:
        _log.warning("%s", warning)
    return address


def choose_address(environment: Mapping[str, str], target: str | None, found: HostAddresses) -> tuple[str, str]:
    """Return the address that `own_address` describes, and a warning, "" where there is nothing to warn of. Pure.

    Raise `ConfigError` if DTRAIN_INTERFACE names no interface with an address."""
    if name := environment.get(INTERFACE):
        if not found.interfaces.get(name):
            raise ConfigError(
                f"{INTERFACE}={name!r} is not an interface of this host that is up and has an address: set it to one "
                f"of {', '.join(sorted(found.interfaces))}, or set {HOST} to this host's address"
            )
        return found.interfaces[name][0], ""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in _named(environment.get(variable, ""), found.interfaces):
            if found.interfaces[name]:
                return found.interfaces[name][0], ""
    if target and is_loopback(target):
        return target if target != "localhost" else LOOPBACK, ""
    # The name of a host is often an address of loopback on the host itself: its peers know it by another.
    if found.towards and not is_loopback(found.towards):
        return found.towards, ""
    remedy = f"set {HOST} to this host's address, or {INTERFACE} to its interface"
    others = [one for addresses in found.interfaces.values() for one in addresses if not is_loopback(one)]
    if guess := found.default or next(iter(others), None):
        lost = target and not found.towards
        return guess, f"no route to {target!r} is known; using {guess}: {remedy}" if lost else ""
    return LOOPBACK, f"this host has only a loopback address, which no other host can reach: {remedy}"


def interface_of(address: str) -> str:
    """Return the name of the interface of this host that has an address, which may be given as a host's name. Raise
    `ConfigError` if there is none."""
    wanted = address if ":" in address else socket.gethostbyname(address)
    found = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(one.address == wanted for one in addresses):
            return name
    raise ConfigError(
        f"no interface of this host has the address {wanted}, which other nodes are told to use: set {HOST} to one "
        f"that it has, or {INTERFACE} to one of {', '.join(sorted(found))}"
    )


@contextmanager
def hold_ports(address: str, count: int = 1) -> Iterator[list[int]]:
    """Hold so many free ports at an address of this host while the block runs: nobody else finds the same ones."""
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            held.append(stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)))
            held[-1].bind((address, 0))
        yield [int(one.getsockname()[1]) for one in held]


def is_loopback(address: str) -> bool:
    """Return whether an address, or the name ``localhost``, is one of loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _named(pattern: str, interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the interfaces that a variable of gloo or NCCL names: whole names or the beginnings of names, with commas;
    ``=`` in front means whole names only, ``^`` all others (but loopback)."""
    without, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    wanted = [name for name in pattern.lstrip("^=").split(",") if name]
    if not wanted:
        return []

    def fits(name: str) -> bool:
        return any(name == one or (not exact and name.startswith(one)) for one in wanted)

    if without:
        return [name for name, found in interfaces.items() if not fits(name) and not any(map(is_loopback, found))]
    whole = [name for name in wanted if name in interfaces]
    return whole + [name for name in interfaces if name not in whole and fits(name)]


def _look(target: str | None) -> HostAddresses:
    """Return what the kernel says of this host. Sends nothing, but may ask for the address of a name."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces = dict[str, list[str]]()
    for name, addresses in psutil.net_if_addrs().items():
        if name in up:
            ordered = sorted(addresses, key=lambda one: one.family != socket.AF_INET)
            texts = [one.address for one in ordered if one.family in (socket.AF_INET, socket.AF_INET6)]
            interfaces[name] = [text for text in texts if not ipaddress.ip_address(text).is_link_local]
    default = next(filter(None, map(_source, _ELSEWHERE.values())), None)
    return HostAddresses(interfaces, _source(target) if target else None, default)


def _source(target: str) -> str | None:
    """Return the address from which the kernel would send to a target, None if it knows no way there."""
    try:
        family, *_, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket only asks the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return None
