"""Failure detection: a connection to each watched member, a heartbeat over it, and short messages.

A process that dies closes its connections, and its port refuses new ones: it is *gone*, known within a millisecond. A
process that is frozen or cut off says nothing: it is *silent* once its silence is out of proportion to those before
(`phi_accrual`), or at the latest after ``timeout`` seconds. All of it runs on one thread with an event loop, separate
from the training.

A message goes to all who watch this process; in a large world, where few do, each member passes it on (`mailbox`).
There two members that watch each other share one connection, over which both beat unasked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.comm.handshake import HELLO, PROOF_BYTES, REPLY, AuthenticationError, Caller, Listener
from trainer.comm.listener import BACKLOG, SPEAK_SECONDS
from trainer.comm.tls import TLSContexts
from trainer.elastic.doorkeeper import Doorkeeper
from trainer.elastic.mailbox import Mailbox, line_of
from trainer.elastic.phi_accrual import SignsOfLife

PeerStatus = Literal["unknown", "here", "gone", "silent"]
Address = tuple[str, int]

CONNECT_SECONDS = 3.0
RETRY_SECONDS = 0.1
MOST_DOUBLED = 5
"""In a large world the pause before another attempt doubles so often: attempts must not be what keeps a peer busy."""
SHARED_SECONDS = 3.0
"""Seconds in which the other end of a shared connection has to make it, before this one does."""
MOST_CONNECTING = 3
"""Connections to watched members that are made at a time: all members make theirs when a generation begins."""
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
COLLECT_SECONDS = 0.01
"""Seconds in which losses are collected into one message: a rack is lost at once."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    address: Address
    signs: SignsOfLife
    view: PeerStatus = "unknown"
    heard_at: float = field(default_factory=time.monotonic)
    dropped: int = 0
    task: asyncio.Task[None] | None = None
    pulse_at: float = float("-inf")
    """When it last gave a sign of life unasked."""
    writer: asyncio.StreamWriter | None = None
    """The authenticated connection to it, while there is one."""
    letter: bytes = b""
    """The last line for this peer alone. Each new connection sends it again: it may have been lost with the last."""
    is_shared: bool = False
    """Whether one connection is enough for both, since it watches this process, too."""
    failures: int = 0
    """Attempts to connect in a row that came to nothing."""


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
        self._followers: dict[asyncio.StreamWriter, str] = {}
        """The connections that others have made, with their proven names."""
        self._came = asyncio.Condition()
        """Notified when a connection of another comes or ends."""
        self._connecting = asyncio.Semaphore(MOST_CONNECTING)
        self.mail = Mailbox(me)
        """What others have told, but for `take_messages`."""
        self._found_lost: dict[str, str] = {}
        """Losses that are not told yet."""
        self.sent_lines = 0
        """The beats, answers and messages that this process has sent."""
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        listening.setblocking(False)
        self.address: Address = listening.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._door = Doorkeeper(self._loop, listening, self._serve)
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def follow(self, addresses: Mapping[str, Address], shared: Collection[str] = ()) -> None:
        """Watch exactly these members from now on, except this process itself. With those in ``shared``, which watch
        this process, too, one connection is enough: the one whose name is first makes it."""
        wanted = {member: address for member, address in addresses.items() if member != self.me}
        with self._lock:
            for member in set(self._peers) - set(wanted):
                self._cancel(self._peers.pop(member))
            for member, address in wanted.items():
                if member not in self._peers:
                    self._peers[member] = _Peer((address[0], address[1]), SignsOfLife(self.interval))
                    self._loop.call_soon_threadsafe(self._start, member, self._peers[member])
                self._peers[member].is_shared = member in shared

    def enter(self, number: int, members: Collection[str], passes_on: bool) -> None:
        """From now on messages are about a generation, see `Mailbox.enter`. Members that are lost to this process
        already are told again."""
        self.mail.enter(number, members, passes_on)
        self.expect(len(members))
        with self._lock:
            lost = {member: str(peer.view) for member, peer in self._peers.items() if peer.view in ("gone", "silent")}
        self._loop.call_soon_threadsafe(self._note_lost, lost)

    def expect(self, callers: int) -> None:
        """Have room for so many callers at once that have not yet authenticated."""
        self._door.most_unproven = max(self._door.most_unproven, callers)

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
        """Send a message to all followers of this process, without an answer or a guarantee of delivery. In a large
        world they pass it on, and one that this process has passed on already is not sent again."""
        if (line := self.mail.tell(message)) is not None:
            self._loop.call_soon_threadsafe(self._send, line)

    def write_letter(self, member: str, letter: Mapping[str, Any]) -> None:
        """Send a letter to a followed member, in the place of an earlier one, now or as soon as it is reached."""
        with self._lock:
            if (peer := self._peers.get(member)) is not None:
                peer.letter = line_of(letter)
                self._loop.call_soon_threadsafe(self._post, member, peer)

    def take_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call."""
        return self.mail.take_messages()

    def close(self) -> None:
        """Stop the thread; its connections end with it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    # Everything below runs on the loop's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._door.open()
        self._loop.create_task(self._judge())
        self._loop.create_task(self._pulse())
        try:
            self._loop.run_forever()
        finally:
            self._door.close()
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

    def _notify(self) -> None:
        self.mail.notify()
        self.on_change()

    def _post(self, member: str, peer: _Peer) -> None:
        if peer.letter and (writer := self._links().get(member)) is not None:
            self._write(writer, peer.letter)

    def _links(self) -> dict[str, asyncio.StreamWriter]:
        """Return one connection to each member that this process can write to, its own before the other's."""
        links = {member: writer for writer, member in self._followers.items()}
        with self._lock:
            return links | {member: peer.writer for member, peer in self._peers.items() if peer.writer is not None}

    def _write(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        if not writer.is_closing():
            writer.write(line)
            self.sent_lines += 1

    def _take(self, sender: str, line: bytes) -> None:
        """Take in a line that is no beat: a message, or a letter that is kept or sent on."""
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("a line is an object")
        if "candidacy" in value:
            self._deliver(value)
            return
        if "member" not in value:
            is_news, passed_on = self.mail.hear(value, sender)
            if passed_on is not None:
                self._send(passed_on)
            if is_news:
                self._notify()
        elif "pulse" in value and (peer := self._peers.get(sender)) is not None:
            peer.pulse_at = time.monotonic()

    def _deliver(self, letter: dict[str, Any]) -> None:
        """Keep a letter that is for this process; send another one on towards its reader, if the way is known."""
        next_one = self.mail.put_letter(letter)
        if next_one is None:
            self._notify()
        elif (writer := self._links().get(next_one)) is not None:
            self._write(writer, line_of(letter))

    def _note_lost(self, lost: Mapping[str, str]) -> None:
        """Tell these losses soon, with others that are seen meanwhile."""
        if lost and not self._found_lost:
            self._loop.call_later(COLLECT_SECONDS, self._tell_losses)
        self._found_lost.update(lost)

    def _tell_losses(self) -> None:
        lost, self._found_lost = self._found_lost, {}
        if (line := self.mail.tell_losses(lost)) is not None:
            self._send(line)

    def _send(self, line: bytes) -> None:
        links = self._links().values() if self.mail.passes_on else self._followers
        for writer in links:
            self._write(writer, line)

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
                caller = listener.admit(await reader.readexactly(PROOF_BYTES))
            self._door.admit(task)
            self._followers[writer] = caller
            await self._tell_came()
            answer = line_of({"member": self.me})
            writer.write(answer)
            while line := await reader.readline():
                if (peer := self._peers.get(caller)) is not None and peer.is_shared:
                    self._set(caller, peer, "here")
                if line != b"\n":
                    self._take(caller, line)
                    continue
                writer.write(answer)
                self.sent_lines += 1
                await writer.drain()
        except (TimeoutError, OSError, ValueError, EOFError, asyncio.CancelledError):
            pass
        finally:
            if writer is None:
                connection.close()
            else:
                self._followers.pop(writer, None)
                writer.transport.abort()
                await self._tell_came()

    async def _follow(self, member: str, peer: _Peer) -> None:
        """Hold a connection and reconnect when it breaks, at once the first time: a dead process refuses it."""
        while True:
            if peer.is_shared and member < self.me:
                await self._await_shared(member)
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
            peer.failures = peer.failures + 1 if peer.heard_at == heard_at else 0
            doubled = 2 ** min(peer.failures - 1, MOST_DOUBLED) if self.mail.passes_on else 1
            await asyncio.sleep(RETRY_SECONDS * doubled if peer.failures else 0)

    async def _await_shared(self, member: str) -> None:
        """Wait for the connection that a member makes to this process, and then for its end."""

        def is_there() -> bool:
            return member in self._followers.values()

        async with self._came:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait_for(is_there), SHARED_SECONDS)
            await self._came.wait_for(lambda: not is_there())

    async def _tell_came(self) -> None:
        async with self._came:
            self._came.notify_all()

    async def _converse(self, member: str, peer: _Peer) -> None:
        """Connect, and read until the connection ends. Returns or raises when it has."""
        async with self._connecting if peer.is_shared else nullcontext():
            reader, writer = await self._connect(member, peer)
        try:
            peer.dropped, peer.writer = 0, writer
            self._post(member, peer)
            self._set(member, peer, "here")
            beating = self._loop.create_task(self._beat(peer, writer))
            try:
                while line := await reader.readline():
                    self._set(member, peer, "here")
                    self._take(member, line)
            finally:
                beating.cancel()
        finally:
            peer.writer = None
            writer.transport.abort()

    async def _connect(self, member: str, peer: _Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection over which both sides have proved who they are."""
        context = self._tls.client if self._tls else None
        connecting = asyncio.open_connection(*peer.address, ssl=context, server_hostname="" if context else None)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        try:
            caller = Caller(self.key, self.me, member)
            writer.write(caller.hello)
            writer.write(caller.answer(await asyncio.wait_for(reader.readexactly(REPLY.size), CONNECT_SECONDS)))
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _beat(self, peer: _Peer, writer: asyncio.StreamWriter) -> None:
        """Ask a peer for a sign of life at each beat, unless it gives them unasked."""
        while True:
            await asyncio.sleep(self._pause())
            if not self.mail.passes_on or time.monotonic() - peer.pulse_at > 1.5 * self._pause():
                writer.write(b"\n")
                self.sent_lines += 1

    async def _pulse(self) -> None:
        """In a large world, give all followers a sign of life at each beat."""
        while True:
            await asyncio.sleep(self._pause())
            if self.mail.passes_on:
                self._send(line_of({"member": self.me, "pulse": True}))

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
            if view in ("gone", "silent"):
                self._note_lost({member: view})
            self._notify()
