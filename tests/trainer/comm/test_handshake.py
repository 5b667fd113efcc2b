"""The proof that begins each connection: what is recorded, reflected, cut or changed is worth nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.comm.channel import PeerError
from trainer.comm.handshake import HELLO, NAME_BYTES, PROOF_BYTES, REPLY, AuthenticationError, Caller, Listener
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.listener import check_rank

KEY = LaunchSecret(bytes(range(32))).key("peer_to_peer", "job", 3)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=NAME_BYTES // 4)


def recorded(
    key: bytes = KEY, caller: str = "2", listener: str = "0", other_key: bytes | None = None
) -> tuple[bytes, bytes, bytes]:
    """All three messages of a handshake that succeeded."""
    one, other = Caller(key, caller, listener), Listener(key if other_key is None else other_key, listener)
    reply = other.reply(one.hello)
    proof = one.answer(reply)
    assert other.admit(proof) == caller
    return one.hello, reply, proof


@given(caller=names, listener=names, key=st.binary(max_size=64))
def test_both_ends_with_the_key_know_each_other(caller: str, listener: str, key: bytes) -> None:
    recorded(key, caller, listener)


def test_what_was_recorded_is_of_no_use() -> None:
    hello, reply, proof = recorded()
    other = Listener(KEY, "0")
    other.reply(hello)
    with pytest.raises(AuthenticationError, match="does not prove"):
        other.admit(proof)
    with pytest.raises(AuthenticationError, match="does not prove"):
        Caller(KEY, "2", "0").answer(reply)


def test_a_challenge_that_is_reflected_is_no_answer() -> None:
    """The stranger lets the rank that it attacks answer for it, as listener and as caller."""
    victim = Caller(KEY, "2", "0")
    with pytest.raises(AuthenticationError):
        victim.answer(victim.hello[: REPLY.size])
    for name in ("0", "2"):
        with pytest.raises(AuthenticationError):
            Caller(KEY, "2", "0").answer(Listener(KEY, name).reply(Caller(KEY, "2", name).hello))
    listener = Listener(KEY, "0")
    reply = listener.reply(Caller(b"no key", "2", "0").hello)
    with pytest.raises(AuthenticationError):
        listener.admit(REPLY.unpack(reply)[2])  # its own proof, sent back


def test_a_proof_for_one_rank_is_none_for_another() -> None:
    """Whoever is at the address of rank 0 with rank 1's answers is not rank 0; a hello cannot be renamed."""
    caller, listener = Caller(KEY, "2", "0"), Listener(KEY, "0")
    with pytest.raises(AuthenticationError):
        caller.answer(Listener(KEY, "1").reply(caller.hello))
    magic, nonce, _ = HELLO.unpack(caller.hello)
    reply = listener.reply(HELLO.pack(magic, nonce, b"1".ljust(NAME_BYTES, b"\0")))
    with pytest.raises(AuthenticationError):
        listener.admit(caller.answer(reply))


@pytest.mark.parametrize(
    "other", [("peer_to_peer", "job", 4), ("peer_to_peer", "other", 3), ("store", "job", 3), ("peer_to_peer", "job")]
)
def test_a_key_for_something_else_opens_nothing(other: tuple[str, ...]) -> None:
    same = ("peer_to_peer", "job", 3)
    for secret, purpose in ((bytes(range(32)), other), (bytes(32), same), (b"", same)):
        with pytest.raises(AuthenticationError):
            recorded(other_key=LaunchSecret(secret).key(*purpose))


def test_parts_of_a_key_cannot_be_shifted() -> None:
    secret = LaunchSecret(b"s")
    keys = {secret.key("a", "b1", 1), secret.key("a", "b", 11), secret.key("ab", "1", 1), secret.key("a", "b11")}
    assert len(keys) == 4


@given(st.data())
def test_any_change_on_the_way_is_noticed(data: st.DataObject) -> None:
    """One bit, a cut, an addition, or anything at all, in any of the three messages."""
    which = data.draw(st.integers(0, 2))

    def on_the_way(number: int, message: bytes) -> bytes:
        if number != which:
            return message
        place = data.draw(st.integers(0, 8 * len(message) - 1))
        changed = bytearray(message)
        changed[place // 8] ^= 1 << place % 8
        other = st.one_of(
            st.just(bytes(changed)),
            st.integers(0, len(message) - 1).map(lambda size: message[:size]),
            st.binary(min_size=1, max_size=200).map(lambda more: message + more),
            st.binary(max_size=200).filter(lambda anything: anything != message),
        )
        return data.draw(other)

    caller, listener = Caller(KEY, "2", "0"), Listener(KEY, "0")

    def shake() -> None:
        proof = caller.answer(on_the_way(1, listener.reply(on_the_way(0, caller.hello))))
        listener.admit(on_the_way(2, proof))

    with pytest.raises(AuthenticationError):
        shake()


def test_nothing_is_admitted_before_it_said_hello_or_twice() -> None:
    with pytest.raises(AuthenticationError):
        Listener(KEY, "0").admit(bytes(PROOF_BYTES))
    listener, hello = Listener(KEY, "0"), Caller(KEY, "2", "0").hello
    listener.reply(hello)
    with pytest.raises(AuthenticationError):
        listener.reply(hello)


@pytest.mark.parametrize("name", ["", "-1", "3", "1.0", " 1", "²", "1" * 30, "0x1"])
def test_a_name_that_is_no_rank_of_this_world_is_refused(name: str) -> None:
    with pytest.raises(PeerError, match="claims to be rank"):
        check_rank(name, 3)
    assert check_rank("2", 3) == 2


@pytest.mark.parametrize("name", ["x" * (NAME_BYTES + 1), "a\0"])
def test_a_name_that_does_not_fit_is_a_mistake_of_ours(name: str) -> None:
    with pytest.raises(ValueError, match="at most 64 bytes"):
        Caller(KEY, name, "0")
