"""A node's own record of its time in the job, where nothing else watches it from outside (`Launch.records_presence`).

On a cluster whose nodes we cannot look into, local rank 0 writes the node's `NodePresence` and refreshes it; the
orchestrator that pays for the node reads it. A node that vanishes writes no end: the time when it was last seen counts.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import psutil

from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.config import ConfigError, JobConfig
from trainer.documents.presences import NodePresence, heartbeat_seconds
from trainer.exit_codes import EVICTED
from trainer.rundir import RunDir
from trainer.runtime import clock
from trainer.runtime.launch import Launch

LAST_WORD_SECONDS = 15.0
"""The seconds for which the end of a process waits for its record of it."""
_log = logging.getLogger(__name__)


class PresenceRecorder:
    """A recorder that keeps this node's record on a thread, so neither training nor the start waits for storage."""

    def __init__(self, rundir: RunDir, node_id: int, launch: int, started_at: float) -> None:
        self.rundir = rundir
        self.period_seconds = heartbeat_seconds(rundir.storage)
        self._record = NodePresence(node_id=node_id, launch=launch, started_at=started_at, last_seen_at=clock.now())
        self._begun = False
        self._ended = threading.Event()
        self._code = 0
        self._thread = threading.Thread(target=self._work, name="presence", daemon=True)
        self._thread.start()

    def close(self, code: int) -> None:
        """Write the end with the exit code ``code``; wait `LAST_WORD_SECONDS` at most."""
        self._code = code
        self._ended.set()
        self._thread.join(LAST_WORD_SECONDS)
        if self._thread.is_alive():
            _log.warning("the end of this node could not be recorded within %.0f s", LAST_WORD_SECONDS)

    def _work(self) -> None:
        self._write()
        while not self._ended.wait(self.period_seconds):
            self._write()
        # One thread writes them all, so that no late sign of life takes the place of the end.
        self._record = replace(self._record, ended_at=clock.now(), exit_codes=(self._code,))
        for _ in range(3):
            if self._write():
                return

    def _write(self) -> bool:
        self._record = replace(self._record, last_seen_at=clock.now(), clock_jump_seconds=clock.this().jump())
        try:
            if self._begun:
                self.rundir.write_node(self._record)
            else:  # a new incarnation, independent of the records of this node's earlier processes
                self._record = self.rundir.begin_incarnation(self._record)
                self._begun = True
            return True
        except OSError as error:
            _log.warning("could not record that this node is present: %s", error)
            return False


_of_this_process: PresenceRecorder | None = None


def write_last_presence(code: int) -> None:
    """Write the end of this node, where this process keeps its record and is about to end at once."""
    if _of_this_process is not None:
        _of_this_process.close(code)


@contextmanager
def record_presence(job: JobConfig, environment: Mapping[str, str]) -> Iterator[BlockExit]:
    """Record this node of a training while the block runs, as `record_presence_in` does."""
    try:
        facts = rank_facts(environment, job.training)
    except ConfigError:  # the trainer refuses it, and says why
        yield BlockExit()
        return
    with record_presence_in(job.run_dir, facts, environment) as leaving:
        yield leaving


@contextmanager
def record_presence_in(run_dir: str, facts: RankFacts, environment: Mapping[str, str]) -> Iterator[BlockExit]:
    """Record this node in a run directory while the block runs, if the environment asks for it and this process is its
    local rank 0. The block sets ``code`` of what it gets."""
    global _of_this_process
    leaving = BlockExit()
    watch = _of_this_process = _begin(run_dir, facts, environment)
    if watch is None:
        yield leaving
        return
    handler = None
    if threading.current_thread() is threading.main_thread():
        # Until the trainer has a handler of its own, and after it: SIGTERM must not interrupt the last record.
        handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EVICTED))
    try:
        yield leaving
    except SystemExit as asked:
        leaving.code = asked.code if isinstance(asked.code, int) else 1
        raise
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is ending
        watch.close(leaving.code)
        _of_this_process = None
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


class BlockExit:
    """The end of a block: its exit code, 1 unless the block sets another."""

    code: int = 1


def _begin(run_dir: str, facts: RankFacts, environment: Mapping[str, str]) -> PresenceRecorder | None:
    try:
        launch = Launch.read(environment)
    except ConfigError:
        return None  # the trainer refuses it, and says why
    if not launch.records_presence or facts.local_rank != 0:
        return None
    return PresenceRecorder(RunDir(run_dir), facts.node_rank, launch.number, psutil.Process().create_time())
