"""Secrets by reference: a setting names the place of a secret, and it is fetched here, when it is used. The grammar of
references is in `trainer.secrets.references`; `trainer.secrets.redaction` removes fetched secrets from all output."""

from __future__ import annotations

import os

from trainer.secrets.redaction import redact, remember
from trainer.secrets.references import ENVIRONMENT, REFERENCE, SecretError, check_reference, is_reference

VAULT_SUFFIX_VARIABLE = "AZURE_KEY_VAULT_SUFFIX"
"""The end of a vault's host name in another cloud than Azure's public one; unset: ``vault.azure.net``."""


def resolve(text: str) -> str:
    """Return the secret behind a reference, or any other text unchanged. Raise `SecretError` if it cannot be
    resolved."""
    if not is_reference(text):
        return text
    check_reference(text)
    match = REFERENCE.fullmatch(text)
    value = _from_vault(text, **match.groupdict()) if match else os.environ.get(text.removeprefix(ENVIRONMENT), "")
    if not value:
        raise SecretError(f"{text} is empty or not set: set it where dtrain runs, or change the setting that names it")
    remember(value)
    return value


def _from_vault(reference: str, vault: str, name: str, version: str | None) -> str:
    try:
        from azure.keyvault.secrets import SecretClient
    except ImportError:
        raise SecretError(
            f"{reference} needs the package azure-keyvault-secrets: pip install 'dtrain[azure]', or use env:<VARIABLE>"
        ) from None
    from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ResourceNotFoundError

    from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal
    from trainer.secrets.azure_token import credential

    suffix = os.environ.get(VAULT_SUFFIX_VARIABLE, "vault.azure.net")
    try:
        with SecretClient(f"https://{vault}.{suffix}", credential()) as client:
            return client.get_secret(name, version).value or ""
    except ResourceNotFoundError:
        raise SecretError(f"{reference}: vault {vault} has no such secret; add it, or change the setting") from None
    except ClientAuthenticationError as error:
        raise SecretError(f"{reference}: no identity to ask vault {vault} with: {_words(error)}") from None
    except HttpResponseError as error:
        remedy = "; give this identity the role Key Vault Secrets User on it" if error.status_code in (401, 403) else ""
        if is_network_refusal("", str(error.message)):
            remedy = f"; {NETWORK_REMEDY}"
        raise SecretError(
            f"{reference}: vault {vault} refused ({error.status_code}): {_words(error)}{remedy}"
        ) from None
    except (AzureError, ValueError) as error:  # ValueError: who answered claims to be another service
        raise SecretError(f"{reference}: vault {vault} cannot be reached: {_words(error)}") from None


def _words(error: Exception) -> str:
    return redact(str(getattr(error, "message", "") or error).splitlines()[0])[:300]
