"""The audit log: one line for each operation that creates, changes, deletes or spends, whatever asked for it.

``<home>/audit/YYYY-MM.jsonl`` is only ever appended to, by any number of processes at once. Secrets are removed before
a line is written.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from dtrain_dagster.support.secrets import redact
from trainer.config import ConfigError

DONE, FAILED = "done", "failed"
_LONGEST = 2000
_log = logging.getLogger(__name__)


class AuditError(ConfigError):
    """A failure to write the audit log, so that no operation that belongs in it may be done."""


@dataclass(slots=True)
class AuditEntry:
    """The parts of a line that the caller may add while the operation goes on."""

    request_id: str | None = None
    """The service's own number of the operation's last request that changes something, to be found in its logs."""
    details: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[AuditEntry | None] = ContextVar("current", default=None)


def note_request_id(request_id: str) -> None:
    """Note a request's number in the operation that goes on in this thread, if any. Clients of the service call it."""
    if entry := _current.get():
        entry.request_id = request_id


def noted_request_id() -> str | None:
    """Return the number noted last in the operation that goes on in this thread; None without one."""
    entry = _current.get()
    return entry.request_id if entry else None


@dataclass(frozen=True, slots=True)
class AuditLog:
    """The audit log below ``home``. ``who``: None is the user of this process on this machine."""

    home: Path
    dagster_run_id: str | None = None
    who: str | None = None

    @contextmanager
    def operation(self, operation: str, target: str, **details: Any) -> Iterator[AuditEntry]:
        """Record the operation of the block: its line is written when it has ended, well or with an error. Raise
        `AuditError`, before anything is done, where the log cannot be written."""
        now = datetime.now(UTC)
        path = self.home / "audit" / f"{now:%Y-%m}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise AuditError(
                f"{operation} was not done: the audit log {path} cannot be written ({error.strerror or error}); make "
                "room there, or set DTRAIN_HOME to a folder that can be written"
            ) from error
        entry = AuditEntry(details=details)
        line: dict[str, Any] = {
            "at": now.isoformat(timespec="milliseconds"),
            "who": self.who or _user(),
            "operation": operation,
            "target": target,
            "dagster_run_id": self.dagster_run_id,
        }
        outer = _current.set(entry)
        try:
            yield entry
            line["result"] = DONE
        except BaseException as error:  # an interruption is a result too, and is recorded
            line |= {"result": FAILED, "code": error_code(error), "message": redact(str(error))[:_LONGEST]}
            entry.request_id = entry.request_id or getattr(error, "request_id", None)
            raise
        finally:
            _current.reset(outer)
            line |= {"request_id": entry.request_id, "details": entry.details or None}
            known = {name: value for name, value in line.items() if value is not None}
            try:
                os.write(file, json.dumps(redact(known), default=str).encode() + b"\n")  # one write: lines stay whole
            except OSError as error:
                _log.error("the audit log %s cannot be written (%s): %s", path, error, redact(known))
            finally:
                os.close(file)

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, oldest first."""
        files = sorted((self.home / "audit").glob("*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def error_code(error: BaseException) -> str:
    """Return the service's code of an error, where it has one, else its type."""
    code = getattr(error, "code", None) or getattr(getattr(error, "error", None), "code", None)
    return str(code) if code else type(error).__name__


@cache
def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
