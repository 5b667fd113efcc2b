"""Work that needs no model, done while ranks wait for each other: an idle node is paid for like a busy one."""

from __future__ import annotations

from itertools import count

from trainer.engine.session import Session
from trainer.evaluation.shared_work import SharedWork
from trainer.runtime.host_memory import give_back_freed_memory

LOOK_SECONDS = 0.02
"""The seconds for which rank 0 waits for its tracking before it asks the others whether they go on."""


def wait_for_tracking(session: Session) -> None:
    """Wait until rank 0 has opened its tracking, or training may not wait longer. Meanwhile the others do what can be
    done of the final report; a rank that is alone does so itself. A collective, in each world once it is entered."""
    reports, world = session.reports, session.world
    if reports.opens_tracking and session.problem.ahead is not None:
        is_worker = world.rank != 0 or world.world_size == 1  # on rank 0 imports and this work would take turns
        rounds = count()

        def goes_on() -> bool:
            session.faults.reach("ahead", next(rounds))
            return world.rank != 0 or not reports.wait_until_open(0.0 if is_worker else LOOK_SECONDS)

        session.problem.ahead().advance(SharedWork(world), goes_on, is_worker)
        give_back_freed_memory()
    reports.wait_until_open()
