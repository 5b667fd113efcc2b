"""The one reader of documents that others may write: those of a run directory, and the marks beside them.

Each has a size that it may have, and a form (`trainer.documents.schemas`). Whatever stands in its place, the reader
neither waits nor follows nor fills the memory: it raises `DamagedError`, which names the file.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable
from typing import Any

from trainer.documents import schemas
from trainer.documents.strict_json import parse_strict_json
from trainer.errors import DamagedError
from trainer.storage.base import Storage

MARK_BYTES, DOCUMENT_BYTES = 1 << 16, 16 << 20
"""The largest documents are of jobs on thousands of nodes: some MiB."""
EVENTS_BYTES, EVENTS_LINES = 32 << 20, 100_000
"""The largest file of events, in bytes and lines. It holds the events of a second, or of a time in which storage did
not answer."""
LOG_BYTES = 16 << 20
"""The bytes at the end of a log that are shown at most."""

_log = logging.getLogger(__name__)


def read_document(
    storage: Storage, name: str, check: schemas.Check | None = None, most_bytes: int = DOCUMENT_BYTES
) -> Any | None:
    """Return the document, None if there is none. ``check``: its form; None: that of its name, see
    `trainer.documents.schemas`. Raise `DamagedError` as `parse_document` does."""
    try:
        data = storage.read_bounded(name, most_bytes)
    except FileNotFoundError:
        return None
    return parse_document(data, f"{storage.uri}/{name}", check or schemas.DOCUMENTS.get(name))


def parse_document(data: bytes, where: str, check: schemas.Check | None) -> Any:
    """Return a document from its bytes. Raise `DamagedError` if it does not have the form."""
    value = parse_strict_json(data, where, is_named=True)
    if check is not None and (wrong := check(value)):
        raise DamagedError(where, f"it is {wrong}")
    return value


def parse_events(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a file, and the number of lines that are no events. Pure."""
    events: list[dict[str, Any]] = []
    left_out = 0
    for line in io.BytesIO(data):
        if not line.strip():
            left_out += 1
            continue
        if len(events) >= EVENTS_LINES:
            left_out += 1
            continue
        try:
            item = parse_strict_json(line, "events")
        except DamagedError:
            item = None
        if is_event(item):
            events.append(item)
        else:
            left_out += 1
    return events, left_out


def is_event(item: Any) -> bool:
    """Return whether an item has a kind and a time, and is what the class of its kind takes; of kinds that are
    not known here nothing is asked."""
    if not isinstance(item, dict) or schemas.text(item.get("kind")) or schemas.moment(item.get("time")):
        return False
    from trainer.documents.events import KINDS, EventError, read_event  # not above: who trains reads none

    kind = KINDS.get(item["kind"])
    try:
        return kind is None or bool(read_event(kind, item))
    except EventError:
        return False


def known_names(storage: Storage, folder: str, names: Iterable[str], form: re.Pattern[str]) -> list[str]:
    """Return the names of a folder that match ``form``; warn once about each other name."""
    found = []
    for name in names:
        if form.fullmatch(name):
            found.append(name)
        else:
            warn_once(f"{storage.uri}/{folder}/{name} was not written by dtrain and is ignored: remove it")
    return found


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning once per process: folders are looked at every few seconds."""
    from trainer.printable import visible

    if message not in _warned and len(_warned) < 1000:
        _warned.add(message)
        _log.warning("%s", visible(message))
