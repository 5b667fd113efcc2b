"""Marks of the jobs that may not have ended, and the time of a cluster's last use: asked every few seconds, in few
reads.

A job's mark is made before the job is launched and removed by the process that sees its end. So after a crash at any
point there may be a mark too many, which costs one look, and none too few. Where there are no marks yet, or somebody
has removed their folder, all run directories are opened once.
"""

from __future__ import annotations

import errno
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain_dagster.clusters.base import InUseError
from trainer.documents import schemas
from trainer.documents.reader import MARK_BYTES, known_names, parse_document, read_document, warn_once
from trainer.errors import DamagedError
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

MARK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}(~\d{1,12})?")
"""A job's id, with the number of its launch where it has one."""
COMPLETE = "~complete"
"""A file beside the marks, whose name no job can have: it says that every running job has a mark."""
USED, CLOSING = "used.json", "closing.json"
CLOSING_SECONDS = 180.0
"""Time after which a process that gives a cluster back is taken for dead. A sensor has a minute. Steps that cannot be
undone begin in the first half only, so that the other half is left for them."""
LOOK_SECONDS = 0.2


class ActiveJobs:
    """The marks of active jobs, in a folder of their own."""

    def __init__(self, uri: str) -> None:
        self.storage = open_storage(uri)

    def enter(self, mark: str) -> None:
        """Make the mark, before the job is launched."""
        self.storage.write(mark, json.dumps({"at": time.time()}).encode())

    def leave(self, mark: str) -> None:
        """Remove the mark of a job that has ended."""
        self.storage.delete(mark)

    def marks(self) -> list[str] | None:
        """Return the marks; None where a running job may have none: it was started before marks existed."""
        names = self.storage.list()
        if COMPLETE not in names:
            return None
        return known_names(self.storage, "", (name for name in names if name != COMPLETE), MARK)

    def entered_at(self, mark: str) -> float:
        """Return when the mark was made, in Unix seconds; now, where it is gone; 0, where it is damaged, since such a
        mark is made again where it is missing."""
        try:
            found = read_document(self.storage, mark, schemas.AT, MARK_BYTES)
        except DamagedError:
            return 0.0
        return time.time() if found is None else float(found["at"])

    def complete(self) -> None:
        """Record that every running job has a mark now."""
        self.enter(COMPLETE)


class ClusterUse:
    """The time of a cluster's last use. A process that uses it and one that gives it back each write first and then
    read the other's file, so one of them sees the other, on whichever machines they are."""

    def __init__(self, state: Storage) -> None:
        self.state = state

    def used_at(self) -> float | None:
        """Return when it was last provisioned, was given a job, or a job of it ended; Unix seconds, None for never."""
        try:
            found = read_document(self.state, USED, schemas.AT, MARK_BYTES)
        except DamagedError as error:  # it says nothing, and the next use writes it again
            warn_once(str(error))
            return None
        return None if found is None else float(found["at"])

    def note(self, at: float, by: str) -> None:
        """Record a use, such as the end of a job, as the last one."""
        self.state.write(USED, json.dumps({"at": at, "by": by}).encode())

    def begin(self, by: str) -> None:
        """Record that the cluster is used from now on. Return when no process is giving it back: its nodes then
        stay."""
        self.note(time.time(), by)
        while self._is_closing():
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def giving_back(self, used_at: float | None) -> Iterator[Callable[[], None]]:
        """Hold the cluster while it is given back: anyone who wants to use it meanwhile waits.

        Yield a check to call right before a step that cannot be undone: the removal may have taken so long that nobody
        waits any more. Both raise `InUseError` where somebody has used the cluster since ``used_at``, or gives it back
        already.
        """
        if not self._is_closing():
            self.state.delete(CLOSING)
        began = time.time()
        mine = json.dumps({"at": began, "by": uuid.uuid4().hex}).encode()
        try:
            self.state.create(CLOSING, mine)
        except FileExistsError:
            raise InUseError("somebody else is giving the cluster back") from None

        def check() -> None:
            if self._closing() != mine or abs(time.time() - began) >= CLOSING_SECONDS / 2:
                raise InUseError("giving the cluster back takes too long, so somebody may be using it by now")
            if self.used_at() != used_at:
                raise InUseError("somebody has just used the cluster")

        try:
            check()
            yield check
        finally:
            if self._closing() == mine:
                self.state.delete(CLOSING)

    def _closing(self) -> bytes | None:
        """Return what the process that gives the cluster back has written; None where there is none."""
        try:
            return self.state.read_bounded(CLOSING, MARK_BYTES)
        except FileNotFoundError:
            return None
        except DamagedError as error:  # a person has to look before anything is given back
            raise OSError(errno.EIO, str(error)) from error

    def _is_closing(self) -> bool:
        found = self._closing()
        try:
            began = None if found is None else parse_document(found, CLOSING, schemas.AT)["at"]
        except DamagedError:
            return False
        return began is not None and abs(time.time() - float(began)) < CLOSING_SECONDS
