"""Mutual authentication of a connection: a challenge-response over a key that both ends have.

There are three messages of fixed size. The caller sends a name and a nonce; the listener answers with its own nonce
and proves that it has the key; then the caller proves it. A proof covers both nonces, both names and the side that made
it, so that none can be replayed, reflected, or used by another rank. The key is derived for one purpose, job and
generation (`trainer.comm.launch_secret`), so that none is of use elsewhere.

The handshake keeps out peers without the key. It does not encrypt, and it does not protect the later data from an
attacker who can change packets on the network: TLS does.
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
    """The other end does not prove its identity. The message never contains what it sent."""


class Caller:
    """The side that connects, named ``me``, and expects to reach ``other``."""

    def __init__(self, key: bytes, me: str, other: str) -> None:
        self._key, self._other = key, _name(other)
        self.hello = HELLO.pack(_MAGIC, secrets.token_bytes(32), _name(me))
        """The first message."""

    def answer(self, reply: bytes) -> bytes:
        """Return the last message, for this reply. Raise `AuthenticationError` if the reply is not from ``other``."""
        if len(reply) != REPLY.size:
            raise AuthenticationError("it uses another protocol")
        magic, nonce, proof = REPLY.unpack(reply)
        if magic != _MAGIC:
            raise AuthenticationError("it uses another protocol; is training.tls the same on all nodes?")
        if not hmac.compare_digest(proof, _proof(self._key, _LISTENER, self.hello, nonce, self._other)):
            raise AuthenticationError(
                "it does not prove that it knows this launch's secret: it belongs to another launch, job or "
                "generation, or is a foreign process"
            )
        return _proof(self._key, _CALLER, self.hello, nonce, self._other)


class Listener:
    """The side that listens, named ``me``; each connection has one."""

    def __init__(self, key: bytes, me: str) -> None:
        self._key, self._me, self._nonce = key, _name(me), secrets.token_bytes(32)
        self._hello = b""

    def reply(self, hello: bytes) -> bytes:
        """Return the answer to a first message. Raise `AuthenticationError` if it is not a valid one."""
        if len(hello) != HELLO.size or hello[: len(_MAGIC)] != _MAGIC or self._hello:
            raise AuthenticationError("it uses another protocol; is training.tls the same on all nodes?")
        self._hello = bytes(hello)
        return REPLY.pack(_MAGIC, self._nonce, _proof(self._key, _LISTENER, self._hello, self._nonce, self._me))

    def admit(self, proof: bytes) -> str:
        """Return the caller's proven name. Raise `AuthenticationError` if the caller does not have the key."""
        expected = _proof(self._key, _CALLER, self._hello, self._nonce, self._me)
        if not self._hello or not hmac.compare_digest(bytes(proof), expected):
            raise AuthenticationError("it does not prove that it knows this launch's secret")
        name = HELLO.unpack(self._hello)[2].rstrip(b"\0")
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise AuthenticationError("its name is not text") from None


def authenticate_to_listener(link: FramedSocket, key: bytes, me: str, other: str) -> Flow:
    """Carry out the caller's side over a link, after its TLS handshake if it uses TLS."""
    caller, reply = Caller(key, me, other), bytearray(REPLY.size)
    yield from link.send(caller.hello)
    yield from link.receive(reply)
    yield from link.send(caller.answer(bytes(reply)))


def authenticate_caller(link: FramedSocket, key: bytes, me: str) -> Generator[int, None, str]:
    """Carry out the listener's side and return the caller's proven name."""
    listener, hello, proof = Listener(key, me), bytearray(HELLO.size), bytearray(PROOF_BYTES)
    yield from link.receive(hello)
    yield from link.send(listener.reply(bytes(hello)))
    yield from link.receive(proof)
    return listener.admit(bytes(proof))


def parse_rank(name: str, size: int) -> int:
    """Return the rank of a proven name. Raise `AuthenticationError` for a rank outside a world of ``size``."""
    if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < size):
        raise AuthenticationError(f"it claims to be rank {name[:20]!r} in a world of {size}")
    return int(name)


def _proof(key: bytes, side: bytes, hello: bytes, nonce: bytes, listener: bytes) -> bytes:
    """All parts but the first are of fixed size, so no two different handshakes have the same text."""
    return hmac.digest(key, side + b"\0" + hello + nonce + listener, hashlib.sha256)


def _name(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > NAME_BYTES or b"\0" in raw:
        raise ValueError(f"a name has at most {NAME_BYTES} bytes, and none of them is 0: {text!r}")
    return raw.ljust(NAME_BYTES, b"\0")
