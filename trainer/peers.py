"""Who of the others is there: a connection to each, a heartbeat over it, and short messages (D2).

A process that dies closes its connections, and its port refuses new ones: it is *gone*, known within a millisecond. A
process that is frozen or cut off says nothing: it is *silent* once nothing has come for ``timeout`` seconds. All of it
runs on one thread with an event loop, beside the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

View = Literal["unknown", "here", "gone", "silent"]
Address = tuple[str, int]

CONNECT_SECONDS = 3.0
RETRY_SECONDS = 0.1
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    address: Address
    view: View = "unknown"
    heard_at: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None


class Peers:
    """This process's port, and its connections to others. ``token`` keeps strangers out by mistake (another job on a
    port that was used again); what keeps them out by intent is TLS, see `trainer.tls`.

    ``on_change`` is called without arguments, on the loop's thread, whenever a view changes or a message has come; it
    must return at once. ``tls`` is (context as a server, context as a client), or None for plain connections.
    """

    def __init__(
        self,
        me: str,
        token: str,
        host: str,
        interval: float,
        timeout: float,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.me, self.token, self.interval, self.timeout = me, token, interval, timeout
        self.on_change = on_change
        self._tls = tls or (None, None)
        self._peers: dict[str, _Peer] = {}
        self._followers: set[asyncio.StreamWriter] = set()
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: Address = self._socket.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def follow(self, addresses: Mapping[str, Address]) -> None:
        """Watch exactly these members from now on (oneself left out)."""
        wanted = {member: address for member, address in addresses.items() if member != self.me}
        with self._lock:
            for member in set(self._peers) - set(wanted):
                self._cancel(self._peers.pop(member))
            for member, address in wanted.items():
                if member not in self._peers:
                    self._peers[member] = _Peer((address[0], address[1]))
                    self._loop.call_soon_threadsafe(self._start, member, self._peers[member])

    def view(self) -> dict[str, View]:
        """How each followed member looks from here."""
        with self._lock:
            return {member: peer.view for member, peer in self._peers.items()}

    def heard(self) -> dict[str, float]:
        """Seconds since each followed member was last heard."""
        now = time.monotonic()
        with self._lock:
            return {member: now - peer.heard_at for member, peer in self._peers.items()}

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to all who follow this process; no answer, no promise."""
        line = json.dumps({**message, "from": self.me}).encode() + b"\n"
        self._loop.call_soon_threadsafe(self._send, line)

    def messages(self) -> list[dict[str, Any]]:
        """What others have told since the last call."""
        with self._lock:
            taken, self._messages = self._messages, []
        return taken

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    # Everything below runs on the loop's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket, ssl=self._tls[0]))
        self._loop.create_task(self._judge())
        try:
            self._loop.run_forever()
        finally:
            server.close()
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One follower: say who we are, then answer each line with one."""
        try:
            hello = await _first_line(reader)
            if hello.get("token") != self.token:
                return
            self._followers.add(writer)
            answer = json.dumps({"member": self.me}).encode() + b"\n"
            writer.write(answer)
            while await reader.readline():
                writer.write(answer)
        except (TimeoutError, OSError, ValueError, asyncio.CancelledError):
            pass
        finally:
            self._followers.discard(writer)
            writer.transport.abort()

    async def _follow(self, member: str, peer: _Peer) -> None:
        """Hold a connection. One that broke is made anew, at once the first time: a dead process refuses it."""
        while True:
            heard_at = peer.heard_at
            try:
                await self._converse(member, peer)
            except ConnectionRefusedError:
                self._set(member, peer, "gone")
            except (TimeoutError, OSError, ValueError):
                if peer.view == "unknown":
                    self._set(member, peer, "silent")
            await asyncio.sleep(RETRY_SECONDS if peer.heard_at == heard_at else 0)

    async def _converse(self, member: str, peer: _Peer) -> None:
        """Connect, and read until the connection ends. Returns or raises when it has."""
        connecting = asyncio.open_connection(
            *peer.address, ssl=self._tls[1], server_hostname="" if self._tls[1] else None
        )
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        try:
            writer.write(json.dumps({"token": self.token, "member": self.me}).encode() + b"\n")
            hello = await _first_line(reader)
            if hello.get("member") != member:
                raise ConnectionRefusedError  # the port has another owner now
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
            await asyncio.sleep(self.interval)
            writer.write(b"\n")

    async def _judge(self) -> None:
        """Call those silent that have not been heard for too long. After a pause of this very process (a frozen host,
        a debugger) everybody gets a new chance: it was us who did not listen."""
        nap = min(self.interval, self.timeout) / 4
        while True:
            before = time.monotonic()
            await asyncio.sleep(nap)
            late = time.monotonic() - before - nap
            for member, peer in list(self._peers.items()):
                if late > self.timeout / 4:
                    peer.heard_at = time.monotonic()
                elif peer.view == "here" and time.monotonic() - peer.heard_at > self.timeout:
                    _log.warning("nothing heard from %s for %.1f s", member, self.timeout)
                    self._set(member, peer, "silent")

    def _set(self, member: str, peer: _Peer, view: View) -> None:
        if view == "here":
            peer.heard_at = time.monotonic()
        if peer.view != view and self._peers.get(member) is peer:
            peer.view = view
            self.on_change()


async def _first_line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """What the other end says first; nothing where it is a program that speaks another language."""
    try:
        said = json.loads(await asyncio.wait_for(reader.readline(), CONNECT_SECONDS))
    except ValueError:  # no JSON, no text, or a line without an end
        return {}
    return said if isinstance(said, dict) else {}
