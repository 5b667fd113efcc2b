"""Redaction of secrets in text and documents: those that this process has resolved, and what looks like one.

This is the second line of defence. The first is that no setting holds a secret (`trainer.secrets.addresses`).
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any, overload

STRUCK = "[secret]"
_SHORTEST = 6
"""A shorter secret is not struck out: it would tear words apart, and tells where it stood."""

_LONG_ENOUGH = 12
"""A value in the query of an address that was resolved is taken for a secret from this length on: shorter ones are
versions and dates."""

_known: set[str] = set()
_lock = threading.Lock()


def remember(value: str) -> None:
    """Register a secret for `redact`, in plain and percent-encoded form."""
    with _lock:
        _known.update(form for form in _forms(value) if len(form) >= _SHORTEST)


def _forms(value: str) -> set[str]:
    """Return the forms in which a secret may be written: as it is, percent-encoded, inside JSON. For an address also
    its password, its query, and the values in that, since clients take addresses apart."""
    parts = {value}
    with contextlib.suppress(ValueError):  # "[" that closes nowhere: no address
        address = urllib.parse.urlsplit(value)
        if address.scheme and address.netloc:
            given = urllib.parse.parse_qsl(address.query)
            parts |= {address.password or "", urllib.parse.unquote(address.password or "")}
            parts |= {item for _, item in given if len(item) >= _LONG_ENOUGH}
            if given:
                parts |= {address.query}
            if address.password:
                parts |= {address.netloc.rpartition("@")[0]}
    written = {json.dumps(part)[1:-1] for part in parts} | {urllib.parse.quote(part, safe="") for part in parts}
    return parts | written | {urllib.parse.quote(part) for part in parts}


@overload
def redact(value: str) -> str: ...


@overload
def redact(value: Any) -> Any: ...


def redact(value: Any) -> Any:
    """Return a copy with secrets struck out: those that this process has resolved, and credentials by their looks
    in texts (passwords in addresses, signatures of SAS addresses, account keys, bearer tokens), by their names in
    mappings. Mappings and lists are searched recursively."""
    if isinstance(value, str):
        return _redact_text(value)
    if isinstance(value, Mapping):
        return {
            redact(name): STRUCK if isinstance(name, str) and _SECRET_NAME.search(name) and item else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item) for item in value]
    return value


def _redact_text(text: str) -> str:
    with _lock:
        values = sorted(_known, key=len, reverse=True)  # a secret that holds another goes first
    for value in values:
        text = text.replace(value, STRUCK)
    for pattern in _BY_LOOKS:
        text = pattern.sub(rf"\g<1>{STRUCK}", text)
    return text


_BY_LOOKS = (
    # A signature, key, password or token that is given by name: in an address, a connection string, a header or JSON,
    # also in JSON inside a text. No pattern begins with a repetition, or a long word would take its square in time.
    re.compile(
        r"(?i)((?:\bsig|account_?key|shared_?access_?(?:key|signature)|password|passwd|secret|api[-_]?key|token)"
        r"[\\\"']{0,4}\s*[=:]\s*[\\\"']{0,4})[^\s&;,\\\"'<>]+"
    ),
    # …and as an option of a command with the value behind it; a reference such as env:NAME is no secret.
    re.compile(
        r"(?i)((?<![\w-])--?[\w-]{0,40}(?:token|passw(?:or)?d|secret|api[-_]?key|[-_]key)[\\\"']{0,2}\s+[\\\"']{0,2})"
        r"(?!-|env:|keyvault:)[^\s\\\"'<>]+"
    ),
    re.compile(r"(?i)([?&]code=)[^\s&\"'<>]+"),
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(://[^/\s:@]{0,100}:)(?!\d{1,5}(?:[/?#]|$))[^\s\"'<>]{1,200}(?=@)"),
    re.compile(
        r"(?i)(\bhooks\.slack\.com/[a-z]+/|\bdiscord(?:app)?\.com/api/webhooks/|\bapi\.telegram\.org/bot|"
        r"\bwebhook\.office\.com/webhookb?2?/|\boutlook\.office(?:365)?\.com/webhook/)[^\s\"'<>]+"
    ),
)
_SECRET_NAME = re.compile(
    r"(?i)password|passwd|secret|account_?key|connection_?string|signature|(^|_)(token|sig)$|api_?key"
)
