"""Secrets by reference: a setting says where a secret is, and it is fetched where it is used.

    keyvault://<vault-name>/<secret>            the newest version, from Azure Key Vault, with this machine's identity
    keyvault://<vault-name>/<secret>/<version>  that version
    env:NAME                                    an environment variable

What was resolved is remembered, in this process only, so that `redact` can strike it out of whatever is written.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any, overload

VAULT, ENVIRONMENT = "keyvault://", "env:"
IDENTITY = "identity"
"""Instead of a token: that of this machine's own identity."""
STRUCK = "[secret]"
VAULT_SUFFIX_VARIABLE = "AZURE_KEY_VAULT_SUFFIX"
"""The end of a vault's host name in another cloud than Azure's public one; unset: ``vault.azure.net``."""
_REFERENCE = re.compile(
    r"keyvault://(?P<vault>[A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9])/(?P<name>[A-Za-z0-9-]{1,127})(/(?P<version>[0-9a-f]{32}))?"
)
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_SHORTEST = 6
"""A shorter secret is not struck out: it would tear words apart, and tells where it stood."""

_known: set[str] = set()
_lock = threading.Lock()


class SecretError(ValueError):
    """A secret cannot be had. The message names the reference and the remedy, never a value."""


def is_reference(text: str) -> bool:
    """Whether a setting names a secret rather than a value."""
    return text.startswith((VAULT, ENVIRONMENT))


def check_reference(text: str) -> None:
    """`SecretError` for something that begins as a reference and is none; asks nobody."""
    if is_reference(text) and not (_REFERENCE.fullmatch(text) or _VARIABLE.fullmatch(text)):
        raise SecretError(
            f"{text!r} is not a reference to a secret; write keyvault://<vault-name>/<secret> or env:<VARIABLE>"
        )


def check_token(text: str) -> None:
    """`SecretError` for a token itself, where a setting has to say where it is. The message does not repeat it."""
    if text != IDENTITY and not is_reference(text):
        raise SecretError("say where the token is (env:NAME, keyvault://VAULT/SECRET, or identity), not what it is")
    check_reference(text)


def resolve(text: str) -> str:
    """The secret behind a reference; any other text as it is. `SecretError` where it cannot be had."""
    if not is_reference(text):
        return text
    check_reference(text)
    match = _REFERENCE.fullmatch(text)
    value = _from_vault(text, **match.groupdict()) if match else os.environ.get(text.removeprefix(ENVIRONMENT), "")
    if not value:
        raise SecretError(f"{text} is empty or not set: set it where dtrain runs, or change the setting that names it")
    remember(value)
    return value


def remember(value: str) -> None:
    """Have `redact` strike this out from now on, also as it looks in an address (percent-encoded)."""
    with _lock:
        _known.update(form for form in (value, urllib.parse.quote(value, safe="")) if len(form) >= _SHORTEST)


@overload
def redact(value: str) -> str: ...


@overload
def redact(value: Any) -> Any: ...


def redact(value: Any) -> Any:
    """The same with what is secret struck out: secrets that this process has resolved, and credentials by their looks
    in texts (passwords in addresses, signatures of SAS addresses, account keys, bearer tokens), by their names in
    mappings. Documents of mappings and lists are gone through to their ends."""
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
    re.compile(r"(?i)([?&]code=)[^\s&\"'<>]+"),
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
)
_SECRET_NAME = re.compile(
    r"(?i)password|passwd|secret|account_?key|connection_?string|signature|(^|_)(token|sig)$|api_?key"
)


def _from_vault(reference: str, vault: str, name: str, version: str | None) -> str:
    try:
        from azure.keyvault.secrets import SecretClient
    except ImportError:
        raise SecretError(
            f"{reference} needs the package azure-keyvault-secrets: pip install 'dtrain[azure]', or use env:<VARIABLE>"
        ) from None
    from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ResourceNotFoundError

    from trainer.azure_token import credential

    suffix = os.environ.get(VAULT_SUFFIX_VARIABLE, "vault.azure.net")
    try:
        with SecretClient(f"https://{vault}.{suffix}", credential()) as client:
            return client.get_secret(name, version).value or ""
    except ResourceNotFoundError:
        raise SecretError(f"{reference}: vault {vault} has no such secret; add it, or change the setting") from None
    except ClientAuthenticationError as error:
        raise SecretError(f"{reference}: no identity to ask vault {vault} with: {_words(error)}") from None
    except HttpResponseError as error:
        remedy = (
            "; give this identity the role Key Vault Secrets User on it, and let its firewall pass this machine"
            if error.status_code in (401, 403)
            else ""
        )
        raise SecretError(
            f"{reference}: vault {vault} refused ({error.status_code}): {_words(error)}{remedy}"
        ) from None
    except (AzureError, ValueError) as error:  # ValueError: who answered claims to be another service
        raise SecretError(f"{reference}: vault {vault} cannot be reached: {_words(error)}") from None


def _words(error: Exception) -> str:
    return redact(str(getattr(error, "message", "") or error).splitlines()[0])[:300]
