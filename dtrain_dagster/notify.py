"""Tell a person, wherever that person wants to be told: Apprise addresses (mail, Slack, Teams, a webhook…)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dtrain_dagster.secrets import resolve

_log = logging.getLogger(__name__)


def tell(urls: Sequence[str], title: str, body: str, log: logging.Logger) -> None:
    """`notify`, and whom it did not reach is said in this log, which the person who looks for the message reads."""
    if lost := notify(urls, title, body):
        log.warning(f"nobody could be told by {', '.join(lost)}; see DTRAIN_NOTIFY")


def notify(urls: Sequence[str], title: str, body: str) -> tuple[str, ...]:
    """Send a message to every address; the kinds of those that it did not reach (``slack``, ``mailto``…). An address
    may be a reference to a secret, ``keyvault://…`` or ``env:…``.

    It never raises: who cannot be told must not stop what there is to tell. Addresses hold tokens, so only their kind
    appears in logs.
    """
    if not urls:
        return ()
    import apprise

    failed = []
    for url in urls:
        kind = url.partition(":")[0]
        sender = apprise.Apprise()
        try:
            reached = bool(sender.add(resolve(url))) and bool(sender.notify(title=title, body=body))
        except Exception as error:  # a plug-in's own errors, of any kind; a secret that cannot be had
            _log.warning("notification by %s failed: %s", kind, type(error).__name__)
            reached = False
        if not reached:
            failed.append(kind)
    return tuple(failed)
