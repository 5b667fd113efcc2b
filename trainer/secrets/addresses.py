"""Detection of secrets in addresses. Stored settings are public, so an address with a secret is refused on entry.

`secret_in` is pure and asks no service. It finds what is known to authorise: a password before the host, a signature, a
key or token in the query, a connection string, a web hook of a service whose whole path is its secret. A word that only
its owner knows to be secret cannot be found; `trainer.secrets.redaction.redact` is the second line, for what was
resolved.
"""

from __future__ import annotations

import re
import urllib.parse

from trainer.secrets.references import SecretError, check_reference, is_reference

_USER_INFO = re.compile(r"://[^/\s:@?#]{0,200}:(?!\d{1,5}(?:[/?#]|$))[^\s@]{1,500}@")
"""A user and a password, and not a host with a port and an ``@`` further on."""
_LONG_USER = re.compile(r"https?://[^/\s:@?#]{20,500}@", re.IGNORECASE)
"""A token in the place of the user, as code forges take it."""
_PARAMETER = re.compile(r"[?&#;]([^=&#;\s]{1,100})=([^&#;\s]*)")
_SECRET_PARAMETER = re.compile(
    r"^((auth|authorization|function)[-_]?)?code$|(^|[-_.+:])(sig|signature|sas|auth|authorization|bearer|passwd|password|pwd|pass|secret|credential|"
    r"(api|access|account|shared|subscription|function|private)?[-_]?(key|token))$"
)
_HARMLESS_PARAMETER = re.compile(r"(^|[-_.+:])(date|group|next|order|page|partition|primary|sort)[-_]?(key|token)$")
"""The names that price services use for columns and pages."""
_CONNECTION = re.compile(
    r"(account_?key|shared_?access_?(?:key|signature)|(?:^|[;?&\s])(?:password|pwd)|client_?secret)\s*=\s*[^\s;&]",
    re.IGNORECASE,
)
_HOOKS = re.compile(
    r"hooks\.slack\.com/(services|workflows|triggers)/.|discord(app)?\.com/api/webhooks/.|"
    r"webhook\.office\.com/webhook|outlook\.office(365)?\.com/webhook|api\.telegram\.org/bot\d|"
    r"hooks\.zapier\.com/hooks/.|maker\.ifttt\.com/trigger/.+/key/|chat\.googleapis\.com/v1/spaces/.+key=",
    re.IGNORECASE,
)


def secret_in(text: str) -> str | None:
    """Return the kind of secret that an address carries, in words that do not repeat it, or None. A reference
    (``env:NAME``, ``keyvault://…``) carries none."""
    if is_reference(text):
        return None
    for form in _decoded(text):
        if _CONNECTION.search(form):
            return "a key or password of a connection string"
        if _HOOKS.search(form):
            return "the token of a web hook"
        if "://" not in form:
            continue  # a path of this machine; ``?`` and ``=`` mean nothing in it
        if _USER_INFO.search(form) or _LONG_USER.search(form):
            return "a password or token before the host"
        for name, value in _PARAMETER.findall(form):
            plain = name.lower().lstrip("+-")
            if value and _SECRET_PARAMETER.search(plain) and not _HARMLESS_PARAMETER.search(plain):
                what = "a signature (SAS)" if name.lower().endswith(("sig", "signature", "sas")) else "a key or token"
                return f"{what} in its query"
    return None


def refuse_secret(setting: str, text: str, remedy: str = "") -> None:
    """Raise `SecretError` if an address carries a secret, or begins as a reference and is none. The message names
    the setting and what to write instead, and repeats nothing of the value.

    ``remedy``: instead of the usual one, which is to write ``env:NAME`` or ``keyvault://VAULT/SECRET``.
    """
    if what := secret_in(text):
        usual = (
            f"put the whole address into an environment variable or a vault, and write {setting}=env:NAME or "
            f"{setting}=keyvault://VAULT/SECRET"
        )
        raise SecretError(
            f"{setting} carries {what}, and settings are stored with everything that is made from them: "
            f"{remedy or usual}"
        )
    if is_reference(text):
        check_reference(text)


def _decoded(text: str) -> list[str]:
    """Return the text as it is, and with its percent signs undone, as often as there are any (three times at most)."""
    forms = [text]
    while len(forms) < 4 and (plain := urllib.parse.unquote(forms[-1])) != forms[-1]:
        forms.append(plain)
    return forms
