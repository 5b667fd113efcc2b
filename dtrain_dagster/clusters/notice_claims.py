"""A notice is sent once, whoever sends it: each attempt is claimed first by a file that can be created only once.

A claim without an outcome is never repeated, since its message may have arrived; only a refusal that certainly reached
nobody is tried again, for the addresses that missed it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dtrain_dagster.support.notify import notify  # not above: a supervisor has to start in a moment
from dtrain_dagster.support.secrets import redact
from trainer.documents.reader import MARK_BYTES, parse_document
from trainer.documents.schemas import count, many, record, text
from trainer.errors import DamagedError
from trainer.printable import visible
from trainer.rundir import RunDir
from trainer.runtime.retry import RetryPolicy

NOTIFY = "DTRAIN_NOTIFY"
NOTICES = "notices"
"""The folder of a run directory, or of a search, with a file for each attempt to send a notice."""
MOST_ATTEMPTS = 8
REFUSED_WITHIN_SECONDS = 3.0
"""A failure within this time is a refusal, and nobody was told. A later one may be an answer that did not come in time:
Apprise waits four seconds for it."""
_CLAIM = record(state=text, by=text, at=count, missed=many(text))
_log = logging.getLogger(__name__)


class NotToldError(RuntimeError):
    """Some addresses have refused a notice; sending it to them again may help."""


def notice_addresses() -> tuple[str, ...]:
    """Return the addresses that `NOTIFY` names in the environment, or references to them."""
    return tuple(os.environ.get(NOTIFY, "").split())


def send_safely(folder: RunDir, send: Callable[[Sequence[str]], None], retries: RetryPolicy | None = None) -> None:
    """Call ``send`` with the addresses, if there are any, and again where `NotToldError` says that it may help.
    ``retries``: None for one attempt. It never raises: what is wrong is logged."""
    urls = notice_addresses()
    if not urls:
        return
    try:
        if retries is None:
            send(urls)
        else:
            retries.call("a notice", lambda: send(urls), lambda error: isinstance(error, NotToldError))
    except NotToldError as error:
        _log.warning("%s; see DTRAIN_NOTIFY", error)
    except Exception as error:  # of any kind: a notice must not stop the work that it tells of
        _log.warning("nobody could be notified of %s: %s: %s", folder.uri, type(error).__name__, redact(str(error)))


def send_once(folder: RunDir, key: str, urls: Sequence[str], write: Callable[[], tuple[str, str]]) -> None:
    """Send the notice of this key to the addresses that have not had it. ``write`` gives its title and text. Raise
    `NotToldError` where some have refused it."""
    if _next_attempt(folder, key, urls) is None:
        return
    title, body = write()
    claimed = claim_notice(folder, key, urls)
    if claimed is None:
        return
    name, addresses = claimed

    refused: list[str] = []
    lost: list[str] = []
    for url in addresses:
        began = time.monotonic()
        if notify([url], title, visible(body, keep_lines=True)):
            (refused if time.monotonic() - began < REFUSED_WITHIN_SECONDS else lost).append(url)
    outcome = "refused" if refused else "unknown" if lost else "sent"
    folder.storage.write(name, json.dumps(_state(outcome, missed=[_digest(url) for url in refused])).encode())
    if lost:
        _log.warning("%s did not answer in time to '%s': it is not sent again", _kinds(lost), title)
    if refused:
        raise NotToldError(f"nobody could be notified by {_kinds(refused)}: {title}")


def is_claimed(folder: RunDir, key: str) -> bool:
    """Return whether the notice of this key was sent, or is being sent."""
    return any(name.startswith(f"{key}.") for name in folder.storage.list(NOTICES))


def _next_attempt(folder: RunDir, key: str, urls: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the file of the next attempt to send a notice, and the addresses that it has to reach; None where nothing
    is left to send, or another process may be sending it."""
    left = tuple(urls)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        name = f"{NOTICES}/{key}.{attempt}.json"
        if not folder.storage.exists(name):
            return name, left
        found = _read(folder, name)
        left = tuple(url for url in urls if _digest(url) in found.get("missed", ()))
        if found.get("state") != "refused" or not left:
            return None
    return None


def claim_notice(folder: RunDir, key: str, urls: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the file of an attempt that is this process's alone, and the addresses that it has to reach; None where
    another process has sent the notice, or may have."""
    for _ in range(MOST_ATTEMPTS):
        if (found := _next_attempt(folder, key, urls)) is None:
            return None
        with suppress(FileExistsError):  # another process was quicker: how its attempt went decides
            folder.storage.create(found[0], json.dumps(_state("claimed")).encode())
            return found
    return None


def _read(folder: RunDir, name: str) -> dict[str, Any]:
    """Return the record of an attempt; an empty one where it is damaged, so that nothing is sent twice."""
    try:
        found: dict[str, Any] = parse_document(folder.storage.read_bounded(name, MARK_BYTES), name, _CLAIM)
    except (DamagedError, FileNotFoundError):
        return {}
    return found


def _state(state: str, **more: Any) -> dict[str, Any]:
    return {"state": state, "by": f"{os.getpid()}@{socket.gethostname()}", "at": int(time.time()), **more}


def _kinds(urls: Sequence[str]) -> str:
    return ", ".join(url.partition(":")[0] for url in urls)


def _digest(url: str) -> str:
    """Return a name for an address that does not tell it."""
    return hashlib.sha256(url.encode()).hexdigest()[:12]
