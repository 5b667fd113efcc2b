"""Failure detection: a connection to each other member, a heartbeat over it, and short messages.

A process that dies closes its connections, and its port refuses new ones: it is *gone*, known within a millisecond. A
process that is frozen or cut off says nothing: it is *silent* once its silence is out of proportion to those before
(`phi_accrual`), or at the latest after ``timeout`` seconds. All of it runs on one thread with an event loop, separate
from the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.comm.handshake import HELLO, PROOF_BYTES, REPLY, AuthenticationError, Caller, Listener
from trainer.comm.listener import BACKLOG, MOST_UNPROVEN, SPEAK_SECONDS, NoRoomError, accept
from trainer.comm.tls import TLSContexts
from trainer.elastic.phi_accrual import SignsOfLife

PeerStatus = Literal["unknown", "here", "gone", "silent"]
Address = tuple[str, int]

CONNECT_SECONDS = 3.0
RETRY_SECONDS = 0.1
TLS_SECONDS = 4.0
"""Additional seconds for a connection to authenticate if TLS comes first."""
SUSPICION = 12.0
"""The φ (`phi_accrual`) from which a member is silent: one live peer in 10¹² would be, were gaps normally
distributed."""
LEAST_BEATS = 5
"""Beats that have to be missing besides."""
PEERS_PER_BEAT = 16
"""Peers for whom the interval between two beats holds; of more, each hears fewer, so that their number does not load
the network."""
DROPPED_OFTEN = 5
"""After this many connections in a row that were closed without an answer, another process owns the port. One or two
may have been closed because the listener was busy with others."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    address: Address
    signs: SignsOfLife
    view: PeerStatus = "unknown"
    heard_at: float = field(default_factory=time.monotonic)
    dropped: int = 0
    task: asyncio.Task[None] | None = None


