"""Secrets: from a Key Vault on loopback, by the real client with its challenge and TLS; and to be found nowhere."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from werkzeug import Request, Response

from tests.azure.planted import leaks, planted
from tests.loopback import LoopbackServer
from trainer.secrets import azure_token, redaction
from trainer.secrets import resolve as secrets

DOMAIN, HEADER = "vault.localhost", "the-process-s-own"


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test resolves is no secret in the next."""
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize(
    "text",
    [
        "keyvault://",
        "keyvault://vault",
        "keyvault://v/x",
        "keyvault://va ult/x",
        "env:",
        "env:A-B",
        "keyvault://vault/x/1",
    ],
)
def test_a_reference_that_is_none_is_refused_before_anybody_is_asked(text: str) -> None:
    with pytest.raises(secrets.SecretError, match="not a reference"):
        secrets.check_reference(text)
    with pytest.raises(secrets.SecretError, match="not a reference"):
        secrets.resolve(text)


def test_plain_text_is_itself_and_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTRAIN_X", raising=False)
    assert secrets.resolve("plain") == "plain"
    with pytest.raises(secrets.SecretError, match="env:DTRAIN_X is empty or not set"):
        secrets.resolve("env:DTRAIN_X")


@dataclass
class Vault:
    """What a Key Vault on loopback holds, and what it was asked."""

    secrets: dict[str, str]
    port: int = 0
    claims_to_be: str = ""
    """The resource that its challenge names; empty: its own."""
    forbids: str = ""
    """The words of its refusal; empty: it refuses nobody."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Authorization) of every request."""
    token_resources: list[str] = field(default_factory=list)


def answer(vault: Vault, path: str, authorization: str | None) -> tuple[int, dict[str, str], Any]:
    """(status, headers, document), as Key Vault answers: 401 with a challenge first, then 200, 403 or 404."""
    vault.asked.append((path, authorization))
    if authorization is None:
        resource = vault.claims_to_be or f"https://{DOMAIN}:{vault.port}"
        challenge = f'Bearer authorization="https://login.microsoftonline.com/tenant", resource="{resource}"'
        return 401, {"WWW-Authenticate": challenge}, {"error": {"code": "Unauthorized", "message": "AKV10000"}}
    assert authorization == "Bearer token-of-the-vault"
    if vault.forbids:
        return 403, {}, {"error": {"code": "Forbidden", "message": vault.forbids}}
    name = urlsplit(path).path.strip("/").split("/")[1]
    if name not in vault.secrets:
        return 404, {}, {"error": {"code": "SecretNotFound", "message": f"A secret with {name} was not found"}}
    now = int(time.time())
    identity = f"https://trainer.{DOMAIN}:{vault.port}/secrets/{name}/{'0' * 32}"
    attributes = {"enabled": True, "created": now, "updated": now, "recoveryLevel": "Recoverable+Purgeable"}
    return 200, {}, {"value": vault.secrets[name], "id": identity, "attributes": attributes}


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    """A vault over TLS, and the identity endpoint of App Service, where this process gets its tokens."""
    pytest.importorskip("azure.keyvault.secrets", reason="azure-keyvault-secrets is in dtrain's extra `azure`")
    state = Vault({"smtp": planted("vault-smtp")})

    def give_token(request: Request) -> Response:
        assert request.headers["X-IDENTITY-HEADER"] == HEADER
        state.token_resources.append(request.args["resource"])
        life = str(int(time.time()) + 3600)
        return as_json({"access_token": "token-of-the-vault", "expires_on": life, "token_type": "Bearer"})

    def give_secret(request: Request) -> Response:
        status, headers, document = answer(state, request.path, request.headers.get("Authorization"))
        return as_json(document, status, headers)

    authority, certificate = trustme.CA(), tmp_path / "vault.pem"
    authority.cert_pem.write_to_path(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(f"*.{DOMAIN}").configure_cert(context)
    tls, plain = LoopbackServer(give_secret, context), LoopbackServer(give_token)
    tls.start()
    plain.start()
    state.port = tls.port
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: real("127.0.0.1" if str(host).endswith(".localhost") else host, *rest, **more),
    )
    for name in ("MSI_ENDPOINT", "MSI_SECRET", "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IDENTITY_ENDPOINT", plain.url_for("/identity"))
    monkeypatch.setenv("IDENTITY_HEADER", HEADER)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,.localhost")
    monkeypatch.setenv(secrets.VAULT_SUFFIX_VARIABLE, f"{DOMAIN}:{state.port}")
    azure_token.credential.cache_clear()
    yield state
    azure_token.credential.cache_clear()
    tls.stop()
    plain.stop()


