"""Whose process is at the other end of a connection over loopback, as Linux tells: no other user of this machine is to
use a server that acts as this one. Elsewhere this is not known.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
MOST_LINE = 400
Address = tuple[str, int]
"""IPv4 address and port."""


def find_peer_user(client: Address, server: Address) -> int | None:
    """The user whose process holds the client's end; None where it is not found, or held by nobody any more."""
    return find_owner((Path(path).read_text() for path in TABLES if Path(path).exists()), client, server)


def find_owner(tables: Iterable[str], client: Address, server: Address) -> int | None:
    """The same from the content of `TABLES`. Pure."""
    ends = [f" {_hexed(client, mapped)} {_hexed(server, mapped)} " for mapped in (False, True)]
    for table in tables:
        for at in filter(lambda at: at >= 0, map(table.find, ends)):  # quick, for there may be thousands of lines
            _state, _, _, _, user, _, inode, *_ = table[at : at + MOST_LINE].partition("\n")[0].split()[2:]
            # Of a connection that its process has closed nothing but zeros is told, which would be root.
            if inode != "0":
                return int(user)
    return None


def is_peer_allowed(client: Address, server: Address, users: frozenset[int]) -> bool:
    """Is the client one of these users, this one, or root? Where that cannot be told on Linux it is not; elsewhere
    whoever reaches the server is."""
    if sys.platform != "linux":
        return True
    return find_peer_user(client, server) in users | {os.getuid(), 0}


def _hexed(address: Address, mapped: bool) -> str:
    """An address as the kernel prints it; ``mapped``: of an IPv6 socket that speaks IPv4."""
    packed = socket.inet_aton(address[0])
    whole = b"\0" * 10 + b"\xff" * 2 + packed if mapped else packed
    words = (int.from_bytes(whole[at : at + 4], sys.byteorder) for at in range(0, len(whole), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"
