"""Who is at the other end of a connection: a mutual challenge-response over a key that both ends have.

Three messages of fixed size. Who connects says a name and a nonce; who listens answers with a nonce of its own and
proves that it has the key; then who connected proves it. A proof covers both nonces, both names and the side that made
it, so that none can be replayed, reflected, or used by another rank. The key is derived for one purpose, job and
generation (`trainer.comm.launch_secret`), so that none is of use elsewhere.

This keeps out who has no key. It does not encrypt, and it does not protect what follows from somebody who can change
packets on their way: that is what TLS is for.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator

from trainer.comm.framed_socket import Flow, FramedSocket

HELLO = struct.Struct("!4s32s64s")
"""Magic, nonce, and name of who connects."""
REPLY = struct.Struct("!4s32s32s")
"""Magic, nonce and proof of who listens."""
PROOF_BYTES = 32
NAME_BYTES = 64
_MAGIC = b"dtA1"
_LISTENER, _CALLER = b"listener", b"caller"


class AuthenticationError(ConnectionError):
    """The other end does not prove that it is who it should be. The message never holds what it said."""


class Caller:
    """The side that connects: called ``me``, and wants to be connected to ``other``."""

    def __init__(self, key: bytes, me: str, other: str) -> None:
        self._key, self._other = key, _name(other)
        self.hello = HELLO.pack(_MAGIC, secrets.token_bytes(32), _name(me))
        """The first message."""

    def answer(self, reply: bytes) -> bytes:
        """The last message, for this reply. `AuthenticationError` where it comes from somebody else."""
        if len(reply) != REPLY.size:
            raise AuthenticationError("it speaks something else")
        magic, nonce, proof = REPLY.unpack(reply)
        if magic != _MAGIC:
            raise AuthenticationError("it speaks something else; is training.tls the same on all nodes?")
        if not hmac.compare_digest(proof, _proof(self._key, _LISTENER, self.hello, nonce, self._other)):
            raise AuthenticationError(
                "it does not prove that it knows this launch's secret: it is of another launch, job or generation, or "
                "a stranger"
            )
        return _proof(self._key, _CALLER, self.hello, nonce, self._other)


class Listener:
    """The side that listens, called ``me``; one for each connection."""

    def __init__(self, key: bytes, me: str) -> None:
        self._key, self._me, self._nonce = key, _name(me), secrets.token_bytes(32)
        self._hello = b""

    def reply(self, hello: bytes) -> bytes:
        """The answer to a first message. `AuthenticationError` where it is none."""
        if len(hello) != HELLO.size or hello[: len(_MAGIC)] != _MAGIC or self._hello:
            raise AuthenticationError("it speaks something else; is training.tls the same on all nodes?")
        self._hello = bytes(hello)
        return REPLY.pack(_MAGIC, self._nonce, _proof(self._key, _LISTENER, self._hello, self._nonce, self._me))

    def admit(self, proof: bytes) -> str:
        """The proven name of who connected. `AuthenticationError` where it has not the key."""
        expected = _proof(self._key, _CALLER, self._hello, self._nonce, self._me)
        if not self._hello or not hmac.compare_digest(bytes(proof), expected):
            raise AuthenticationError("it does not prove that it knows this launch's secret")
        name = HELLO.unpack(self._hello)[2].rstrip(b"\0")
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise AuthenticationError("its name is no text") from None


def authenticate_to_listener(link: FramedSocket, key: bytes, me: str, other: str) -> Flow:
    """The caller's side, over a link whose TLS, if it has any, is there."""
    caller, reply = Caller(key, me, other), bytearray(REPLY.size)
    yield from link.send(caller.hello)
    yield from link.receive(reply)
    yield from link.send(caller.answer(bytes(reply)))


def authenticate_caller(link: FramedSocket, key: bytes, me: str) -> Generator[int, None, str]:
    """The listener's side: the caller's proven name."""
    listener, hello, proof = Listener(key, me), bytearray(HELLO.size), bytearray(PROOF_BYTES)
    yield from link.receive(hello)
    yield from link.send(listener.reply(bytes(hello)))
    yield from link.receive(proof)
    return listener.admit(bytes(proof))


def parse_rank(name: str, size: int) -> int:
    """The rank that a proven name is of. `AuthenticationError` for one outside a world of ``size``."""
    if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < size):
        raise AuthenticationError(f"it takes itself for rank {name[:20]!r} in a world of {size}")
    return int(name)


def _proof(key: bytes, side: bytes, hello: bytes, nonce: bytes, listener: bytes) -> bytes:
    """All parts but the first are of fixed size, so no two different handshakes have the same text."""
    return hmac.digest(key, side + b"\0" + hello + nonce + listener, hashlib.sha256)


def _name(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > NAME_BYTES or b"\0" in raw:
        raise ValueError(f"a name has at most {NAME_BYTES} bytes, and none of them is 0: {text!r}")
    return raw.ljust(NAME_BYTES, b"\0")