def as_json(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(document), status, headers, content_type="application/json")


def test_a_secret_comes_from_the_vault_by_identity(vault: Vault, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    value = secrets.resolve("keyvault://trainer/smtp")
    assert value == planted("vault-smtp")
    assert [authorization for _, authorization in vault.asked] == [None, "Bearer token-of-the-vault"]
    assert vault.token_resources == [f"https://{DOMAIN}:{vault.port}"]
    assert value not in caplog.text
    assert "token-of-the-vault" not in caplog.text
    assert redaction.redact(f"mailto://me:{value}@host") == f"mailto://me:{redaction.STRUCK}@host"


@pytest.mark.parametrize(
    ("reference", "change", "says"),
    [
        ("keyvault://trainer/other", {}, "vault trainer has no such secret"),
        ("keyvault://trainer/smtp", {"forbids": "Not authorized"}, r"refused \(403\).*Key Vault Secrets User"),
        (
            "keyvault://trainer/smtp",
            {"forbids": "Public network access is disabled"},
            "is a network restriction, not a missing role",
        ),
        ("keyvault://trainer/smtp", {"claims_to_be": "https://vault.evil.example"}, "does not match"),
        ("keyvault://trainer/empty", {"secrets": {"empty": ""}}, "is empty"),
    ],
)
def test_a_vault_that_gives_nothing_is_explained(
    vault: Vault, reference: str, change: dict[str, Any], says: str
) -> None:
    for name, value in change.items():
        setattr(vault, name, value)
    with pytest.raises(secrets.SecretError, match=says):
        secrets.resolve(reference)


def test_a_token_does_not_go_to_who_claims_to_be_another_service(vault: Vault) -> None:
    vault.claims_to_be = "https://vault.evil.example"
    with pytest.raises(secrets.SecretError):
        secrets.resolve("keyvault://trainer/smtp")
    assert all(authorization is None for _, authorization in vault.asked)
    assert vault.token_resources == []


def test_leaks_are_found_in_every_guise(tmp_path: Path) -> None:
    """The net itself: a leak that it could not see would pass every test that uses it."""
    import base64
    import gzip
    import sqlite3
    import zipfile
    import zlib
    from urllib.parse import quote

    value = planted("net")
    (tmp_path / "plain.txt").write_text(f"x={value}")
    (tmp_path / "quoted.txt").write_text(quote(value, safe=""))
    for shift in range(3):
        (tmp_path / f"base64-{shift}").write_bytes(base64.b64encode(b"user:"[: shift + 2] + value.encode() + b"tail"))
    with zipfile.ZipFile(tmp_path / "zipped.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("deep", "a" * 1000 + value)
    database = sqlite3.connect(tmp_path / "data.db")
    database.execute("create table t (x)")
    database.execute("insert into t values (?)", [value])
    database.commit()
    database.close()
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"a" * 1000 + value.encode()))
    database = sqlite3.connect(tmp_path / "packed.db")
    database.execute("create table t (x)")
    database.execute("insert into t values (?)", [zlib.compress(b"a" * 1000 + value.encode())])
    database.commit()
    database.close()
    (tmp_path / "clean.txt").write_text("nothing")
    found = {Path(line.split(": ")[0]).name for line in leaks([tmp_path], [value])}
    assert found == {path.name for path in tmp_path.iterdir()} - {"clean.txt"}
