"""The user of the process at the other end of a loopback connection, as Linux tells it. No other user of this machine
may use a server that acts as this one. On other systems the user is not known."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
MOST_LINE = 400
Address = tuple[str, int]
"""Address of IPv4 or IPv6, and port."""
MAPPED = b"\0" * 10 + b"\xff" * 2
"""What stands before an IPv4 address in a socket of IPv6."""


def find_peer_user(client: Address, server: Address) -> int | None:
    """Return the id of the user whose process holds the client's end; None where there is none, or it is closed."""
    return find_owner((Path(path).read_text() for path in TABLES if Path(path).exists()), client, server)


def find_owner(tables: Iterable[str], client: Address, server: Address) -> int | None:
    """Return the same from the content of `TABLES`. Raise OSError for what is no address. Pure."""
    ends = [f" {own} {other} " for own, other in zip(_hexed(client), _hexed(server), strict=False)]
    for table in tables:
        for at in filter(lambda at: at >= 0, map(table.find, ends)):  # quick, for there may be thousands of lines
            _state, _, _, _, user, _, inode, *_ = table[at : at + MOST_LINE].partition("\n")[0].split()[2:]
            # The kernel shows zeros for a connection that its process has closed; as a user, 0 would be root.
            if inode != "0":
                return int(user)
    return None


def is_peer_allowed(client: Address, server: Address, users: frozenset[int]) -> bool:
    """Return whether the client is one of these users, this one, or root. False where Linux does not tell; True on
    other systems."""
    if sys.platform != "linux":
        return True
    return find_peer_user(client, server) in users | {os.getuid(), 0}


def _hexed(address: Address) -> list[str]:
    """Return an address as the kernel prints it: one of IPv4 also as a socket of IPv6 has it."""
    if ":" in address[0]:
        forms = [socket.inet_pton(socket.AF_INET6, address[0])]
    else:
        four = socket.inet_aton(address[0])
        forms = [four, MAPPED + four]
    shown = []
    for whole in forms:
        words = (int.from_bytes(whole[at : at + 4], sys.byteorder) for at in range(0, len(whole), 4))
        shown.append(f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}")
    return shown
