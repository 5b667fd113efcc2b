"""TLS between nodes: who is let in, what a listener on the wire hears, and what a wrong configuration says."""

from __future__ import annotations

import datetime
import os
import pty
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import star_ranks as at
import torch
from certificates import Authority
from star_ranks import Outcome, Rank, Tap, listening

from trainer.comm.tls import client_context, server_context
from trainer.config import ConfigError, TLSConfig


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def alive() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end()


def gradient(rank: int) -> list[float]:
    """Recognisable on the wire: 64 numbers that are nowhere else."""
    return torch.randn(64, generator=torch.Generator().manual_seed(17 + rank)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_gradients_on_the_network(alive: list[Rank], authority: Authority, encrypted: bool) -> None:
    tls = authority.node() if encrypted else None
    with listening() as listener, Tap(listener.getsockname()) as tap:
        alive += [
            Rank(where, rank, 2, at.sum_one, gradient(rank), tls=tls)
            for rank, where in ((0, listener), (1, tap.address))
        ]
        total = (torch.tensor(gradient(0)) + torch.tensor(gradient(1))).tolist()
        assert [rank.outcome() for rank in alive] == [Outcome(total)] * 2
        heard = bytes(tap.heard)
    assert len(heard) > 2 * 4 * 64  # the tap was on the line
    secrets = {
        "gradient": torch.tensor(gradient(1)).numpy().tobytes(),
        "sum": torch.tensor(total).numpy().tobytes(),
    }
    assert at.TOKEN not in heard, "the key is proven, and never sent"
    for name, secret in secrets.items():
        parts = [secret[first : first + 8] for first in range(0, len(secret) - 7, 8)]
        found = [part in heard for part in parts]
        assert not any(found) if encrypted else all(found), name


def meet(alive: list[Rank], server: TLSConfig | None, worker: TLSConfig | None, right: TLSConfig | None) -> Outcome:
    """What becomes of a worker with the wrong certificate, while one with a right one is let in afterwards."""
    with listening() as listener:
        address = listener.getsockname()
        alive.append(Rank(listener, 0, 2, at.sum_one, [1.0], tls=server))
    alive.append(Rank(address, 1, 2, at.sum_one, [5.0], forming=10.0, tls=worker))
    wrong = alive[1].outcome()
    alive.append(Rank(address, 1, 2, at.sum_one, [2.0], tls=right))
    assert [alive[0].outcome(), alive[2].outcome()] == [Outcome([3.0])] * 2
    assert (wrong.error, wrong.blamed, wrong.operation) == ("ParameterServerError", 0, "forming"), wrong
    return wrong


@pytest.mark.slow
def test_a_worker_of_another_authority_is_refused(alive: list[Rank], authority: Authority, tmp_path: Path) -> None:
    """Seen from the server: this worker would trust it."""
    theirs, ours = Authority(tmp_path, "another").node(), authority.node()
    theirs.ca = ours.ca
    assert "unknown ca" in meet(alive, ours, theirs, ours).message


@pytest.mark.slow
def test_a_server_of_another_authority_is_refused(alive: list[Rank], authority: Authority, tmp_path: Path) -> None:
    """Seen from the worker: this server would let it in."""
    ours, theirs = authority.node(), Authority(tmp_path, "another")
    distrusting = TLSConfig(certificate=ours.certificate, key=ours.key, ca=theirs.ca)
    assert "certificate verify failed" in meet(alive, ours, distrusting, ours).message


@pytest.mark.slow
def test_an_expired_certificate_is_refused(alive: list[Rank], authority: Authority) -> None:
    ours = authority.node()
    assert "expired" in meet(alive, ours, authority.node("old", expires=-datetime.timedelta(hours=1)), ours).message


@pytest.mark.slow
def test_a_plain_worker_at_a_server_with_tls(alive: list[Rank], authority: Authority) -> None:
    ours = authority.node()
    assert "is training.tls the same on all nodes?" in meet(alive, ours, None, ours).message


@pytest.mark.slow
def test_a_worker_with_tls_at_a_plain_server(alive: list[Rank], authority: Authority) -> None:
    assert "SSL" in meet(alive, None, authority.node(), None).message


@pytest.mark.slow
def test_the_server_says_whom_it_refused(alive: list[Rank], authority: Authority, tmp_path: Path) -> None:
    theirs, ours = Authority(tmp_path, "another").node(), authority.node()
    with listening() as listener:
        address = listener.getsockname()
        alive.append(Rank(listener, 0, 2, at.sum_one, [1.0], forming=5.0, tls=ours))
    alive.append(Rank(address, 1, 2, at.sum_one, [5.0], tls=theirs))
    assert alive[1].outcome().error == "ParameterServerError"
    message = alive[0].outcome().message
    assert "127.0.0.1 was turned away: " in message
    assert "unknown ca" in message  # the worker's word for it: it looked at the server's certificate first


def test_a_client_without_a_certificate_gets_nothing(authority: Authority) -> None:
    ours = authority.node()
    context = ssl.create_default_context(cafile=ours.ca)
    context.check_hostname = False
    server, client = socket.socketpair()
    result = os.fork()
    if result == 0:  # the node's side, which blocks in its handshake
        try:
            with server_context(ours).wrap_socket(server, server_side=True) as there:
                there.sendall(b"secret")
            os._exit(0)
        except OSError:
            os._exit(7)
    server.close()
    with pytest.raises((ssl.SSLError, ConnectionError)), context.wrap_socket(client) as here:
        assert here.recv(100) == b"secret"
    assert os.waitstatus_to_exitcode(os.waitpid(result, 0)[1]) == 7


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
    for certificate, key in ((str(text), tls.key), (tls.certificate, str(text)), (tls.certificate, other(authority))):
        with pytest.raises(ConfigError, match=r"training\.tls\.certificate = '.*' and training\.tls\.key = '.*' must"):
            server_context(TLSConfig(certificate=certificate, key=key, ca=tls.ca))


def other(authority: Authority) -> str:
    """A key that does not belong to the certificate."""
    return authority.node("other").key


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
