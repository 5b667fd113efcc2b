"""Connections between members on which both sides have proved who they are, on an event loop, and their port.

What is said over them belongs in `trainer.elastic.failure_detector`; the proof itself in `trainer.comm.handshake`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine

from trainer.comm.handshake import HELLO, PROOF_BYTES, REPLY, Caller, Listener
from trainer.comm.listener import MOST_UNPROVEN, SPEAK_SECONDS, TLS_SECONDS, NoRoomError, accept
from trainer.comm.tls import TLSContexts

CONNECT_SECONDS = 3.0
REST_SECONDS = 0.1
"""The pause before the next accept if there is no descriptor left and no unproven connection to close."""


async def connect_peer(
    address: tuple[str, int],
    key: bytes,
    me: str,
    member: str,
    tls: TLSContexts | None,
    seconds: float = CONNECT_SECONDS,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to a member. Raise OSError where there is none within so many ``seconds``, and
    `trainer.comm.handshake.AuthenticationError` where the other side is not that member."""
    context = tls.client if tls else None
    connecting = asyncio.open_connection(*address, ssl=context, server_hostname="" if context else None)
    reader, writer = await asyncio.wait_for(connecting, seconds)
    try:
        caller = Caller(key, me, member)
        writer.write(caller.hello)
        writer.write(caller.answer(await asyncio.wait_for(reader.readexactly(REPLY.size), seconds)))
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def admit_peer(
    connection: socket.socket, key: bytes, me: str, tls: TLSContexts | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Return an accepted connection and the proven name of its caller. Raise as `connect_peer` does, within
    `SPEAK_SECONDS`, and `TLS_SECONDS` more where TLS comes first; the connection is closed then."""
    loop, writer = asyncio.get_running_loop(), None
    try:
        async with asyncio.timeout(SPEAK_SECONDS + (TLS_SECONDS if tls else 0.0)):
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            context = tls.server if tls else None
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            listener = Listener(key, me)
            writer.write(listener.reply(await reader.readexactly(HELLO.size)))
            return reader, writer, listener.admit(await reader.readexactly(PROOF_BYTES))
    except BaseException:
        if writer is None:
            connection.close()
        else:
            writer.transport.abort()
        raise


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
