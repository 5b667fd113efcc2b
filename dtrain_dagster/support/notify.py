"""Notices to people by Apprise addresses (mail, Slack, Teams, a webhook…)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dtrain_dagster.support.secrets import SecretError, is_reference, redact, refuse_secret, resolve

_log = logging.getLogger(__name__)
_REMEDY = "put it into an environment variable or a vault, and write {0}=env:NAME or {0}=keyvault://VAULT/SECRET"


def refuse_inline_secret(setting: str, address: str) -> None:
    """Raise `SecretError` for an address that holds a token or password itself, as Apprise knows its parts, or that
    Apprise cannot read, since a mistyped one may hold one as well. References pass. The message repeats nothing of
    it."""
    refuse_secret(setting, address)
    if is_reference(address):
        return
    import apprise

    logging.getLogger("apprise").addFilter(_struck_out)
    kind = address.partition("://")[0] if "://" in address else "…"
    remedy = _REMEDY.format(setting)
    known = apprise.Apprise.instantiate(address)
    if known is None:
        raise SecretError(
            f"{setting} names an address that Apprise cannot read; if it is meant to hold a token, {remedy}"
        )
    if known.url(privacy=True) != known.url(privacy=False):
        raise SecretError(
            f"{setting} names an address of kind {kind} that holds a token or password, and settings are stored: "
            f"{remedy}"
        )


def _struck_out(record: logging.LogRecord) -> bool:
    """Remove the text of a record of Apprise's own log, in which it repeats addresses that it cannot read."""
    record.msg, record.args = redact(record.getMessage()), ()
    return record.levelno < logging.WARNING or "URL" not in record.msg


def notify_and_log(urls: Sequence[str], title: str, body: str, log: logging.Logger) -> None:
    """Call `notify`, and log the kinds of address that it did not reach, for readers of this log."""
    if lost := notify(urls, title, body):
        log.warning(f"nobody could be notified by {', '.join(lost)}; see DTRAIN_NOTIFY")


def notify(urls: Sequence[str], title: str, body: str) -> tuple[str, ...]:
    """Send a message to every address; return the kinds of those that it did not reach (``slack``, ``mailto``…). An
    address may be a reference to a secret, ``keyvault://…`` or ``env:…``.

    It never raises: a failed notice must not stop the work that it tells of. Addresses hold tokens, so only their kind
    appears in logs.
    """
    if not urls:
        return ()
    import apprise

    logging.getLogger("apprise").addFilter(_struck_out)
    failed = []
    for url in urls:
        kind = url.partition(":")[0]
        sender = apprise.Apprise()
        try:
            reached = bool(sender.add(resolve(url)))  # a reference may hold several addresses
            reached &= bool(sender.notify(title=redact(title), body=redact(body)))
        except Exception as error:  # a plug-in's own errors, of any kind; a secret that cannot be read
            _log.warning("notification by %s failed: %s", kind, type(error).__name__)
            reached = False
        if not reached:
            failed.append(kind)
    return tuple(failed)
