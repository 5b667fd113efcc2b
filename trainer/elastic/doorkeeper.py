"""Accepting connections on an event loop: how many may be unauthenticated at once (`trainer.comm.listener`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine

from trainer.comm.listener import MOST_UNPROVEN, NoRoomError, accept

REST_SECONDS = 0.1
"""The pause before the next accept if there is no descriptor left and no unproven connection to close."""


class Doorkeeper:
    """Accepts connections at a listening socket, and starts ``serve`` for each. Its methods run on the loop's
    thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        serve: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        self._loop, self._socket, self._serve = loop, listener, serve
        self._unproven: dict[asyncio.Task[None], socket.socket] = {}
        """In the order in which they came."""
        self.most_unproven = MOST_UNPROVEN

    def open(self) -> None:
        """Begin to accept."""
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more, and close the socket."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def admit(self, task: asyncio.Task[None]) -> None:
        """Take the connection of a task for authenticated."""
        self._unproven.pop(task, None)

    def _accept(self) -> None:
        """Accept a connection. Without a free descriptor, close the oldest unauthenticated one, or wait a little."""
        try:
            connection = accept(self._socket)
        except NoRoomError:
            if not self._drop_oldest():
                self._loop.remove_reader(self._socket)
                self._loop.call_later(REST_SECONDS, self._loop.add_reader, self._socket, self._accept)
            return
        if connection is None:
            return
        if len(self._unproven) >= self.most_unproven:
            self._drop_oldest()
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._unproven[task] = connection
        task.add_done_callback(lambda done: self._unproven.pop(done, None))

    def _drop_oldest(self) -> bool:
        for task in self._unproven:
            del self._unproven[task]
            task.cancel()
            return True
        return False
