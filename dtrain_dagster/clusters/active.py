"""Which jobs may not have ended, and when the cluster was used last: what is asked every few seconds, in few reads.

A job's mark is made before the job is launched and removed by whoever sees that it has ended. So after a crash at any
point there may be a mark too many, which costs one look, and none too few. Where there are no marks yet, or somebody
has removed their folder, all run directories are opened once.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain_dagster.clusters.base import InUseError
from trainer.storage import Storage

COMPLETE = "~complete"
"""Beside the marks, and no job's name: every job that runs has one."""
USED, CLOSING = "used.json", "closing.json"
CLOSING_SECONDS = 180.0
"""Who gives a cluster back and takes longer has died over it. A sensor has a minute. What cannot be undone is begun in
the first half only, so that the other half is left for it."""
LOOK_SECONDS = 0.2


class ActiveJobs:
    """The marks, in a folder of their own."""

    def __init__(self, uri: str) -> None:
        self.storage = Storage(uri)

    def enter(self, mark: str) -> None:
        """Before the job is launched."""
        self.storage.write(mark, json.dumps({"at": time.time()}).encode())

    def leave(self, mark: str) -> None:
        self.storage.delete(mark)

    def marks(self) -> list[str] | None:
        """None where not every job that runs has one: jobs were started before there were marks."""
        names = self.storage.list()
        return [name for name in names if name != COMPLETE] if COMPLETE in names else None

    def entered_at(self, mark: str) -> float:
        """When the mark was made; now, where it is gone."""
        try:
            return float(json.loads(self.storage.read(mark))["at"])
        except FileNotFoundError:
            return time.time()

    def complete(self) -> None:
        """Every job that runs has its mark now."""
        self.enter(COMPLETE)


class ClusterUse:
    """When a cluster was used last. Who uses it and who gives it back each write first and look at the other's file
    then, so one of them sees the other, whichever machines they are on."""

    def __init__(self, state: Storage) -> None:
        self.state = state

    def used_at(self) -> float | None:
        """When it was last provisioned, or got a job, or a job of it ended; Unix seconds, None for never."""
        try:
            return float(json.loads(self.state.read(USED))["at"])
        except FileNotFoundError:
            return None

    def note_end(self, ended_at: float, job_id: str) -> None:
        self._note(ended_at, job_id)

    def begin(self, by: str) -> None:
        """Say that it is used from now on. Returns when nobody is giving it back: what there is then, stays."""
        self._note(time.time(), by)
        while self._is_closing():
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def giving_back(self, used_at: float | None) -> Iterator[Callable[[], None]]:
        """Around giving it back: who wants to use it meanwhile waits. Gives a check for right before what cannot be
        undone: it may have taken so long that nobody waits any more. `InUseError`, from both, where somebody has used
        it since ``used_at``, or gives it back already."""
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
                raise InUseError("giving the cluster back takes too long, so somebody may use it by now")
            if self.used_at() != used_at:
                raise InUseError("somebody has just used the cluster")

        try:
            check()
            yield check
        finally:
            if self._closing() == mine:
                self.state.delete(CLOSING)

    def _note(self, at: float, by: str) -> None:
        self.state.write(USED, json.dumps({"at": at, "by": by}).encode())

    def _closing(self) -> bytes | None:
        """What whoever gives it back has written; None where nobody does."""
        try:
            return self.state.read(CLOSING)
        except FileNotFoundError:
            return None

    def _is_closing(self) -> bool:
        found = self._closing()
        return found is not None and abs(time.time() - float(json.loads(found)["at"])) < CLOSING_SECONDS