class FailureDetector:
    """A detector with this process's port and its connections to others. ``key``: the key that only members have; both
    sides of each connection prove it first (`trainer.comm.handshake`). The later messages are encrypted only with
    TLS, see `trainer.comm.tls`.

    ``interval``: seconds between two beats; ``timeout``: those of a silence that is always too long; ``adapts`` False:
    only that counts. ``on_change`` is called without arguments, on the loop's thread, whenever a view changes or a
    message has come; it must return at once. ``tls``: None for plain connections.
    """

    def __init__(
        self,
        me: str,
        key: bytes,
        host: str,
        interval: float,
        timeout: float,
        tls: TLSContexts | None = None,
        on_change: Callable[[], None] = lambda: None,
        adapts: bool = False,
    ) -> None:
        self.me, self.key, self.interval, self.timeout = me, key, interval, timeout
        self.on_change, self.adapts = on_change, adapts
        self._tls = tls
        self._peers: dict[str, _Peer] = {}
        self._followers: set[asyncio.StreamWriter] = set()
        self._unproven: dict[asyncio.Task[None], socket.socket] = {}
        """In the order in which they came."""
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def follow(self, addresses: Mapping[str, Address]) -> None:
        """Watch exactly these members from now on, except this process itself."""
        wanted = {member: address for member, address in addresses.items() if member != self.me}
        with self._lock:
            for member in set(self._peers) - set(wanted):
                self._cancel(self._peers.pop(member))
            for member, address in wanted.items():
                if member not in self._peers:
                    self._peers[member] = _Peer((address[0], address[1]), SignsOfLife(self.interval))
                    self._loop.call_soon_threadsafe(self._start, member, self._peers[member])

    def statuses(self) -> dict[str, PeerStatus]:
        """Return the status of each followed member as this process sees it."""
        with self._lock:
            return {member: peer.view for member, peer in self._peers.items()}

    def seconds_since_heard(self) -> dict[str, float]:
        """Return the seconds since each followed member was last heard."""
        now = time.monotonic()
        with self._lock:
            return {member: now - peer.heard_at for member, peer in self._peers.items()}

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all followers of this process, without an answer or a guarantee of delivery."""
        line = json.dumps({**message, "from": self.me}).encode() + b"\n"
        self._loop.call_soon_threadsafe(self._send, line)

    def take_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call."""
        with self._lock:
            taken, self._messages = self._messages, []
        return taken

    def close(self) -> None:
        """Stop the thread; its connections end with it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    # Everything below runs on the loop's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._socket, self._accept)
        self._loop.create_task(self._judge())
        try:
            self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for writer in list(self._followers):
                writer.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _start(self, member: str, peer: _Peer) -> None:
        peer.task = self._loop.create_task(self._follow(member, peer))

    def _cancel(self, peer: _Peer) -> None:
        def cancel() -> None:
            if peer.task:
                peer.task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def _send(self, line: bytes) -> None:
        for writer in self._followers:
            with contextlib.suppress(Exception):
                writer.write(line)

    def _accept(self) -> None:
        """Accept a connection. Without a free descriptor, close the oldest unauthenticated one, or wait a little."""
        try:
            connection = accept(self._socket)
        except NoRoomError:
            if not self._drop_oldest():
                self._loop.remove_reader(self._socket)
                self._loop.call_later(RETRY_SECONDS, self._loop.add_reader, self._socket, self._accept)
            return
        if connection is None:
            return
        if len(self._unproven) >= MOST_UNPROVEN:
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

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one follower: once it is authenticated, answer each of its lines with one."""
        writer, task = None, asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(SPEAK_SECONDS + (TLS_SECONDS if self._tls else 0.0)):
                reader = asyncio.StreamReader()
                protocol = asyncio.StreamReaderProtocol(reader)
                context = self._tls.server if self._tls else None
                transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                listener = Listener(self.key, self.me)
                writer.write(listener.reply(await reader.readexactly(HELLO.size)))
                listener.admit(await reader.readexactly(PROOF_BYTES))
            self._unproven.pop(task, None)
            self._followers.add(writer)
            answer = json.dumps({"member": self.me}).encode() + b"\n"
            writer.write(answer)
            while await reader.readline():
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, OSError, ValueError, EOFError, asyncio.CancelledError):
            pass
        finally:
            if writer is None:
                connection.close()
            else:
                self._followers.discard(writer)
                writer.transport.abort()

    async def _follow(self, member: str, peer: _Peer) -> None:
        """Hold a connection and reconnect when it breaks, at once the first time: a dead process refuses it."""
        while True:
            heard_at = peer.heard_at
            try:
                await self._converse(member, peer)
            except (ConnectionRefusedError, AuthenticationError):
                self._set(member, peer, "gone")
            except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
                peer.dropped += 1
                if peer.dropped >= DROPPED_OFTEN:
                    self._set(member, peer, "gone")
            except (TimeoutError, OSError, ValueError):
                if peer.view == "unknown":
                    self._set(member, peer, "silent")
            await asyncio.sleep(RETRY_SECONDS if peer.heard_at == heard_at else 0)

    async def _converse(self, member: str, peer: _Peer) -> None:
        """Connect, and read until the connection ends. Returns or raises when it has."""
        context = self._tls.client if self._tls else None
        connecting = asyncio.open_connection(*peer.address, ssl=context, server_hostname="" if context else None)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        try:
            caller = Caller(self.key, self.me, member)
            writer.write(caller.hello)
            writer.write(caller.answer(await asyncio.wait_for(reader.readexactly(REPLY.size), CONNECT_SECONDS)))
            peer.dropped = 0
            self._set(member, peer, "here")
            beating = self._loop.create_task(self._beat(writer))
            try:
                while line := await reader.readline():
                    self._set(member, peer, "here")
                    message = json.loads(line)
                    if isinstance(message, dict) and "member" not in message:
                        with self._lock:
                            self._messages.append(message)
                        self.on_change()
            finally:
                beating.cancel()
        finally:
            writer.transport.abort()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(self._pause())
            writer.write(b"\n")

    def _pause(self) -> float:
        """Return the seconds between two beats to one peer."""
        return self.interval * max(1.0, len(self._peers) / PEERS_PER_BEAT)

    async def _judge(self) -> None:
        """Mark members as silent that have not been heard for too long. After a pause of this process itself (a frozen
        host, a debugger, a machine with too much work) the time starts again for all: this process did not listen."""
        nap = min(self.interval, self.timeout) / 4
        while True:
            before = time.monotonic()
            await asyncio.sleep(nap)
            now = time.monotonic()
            shortest = min(self.timeout, LEAST_BEATS * self._pause()) if self.adapts else self.timeout
            for member, peer in list(self._peers.items()):
                if now - before - nap > shortest / 4:
                    peer.heard_at = now
                    peer.signs.forgive(now)
                elif peer.view == "here" and self._is_overdue(peer, now):
                    _log.warning("nothing heard from %s for %.1f s", member, now - peer.heard_at)
                    self._set(member, peer, "silent")

    def _is_overdue(self, peer: _Peer, now: float) -> bool:
        """Return whether a peer has been silent for too long."""
        silence = now - peer.heard_at
        if silence > self.timeout or not self.adapts:
            return silence > self.timeout
        peer.signs.expected_gap = self._pause()
        return silence > LEAST_BEATS * self._pause() and peer.signs.phi(now) > SUSPICION

    def _set(self, member: str, peer: _Peer, view: PeerStatus) -> None:
        if view == "here":
            peer.heard_at = time.monotonic()
            peer.signs.hear(peer.heard_at)
        if peer.view != view and self._peers.get(member) is peer:
            peer.view = view
            self.on_change()
