"""The grammar of references, by which a setting names the place of a secret instead of its value. Pure; no fetching.

    keyvault://<vault-name>/<secret>            the newest version, from Azure Key Vault, with this machine's identity
    keyvault://<vault-name>/<secret>/<version>  that version
    env:NAME                                    an environment variable

Fetching is in `trainer.secrets.resolve`. The scoring server reads configuration, and must need no client of a vault for
it.
"""

from __future__ import annotations

import re

VAULT, ENVIRONMENT = "keyvault://", "env:"
IDENTITY = "identity"
"""Instead of a token: that of this machine's own identity."""
REFERENCE = re.compile(
    r"keyvault://(?P<vault>[A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9])/(?P<name>[A-Za-z0-9-]{1,127})(/(?P<version>[0-9a-f]{32}))?"
)
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


class SecretError(ValueError):
    """An error for a secret that cannot be resolved. The message names the reference and the remedy, never a value."""


def is_reference(text: str) -> bool:
    """Return whether a setting names a secret rather than a value."""
    return text.startswith((VAULT, ENVIRONMENT))


def check_reference(text: str) -> None:
    """Raise `SecretError` if a text begins as a reference and is none. No vault is asked."""
    if is_reference(text) and not (REFERENCE.fullmatch(text) or _VARIABLE.fullmatch(text)):
        raise SecretError(
            f"{text!r} is not a reference to a secret; write keyvault://<vault-name>/<secret> or env:<VARIABLE>"
        )


def check_token(text: str) -> None:
    """Raise `SecretError` if a setting holds a token instead of a reference to it. The message does not repeat it."""
    if text != IDENTITY and not is_reference(text):
        raise SecretError("say where the token is (env:NAME, keyvault://VAULT/SECRET, or identity), not what it is")
    check_reference(text)
