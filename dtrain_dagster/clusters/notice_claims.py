"""A notice is sent once, whoever sees first that it is due: a file that can be created only once claims it.

A claim whose sender died is never repeated, since its message may have arrived. It is given back only where each
address has refused the message, so that certainly nobody was told.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from dtrain_dagster.support.notify import notify  # not above: a supervisor has to start in a moment
from dtrain_dagster.support.secrets import redact
from trainer.printable import visible
from trainer.rundir import RunDir
from trainer.runtime.retry import RetryPolicy

NOTIFY = "DTRAIN_NOTIFY"
NOTICES = "notices"
"""The folder of a run directory, or of a search, with a file for each notice that was sent."""
REFUSED_WITHIN_SECONDS = 3.0
"""A failure within this time is a refusal, and nobody was told. A later one may be an answer that did not come in time:
Apprise waits four seconds for it."""
RETRIES = RetryPolicy(first_pause_seconds=6.0, max_attempts=4)
"""The attempts of a process that has time: after 0, 6, 18 and 42 s."""
ONCE = RetryPolicy(first_pause_seconds=0.0, max_attempts=1)
Write = Callable[[], tuple[str, str]]
"""Returns title and text of a notice."""
_log = logging.getLogger(__name__)


class NotToldError(RuntimeError):
    """Some addresses have refused a notice; sending it to them again may help."""


def notice_addresses() -> tuple[str, ...]:
    """Return the addresses that `NOTIFY` names in the environment, or references to them."""
    return tuple(os.environ.get(NOTIFY, "").split())


def send_once(folder: RunDir, find: Callable[[], tuple[str, Write] | None], retries: RetryPolicy = ONCE) -> None:
    """Send a notice to the addresses of `NOTIFY`, unless it was sent before. ``find`` returns its key and its words;
    None where nothing is to be told. It never raises: what is wrong is logged."""
    urls = notice_addresses()
    if not urls:
        return
    try:
        found = find()
        if found is None or is_claimed(folder, found[0]):
            return
        key, write = found
        _send(folder, f"{NOTICES}/{key}.json", urls, write(), retries)
    except Exception as error:  # of any kind: a notice must not stop the work that it tells of
        _log.warning("nobody could be notified of %s: %s: %s", folder.uri, type(error).__name__, redact(str(error)))


def is_claimed(folder: RunDir, key: str) -> bool:
    """Return whether the notice of this key was sent, or is being sent."""
    return folder.storage.exists(f"{NOTICES}/{key}.json")


def _send(folder: RunDir, name: str, urls: Sequence[str], said: tuple[str, str], retries: RetryPolicy) -> None:
    title, body = said[0], visible(said[1], keep_lines=True)
    try:
        folder.storage.create(name, _state("claimed"))
    except FileExistsError:  # another process was quicker
        return
    left, lost = list(urls), []

    def send() -> None:
        for url in tuple(left):
            began = time.monotonic()
            is_told = not notify([url], title, body)
            if is_told or time.monotonic() - began >= REFUSED_WITHIN_SECONDS:
                left.remove(url)
                lost.extend([] if is_told else [url])
        if left:
            raise NotToldError

    try:
        retries.call("a notice", send, lambda error: isinstance(error, NotToldError))
    except NotToldError:
        _log.warning("nobody could be notified by %s: %s; see %s", _kinds(left), title, NOTIFY)
    if lost:
        _log.warning("%s did not answer in time to '%s': it is not sent again", _kinds(lost), title)
    if len(left) == len(urls):
        folder.storage.delete(name)
    else:
        folder.storage.write(name, _state("refused" if left else "unknown" if lost else "sent"))


def _state(state: str) -> bytes:
    found: dict[str, Any] = {"state": state, "by": f"{os.getpid()}@{socket.gethostname()}", "at": int(time.time())}
    return json.dumps(found).encode()


def _kinds(urls: Sequence[str]) -> str:
    return ", ".join(url.partition(":")[0] for url in urls)
