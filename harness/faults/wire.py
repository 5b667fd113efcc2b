"""What goes over the wire between hosts that are network namespaces: a listener at their switch."""

from __future__ import annotations

import socket
import threading
from types import TracebackType

from harness.faults import switch

_ALL = 3  # ETH_P_ALL
_FORCE_BUFFER = 33  # SO_RCVBUFFORCE


class Wire:
    """All frames at all ports of a switch, a network namespace given as a path, while it is open. Needs root."""

    def __init__(self, namespace: str) -> None:
        self.heard = bytearray()
        self._socket = _listen_in(namespace)
        self._socket.settimeout(0.1)
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over = True
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                self.heard += self._socket.recv(1 << 17)
            except TimeoutError:
                if self._is_over:
                    return


def _listen_in(namespace: str) -> socket.socket:
    """A socket in another namespace. A thread of its own enters it: that of the caller stays where it is."""
    made: list[socket.socket] = []

    def make() -> None:
        switch.enter(namespace)
        made.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)))
        made[0].setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, 1 << 27)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
