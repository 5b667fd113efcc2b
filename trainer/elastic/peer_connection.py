"""Connections between members on which both sides have proved who they are, on an event loop.

What is said over them belongs in `trainer.elastic.failure_detector`; the proof itself in `trainer.comm.handshake`.
"""

from __future__ import annotations

import asyncio
import socket

from trainer.comm.handshake import HELLO, PROOF_BYTES, REPLY, Caller, Listener
from trainer.comm.listener import SPEAK_SECONDS
from trainer.comm.tls import TLSContexts

CONNECT_SECONDS = 3.0
TLS_SECONDS = 4.0
"""Additional seconds for a connection to authenticate if TLS comes first."""


async def connect_peer(
    address: tuple[str, int], key: bytes, me: str, member: str, tls: TLSContexts | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to a member. Raise OSError where there is none within `CONNECT_SECONDS`, and
    `trainer.comm.handshake.AuthenticationError` where the other side is not that member."""
    context = tls.client if tls else None
    connecting = asyncio.open_connection(*address, ssl=context, server_hostname="" if context else None)
    reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    try:
        caller = Caller(key, me, member)
        writer.write(caller.hello)
        writer.write(caller.answer(await asyncio.wait_for(reader.readexactly(REPLY.size), CONNECT_SECONDS)))
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
