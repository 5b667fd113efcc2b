"""Certificates of a launch: who trusts whom, how long, and where the private key has been."""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from certificates import meet

from trainer.comm import launch_certificate
from trainer.comm.launch_certificate import LaunchCertificate
from trainer.comm.launch_secret import LaunchSecret

SECRET, OTHER = LaunchSecret(b"s" * 32), LaunchSecret(b"t" * 32)


def test_members_of_a_launch_trust_each_other_over_tls_1_3() -> None:
    one, two = LaunchCertificate(SECRET, "job"), LaunchCertificate(SECRET, "job")
    assert meet(one.server, two.client) == ("TLSv1.3", "TLSv1.3")
    assert meet(two.server, one.client) == ("TLSv1.3", "TLSv1.3")


@pytest.mark.parametrize(
    "other", [LaunchCertificate(OTHER, "job"), LaunchCertificate(SECRET, "another job")], ids=["launch", "job"]
)
def test_another_launch_or_job_is_refused_by_both_sides(other: LaunchCertificate) -> None:
    mine = LaunchCertificate(SECRET, "job")
    for server, client in ((mine, other), (other, mine)):
        told = meet(server.server, client.client)
        assert all(isinstance(one, OSError) for one in told), told
        assert "certificate verify failed" in str(told)


def test_a_certificate_that_has_expired_or_begins_later_is_refused() -> None:
    key = launch_certificate.derive_authority_key(SECRET, "job")
    authority = launch_certificate._make_authority(key)
    mine, hour = LaunchCertificate(SECRET, "job"), datetime.timedelta(hours=1)
    for begins, ends, word in ((-2 * hour, -hour, "expired"), (hour, 2 * hour, "not yet valid")):
        leaf = launch_certificate.issue_certificate(key, authority, begins, ends)
        client = launch_certificate.make_context(ssl.PROTOCOL_TLS_CLIENT, authority, *leaf)
        server = launch_certificate.make_context(ssl.PROTOCOL_TLS_SERVER, authority, *leaf)
        assert word in str(meet(mine.server, client)[0])
        assert word in str(meet(server, mine.client)[1])


def test_one_that_signs_its_certificate_itself_is_refused() -> None:
    """With the names of the authority and of a member, which are no secret."""
    false = launch_certificate.derive_authority_key(OTHER, "job")
    authority = launch_certificate._make_authority(false)
    true = launch_certificate._make_authority(launch_certificate.derive_authority_key(SECRET, "job"))
    leaf = launch_certificate.issue_certificate(false, authority)
    mine = LaunchCertificate(SECRET, "job")
    client = launch_certificate.make_context(ssl.PROTOCOL_TLS_CLIENT, true, *leaf)  # it trusts whoever answers
    server = launch_certificate.make_context(ssl.PROTOCOL_TLS_SERVER, true, *leaf)
    assert isinstance(meet(mine.server, client)[0], ssl.SSLError)
    assert isinstance(meet(server, mine.client)[1], ssl.SSLError)


def test_a_side_without_a_certificate_or_with_an_older_tls_is_refused() -> None:
    mine = LaunchCertificate(SECRET, "job")
    bare = ssl.create_default_context()
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    assert "did not return a certificate" in str(meet(mine.server, bare)[0])
    bare.maximum_version = ssl.TLSVersion.TLSv1_2
    assert isinstance(meet(mine.server, bare)[0], ssl.SSLError)


def test_without_a_secret_there_is_no_authority() -> None:
    with pytest.raises(ValueError, match="without a secret"):
        LaunchCertificate(LaunchSecret(), "job")


def test_a_certificate_is_renewed_for_later_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    one = LaunchCertificate(SECRET, "job")
    server, client = one.server, one.client
    assert (one.server, one.client) == (server, client)
    monkeypatch.setattr(launch_certificate, "RENEW_SECONDS", -1.0)
    assert one.client is not client
    assert meet(one.server, client) == ("TLSv1.3", "TLSv1.3"), "new and old ones are of one authority"


def test_its_validity_is_days_around_now() -> None:
    key = launch_certificate.derive_authority_key(SECRET)
    leaf, _ = launch_certificate.issue_certificate(key, launch_certificate._make_authority(key))
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    assert now - 1.1 * day < leaf.not_valid_before_utc < now - 0.9 * day
    assert now + 1.9 * day < leaf.not_valid_after_utc < now + 2.1 * day


@pytest.mark.skipif(sys.platform != "linux", reason="files in memory alone are Linux's")
def test_the_key_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths that are opened, and the files in memory that are left."""
    opened: list[str] = []

    def in_memory() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # threads of other tests open and close files meanwhile
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [path for path in found if "dtrain-certificate" in path]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and is_watching and threading.get_ident() == here:
            opened.append(str(arguments[0]))

    here, is_watching = threading.get_ident(), True
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    sys.addaudithook(audit)
    try:
        LaunchCertificate(SECRET, "job")
    finally:
        is_watching = False  # a hook stays for as long as the process
    assert all(path.isdecimal() for path in opened), "descriptors only"
    assert opened, "the hook was there"
    assert in_memory() == []
    assert not list(tmp_path.iterdir())


def test_without_files_in_memory_the_file_is_encrypted_private_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bytes]] = []

    class Spy(ssl.SSLContext):
        def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
            seen.append((os.stat(certfile).st_mode & 0o777, Path(certfile).read_bytes()))
            super().load_cert_chain(certfile, keyfile, password)

    monkeypatch.setattr(launch_certificate.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    key = launch_certificate.derive_authority_key(SECRET)
    leaf = launch_certificate.issue_certificate(key, launch_certificate._make_authority(key))
    launch_certificate.load_key(Spy(ssl.PROTOCOL_TLS_SERVER), *leaf)
    [(mode, content)] = seen
    assert mode == 0o600
    assert b"ENCRYPTED PRIVATE KEY" in content
    assert b"BEGIN PRIVATE KEY" not in content
    assert not list(tmp_path.iterdir())
