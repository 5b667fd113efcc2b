"""TLS between nodes: who is let in, what a listener on the wire hears, and what a wrong configuration says."""

from __future__ import annotations

import datetime
import os
import pty
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import star_ranks as at
import torch
from certificates import Authority, meet
from star_ranks import Outcome, Rank, Tap, listening, summing

from trainer.comm.tls import client_context, server_context
from trainer.config import ConfigError, TLSConfig


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def gradient(rank: int) -> list[float]:
    """Recognisable on the wire: 64 numbers that are nowhere else."""
    return torch.randn(64, generator=torch.Generator().manual_seed(17 + rank)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_gradients_on_the_network(authority: Authority, encrypted: bool) -> None:
    tls, listener = authority.node() if encrypted else None, listening()
    with Tap(listener.getsockname()) as tap:
        ranks = [
            Rank(where, rank, 2, summing(*gradient(rank)), tls=tls) for rank, where in ((0, listener), (1, tap.address))
        ]
        total = (torch.tensor(gradient(0)) + torch.tensor(gradient(1))).tolist()
        assert [rank.outcome() for rank in ranks] == [Outcome(total)] * 2
        heard = bytes(tap.heard)
    assert len(heard) > 2 * 4 * 64  # the tap was on the line
    assert at.TOKEN not in heard, "the key is proven, and never sent"
    for numbers in (gradient(1), total):
        secret = torch.tensor(numbers).numpy().tobytes()
        found = [secret[first : first + 8] in heard for first in range(0, len(secret) - 7, 8)]
        assert not any(found) if encrypted else all(found)


def of_another_authority(ours: Authority, another: Authority) -> TLSConfig:
    """Seen from the server: this worker would trust it."""
    return replace(another.node(), ca=ours.ca)


def trusting_another_authority(ours: Authority, another: Authority) -> TLSConfig:
    """Seen from the worker: this server would let it in."""
    return replace(ours.node("worker"), ca=another.ca)


def expired(ours: Authority, another: Authority) -> TLSConfig:
    return ours.node("old", expires=-datetime.timedelta(hours=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_server_plain", "wrong", "word"),
    [
        (False, of_another_authority, "unknown ca"),
        (False, trusting_another_authority, "certificate verify failed"),
        (False, expired, "expired"),
        (False, lambda ours, another: None, "are training.encryption and training.tls the same on all nodes"),
        (True, lambda ours, another: ours.node("worker"), "SSL"),
    ],
    ids=["of another authority", "trusting another authority", "expired", "plain", "TLS at a plain server"],
)
def test_a_worker_that_does_not_fit_is_refused_and_a_right_one_let_in_afterwards(
    authority: Authority, tmp_path: Path, is_server_plain: bool, wrong: Callable[..., TLSConfig | None], word: str
) -> None:
    right, listener = None if is_server_plain else authority.node(), listening()
    address = listener.getsockname()
    server = Rank(listener, 0, 2, summing(1.0), tls=right)
    theirs = wrong(authority, Authority(tmp_path, "another"))
    mixes = is_server_plain or theirs is None  # two that do not speak the same wait for each other
    refused = Rank(address, 1, 2, summing(5.0), forming=3.0 if mixes else 10.0, tls=theirs).outcome()
    assert (refused.error, refused.blamed) == ("PeerError", 0), refused
    assert word in refused.message
    worker = Rank(address, 1, 2, summing(2.0), tls=right)
    assert [server.outcome(), worker.outcome()] == [Outcome([3.0])] * 2


@pytest.mark.slow
def test_the_server_says_whom_it_refused(authority: Authority, tmp_path: Path) -> None:
    theirs, listener = Authority(tmp_path, "another").node(), listening()
    address = listener.getsockname()
    server = Rank(listener, 0, 2, summing(1.0), forming=3.0, tls=authority.node())
    assert Rank(address, 1, 2, summing(5.0), tls=theirs).outcome().error == "PeerError"
    message = server.outcome().message
    assert "127.0.0.1 was turned away: " in message
    assert "unknown ca" in message  # the worker's word for it: it looked at the server's certificate first


def test_a_client_without_a_certificate_gets_nothing(authority: Authority) -> None:
    ours = authority.node()
    context = ssl.create_default_context(cafile=ours.ca)
    context.check_hostname = False
    assert all(isinstance(told, OSError) for told in meet(server_context(ours), context))


def test_what_is_negotiated(authority: Authority) -> None:
    server, client = server_context(authority.node()), client_context(authority.node())
    for context in (server, client):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert len(context.get_ca_certs()) == 1  # the job's own, and none of the system's


@pytest.mark.parametrize("context", [server_context, client_context])
@pytest.mark.parametrize("which", ["ca", "certificate", "key"])
def test_a_file_that_cannot_be_read_is_named(authority: Authority, which: str, context: object) -> None:
    tls = authority.node()
    Path(getattr(tls, which)).unlink()
    with pytest.raises(ConfigError, match=rf"training\.tls\.{which} = '.*' cannot be read: No such file"):
        context(tls)  # type: ignore[operator]


def test_files_that_hold_something_else_are_named(authority: Authority, tmp_path: Path) -> None:
    tls, text = authority.node(), tmp_path / "text"
    text.write_text("no PEM")
    with pytest.raises(ConfigError, match=r"training\.tls\.ca = '.*text' does not hold a PEM certificate"):
        server_context(TLSConfig(certificate=tls.certificate, key=tls.key, ca=str(text)))
    other, no_pem = authority.node("other").key, str(text)
    for certificate, key in ((no_pem, tls.key), (tls.certificate, no_pem), (tls.certificate, other)):
        with pytest.raises(ConfigError, match=r"training\.tls\.certificate = '.*' and training\.tls\.key = '.*' must"):
            server_context(TLSConfig(certificate=certificate, key=key, ca=tls.ca))


def test_a_passphrase_is_not_asked_for_at_the_terminal(authority: Authority) -> None:
    """A node has nobody who could type it: it would wait for ever."""
    tls = authority.node("locked", passphrase=b"open sesame")
    program = (
        "import sys; from trainer.config import TLSConfig; from trainer.comm.tls import server_context\n"
        "try: server_context(TLSConfig(certificate=sys.argv[1], key=sys.argv[2], ca=sys.argv[3]))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", program, tls.certificate, tls.key, tls.ca])
    said = b""
    while b"pass phrase" not in said:
        try:
            said += os.read(terminal, 1000)
        except OSError:  # it has ended
            break
    os.close(terminal)
    os.waitpid(process, 0)
    assert b"ConfigError" in said
    assert b"without a passphrase" in said
