"""How a rank joins a generation, the first one or another after a node was lost or came: agree on the members, take up
the state of the furthest one, and go on. What a failed step leads to is here, too."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer.checkpoint.manager import BEST, CheckpointError, FencedError
from trainer.comm.group import GroupError
from trainer.documents.schemas import LEAVING, START
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.out_of_memory import MicroBatchLimit, reduce_limit
from trainer.engine.result import raise_if_ended
from trainer.engine.session import Session
from trainer.engine.state import Entry, Loaded, describe_changes, take_up
from trainer.errors import NoGenerationError
from trainer.observability.reporter import StepWindow
from trainer.rundir import LONGEST_REMOTE_FLUSH, RunDir
from trainer.runtime.host_memory import give_back_freed_memory
from trainer.runtime.packages import load
from trainer.runtime.retry import RetryPolicy

if TYPE_CHECKING:
    from trainer.elastic.generation import Generation

STOP_SECONDS = 3.0
"""Seconds for which a regroup may keep a process that was asked to end from its checkpoint."""
LOAD_RETRIES = RetryPolicy(first_pause_seconds=0.5, max_attempts=6, log_level=logging.WARNING)
"""The retries for reading the latest checkpoint from storage that fails: pauses of 15.5 s in all."""
UNWRITTEN_SECONDS = LONGEST_REMOTE_FLUSH + 30.0
"""Seconds of training that rank 0 may have reported and not written when it was lost."""
GIVE_UP = "trainer.engine.memory_need:explain_end"
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def retry_until_formed(session: Session, attempt: Callable[[], None]) -> None:
    """Carry out ``attempt``, and regroup again as long as members are lost while a group forms."""
    while True:
        try:
            return attempt()
        except GroupError as error:
            report_failure(session, error)
            attempt = partial(join_generation, session, str(error), error.communication)


def join_generation(session: Session, reason: str, communication: bool = False) -> None:
    """Join the next generation, ready for the next step, which may be the last one done again.

    Raise `GroupError` if the new group fails as it forms, and `trainer.errors.NoGenerationError` if
    communication keeps failing among members that are all there, in parameter-server mode too.
    """
    assert session.elastic is not None
    elastic, progress, began = session.elastic, session.progress, time.monotonic()
    # A leaving node may be writing a checkpoint, and the one that stays last writes how the job ended.
    patience = STOP_SECONDS + COMMIT_SECONDS * (reason == LEAVING)
    old = elastic.generation
    if old is not None and not session.step.can_regroup:
        raise NoGenerationError(f"{reason}; with DeepSpeed all ranks start again from the latest checkpoint")
    if old is not None:
        session.reports.end_phase("training")
        session.faults.reach("regroup", progress.step)
    fit = session.step.limit

    def ended() -> None:
        # Where a member has a state, a checkpoint is written first, at the next step, unless forming takes too long.
        stop = session.participant.asked_to_stop and (not elastic.has_state_of or time.monotonic() - began > patience)
        raise_if_ended(session.rundir, elastic.launch, stop)

    session.participant.world = elastic.next_world(
        ended,
        step=progress.step,
        progress=progress.evaluated_step,
        chunk=None if fit.max_samples >= session.config.batch_size_per_gpu else fit.max_samples,
        activation_checkpointing=fit.activation_checkpointing,
        communication=communication,
        reason=reason,
    )
    new = elastic.generation
    assert new is not None
    session.faults.reach("formed", progress.step)
    if new.attempt > 2 * session.config.communication_retries + 2:
        raise NoGenerationError(f"communication failed {new.attempt} times in a row at step {progress.step}: {reason}")
    if new.chunk is not None:
        session.step.apply_limit(MicroBatchLimit(new.chunk, new.activation_checkpointing))
    session.reports.adopt_world(session.world)
    session.reports.wait_until_open()
    entry = Entry(
        has_state=new.has_state,
        is_fresh=not new.members[session.world.rank].was_in,
        source=new.source if new.behind else None,
        takers=new.behind,
        resumes=session.config.resume or new.reason != START,
    )
    take_up_state(session, entry)
    elastic.has_state_of = new.number
    while session.recent_steps and session.recent_steps[-1]["step"] > session.progress.step:
        session.recent_steps.pop()  # that step will be done, and reported, again
    if session.world.rank == 0:
        session.best_saved_step = best_pointer(session.rundir)["step"]
        _fence(session, new.number)
        _report_membership(session, old, new, time.monotonic() - began)
    save_start(session)
    if old is not None:
        session.reports.end_phase("regroup")


def best_pointer(rundir: RunDir) -> dict[str, Any]:
    """Return ``path`` and ``step`` of the best checkpoint; no path and step 0 where there is none, or storage fails."""
    nowhere = {"path": None, "step": 0}
    try:
        return rundir.read_json(BEST) or nowhere
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read: %s", BEST, error)
        return nowhere


def _fence(session: Session, generation: int) -> None:
    """Prevent processes that were left out from committing checkpoints from here on."""
    try:
        session.checkpoints.fence(generation)
    except FencedError as error:  # this process missed a regroup of the others
        raise GroupError(str(error), communication=False) from error


def take_up_state(session: Session, entry: Entry) -> None:
    """Work in the present world, with the furthest state that is to be had. A collective."""
    world, before = session.world, session.progress.step
    taken = session.workload.enter_world(world, entry, partial(_read_checkpoint, session))
    session.window = StepWindow()
    if taken is not None:
        session.saved_step = session.progress.step
        _report_resume(session, *taken)
        if not entry.is_fresh:
            _log.warning("rows of the model were lost: going back from step %d to %d", before, session.progress.step)
    elif session.step.is_divided:
        # A part of what was saved may be lost with its rank, and a newcomer has saved nothing.
        session.saved_step = min(world.all_gather_object(session.saved_step))
    where = world.generation, world.rank, world.world_size, session.progress.step
    _log.info("generation %d: rank %d of %d trains from step %d on", *where)


def save_start(session: Session) -> None:
    """Save a model whose rows may be lost before its first step, so that there is a checkpoint to go back to, however
    early that is. Until it counts, each rank keeps what it began with; where storage fails, for good."""
    if not session.step.divides_parameters or session.progress.step:
        return
    session.save()
    if not any(session.world.any(session.state.start is not None)):  # a newcomer has none, and waits with the others
        return
    group, until = session.world.group, time.monotonic() + COMMIT_SECONDS
    while not session.checkpoints.wait(0.1) and time.monotonic() < until:
        if group is not None and group.error is not None:
            break  # a peer is lost, and its part will not come
    session.world.barrier()  # which has the patience for storage
    [counts, *_] = session.world.all_gather_object(session.checkpoints.committed_step() is not None)
    if counts:
        session.state.start = None


def _load_best(session: Session, step: int) -> dict[str, Any] | None:
    """Return the best checkpoint, None where it is not of this step or cannot be used."""
    try:
        folder, best = session.checkpoints.load_best()
        if best["progress"]["step"] != step:
            raise CheckpointError(f"{folder} does not belong to step {step}")
        return best
    except CheckpointError as error:
        session.reports.emit("error", message=f"the best weights are lost: {error}", fatal=False)
        return None


def report_failure(session: Session, error: GroupError) -> None:
    """Report a failure of communication in detail, as this rank saw it. Raise a mistake instead (`GroupError`)."""
    if error.mistake is not None:
        raise error.mistake from error
    if not error.communication:
        return
    elastic = session.elastic
    generation = elastic.generation if elastic else None
    session.reports.emit(
        "communication_error",
        step=session.progress.step,
        attempt=generation.attempt if generation else 0,
        peers=elastic.describe_peers() if elastic else {},
        **{"operation": "", "waited_seconds": None, "error": str(error), **error.detail},
    )


def use_less_memory(session: Session, error: Exception) -> None:
    """Put smaller parts through the model after memory ran out, on all ranks, and do the step again. Where nothing
    smaller is left, or ranks cannot agree because their world is fixed, raise as
    `trainer.engine.memory_need.explain_end` says."""
    fit = reduce_limit(session.step.limit, session.config.micro_batch_floor)
    traceback.clear_frames(error.__traceback__)  # the frames hold the activations of the failed pass
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()
    is_world_fixed = (session.elastic is None or not session.step.can_regroup) and session.world.world_size > 1
    if fit is None or is_world_fixed:
        raise load(GIVE_UP)(session, error, is_world_fixed) from error
    session.step.apply_limit(fit)
    session.reports.emit(
        "out_of_memory",
        step=session.progress.step,
        samples=fit.max_samples,
        activation_checkpointing=fit.activation_checkpointing,
    )
    if session.world.group is None:
        session.workload.load_for(session.world)
    elif session.elastic is not None:
        reason = f"out of memory on rank {session.world.rank}"
        session.world.group.fail(reason, communication=False)
        retry_until_formed(session, partial(join_generation, session, reason))


def _report_resume(session: Session, folder: str, changes: list[str]) -> None:
    """Report that the training goes on from a checkpoint, and what is otherwise than before."""
    session.reports.emit("resume", path=folder, step=session.progress.step, changes=changes)
    if changes and session.world.rank == 0:
        _log.warning("going on from step %d: %s", session.progress.step, "; ".join(changes))


def _read_checkpoint(session: Session, together: bool) -> Loaded | None:
    """Return the latest checkpoint, with its best weights, as training goes on from it; None where there is none.
    ``together``: on all ranks, the one that rank 0 finds.

    `LOAD_RETRIES` gives failing storage time to recover: until it does, it is unknown whether there is one, and to
    start over would waste what was paid for. Raise `NoGenerationError` where it does not."""
    world, now = session.world, session.progress
    found = _retry_load(session, session.checkpoints.load_latest) if not together or world.rank == 0 else None
    told: Any = (found[0], describe_changes(found[1], now)) if found else None
    if together:
        told = world.all_gather_object(told)[0]
    if told is None:
        return None
    folder, changes = told
    state = found[1] if found else _retry_load(session, lambda: session.checkpoints.load(folder))
    take_up(state, now)
    progress = state["progress"]
    if progress["best_step"] not in (0, progress["step"]) and "best" not in state:
        best = _load_best(session, progress["best_step"])
        is_there = best is not None
        if together:
            is_there = all(world.all_gather_object(is_there))
        if best is not None and is_there:
            state["best"] = best["model"]
        else:
            progress["best_loss"], progress["best_score"], progress["best_step"] = math.inf, None, 0
    return Loaded(state, folder, changes)


def _retry_load(session: Session, load: Callable[[], _T]) -> _T:
    failures = (OSError, CheckpointError)
    try:
        return LOAD_RETRIES.call("no checkpoint can be read", load, lambda error: isinstance(error, failures))
    except failures as error:
        raise NoGenerationError(f"the checkpoints in {session.rundir.uri} cannot be read: {error}") from error


def _report_membership(session: Session, old: Generation | None, new: Generation, seconds: float) -> None:
    before = {seat.member: seat.node for seat in old.members} if old else {}
    now = {seat.member: seat.node for seat in new.members}
    fields: dict[str, Any] = {
        "world_size": len(new.members),
        "nodes": sorted(set(now.values())),
        "joined": sorted(node for member, node in now.items() if member not in before),
        "lost": sorted(node for member, node in before.items() if member not in now),
        "topology": session.world.topology,
        "reason": new.reason,
        "attempt": new.attempt,
        "step": session.progress.step,
        "seconds": seconds,
    }
    session.reports.emit("membership", **fields)
    if old is None or old.rank_of(new.members[0].member) == 0:
        return
    # This process has just become rank 0: it writes what its predecessor could not.
    recent = steps_within(session.recent_steps, UNWRITTEN_SECONDS)
    written = session.rundir.last_step_reported() if recent else 0
    for item in recent:
        if item["step"] > written:
            session.reports.emit("step", **item)


def steps_within(recent: Iterable[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return those of the latest ``step`` events that cover about the last ``seconds`` of training, oldest first.
    Pure."""
    found: list[dict[str, Any]] = []
    for item in reversed(list(recent)):
        if found:
            seconds -= found[-1]["step_seconds"] * (found[-1]["step"] - item["step"])
        if seconds < 0:
            break
        found.append(item)
    return found[::-1]
