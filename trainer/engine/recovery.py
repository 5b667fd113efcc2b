"""What a trainer does when its world changes: agree on who is in, take over the state of the furthest, deal anew."""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainer.checkpoint.manager import BEST, CheckpointError, FencedError
from trainer.comm.group import GroupError
from trainer.data.loader import BatchLoader
from trainer.data.sampler import Sampler
from trainer.elastic.generation import START, Generation
from trainer.elastic.membership import NoGenerationError
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.out_of_memory import Fit, give_back_freed_memory, smaller
from trainer.engine.result import OutOfMemoryError, raise_if_ended
from trainer.observability.comm_profiler import CommunicationProfiler
from trainer.observability.node_monitor import NodeMonitor
from trainer.observability.reporter import OPENING_SECONDS, Reporter, StepWindow, sinks_of

if TYPE_CHECKING:
    from trainer.engine.trainer import DistributedTrainer

STOP_SECONDS = 3.0
"""How long a regroup may keep a process that was asked to end from its checkpoint…"""
LEAVING = "a node was asked to leave"
"""…unless this is the reason: then that node may be writing one, and whoever stays last says how the job ended."""
LOAD_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to read the latest checkpoint from storage that fails."""
_log = logging.getLogger(__name__)


def until_formed(trainer: DistributedTrainer, attempt: Callable[[], None]) -> None:
    """Carry out ``attempt``, and regroup anew for as long as members are lost while a group forms."""
    while True:
        try:
            return attempt()
        except GroupError as error:
            record(trainer, error)
            attempt = partial(regroup, trainer, str(error), error.communication)


def regroup(trainer: DistributedTrainer, reason: str, communication: bool = False) -> None:
    """Be in the next generation, ready for the step that comes next, or comes once more.

    Raises `GroupError` where the new group fails as it forms, and `trainer.elastic.membership.NoGenerationError` where
    communication keeps failing among members that are all there, in parameter-server mode too.
    """
    assert trainer.elastic is not None
    assert trainer.state is not None
    elastic, progress, began = trainer.elastic, trainer.progress, time.monotonic()
    patience = STOP_SECONDS + COMMIT_SECONDS * (reason == LEAVING)
    old = elastic.generation
    if old is not None:
        trainer.phase("training")
        trainer.faults.reach("regroup", progress.step)
    fit = trainer.step.fit

    def ended() -> None:
        # With a state in hand there is a checkpoint to be written first, at the next step, unless it takes too long.
        stop = trainer.asked_to_stop and (not elastic.has_state_of or time.monotonic() - began > patience)
        raise_if_ended(trainer.rundir, elastic.launch, stop)

    trainer.world = elastic.regroup(
        ended,
        step=progress.step,
        progress=progress.evaluated_step,
        chunk=None if fit.chunk >= trainer.config.batch_size_per_gpu else fit.chunk,
        activation_checkpointing=fit.activation_checkpointing,
        communication=communication,
        reason=reason,
    )
    new = elastic.generation
    assert new is not None
    trainer.faults.reach("formed", progress.step)
    if new.attempt > 2 * trainer.config.communication_retries + 2:
        raise NoGenerationError(f"communication failed {new.attempt} times in a row at step {progress.step}: {reason}")
    if new.chunk is not None:
        trainer.step.limit(Fit(new.chunk, new.activation_checkpointing))
    report_as_this_rank(trainer)
    if new.has_state:
        enter(trainer, source=None if new.all_equal else new.source, from_checkpoint=False)
    else:
        enter(trainer, source=0, from_checkpoint=trainer.config.resume or new.reason != START)
    elastic.has_state_of = new.number
    while trainer.recent_steps and trainer.recent_steps[-1]["step"] > trainer.progress.step:
        trainer.recent_steps.pop()  # it is done, and reported, once more
    if trainer.world.rank == 0:
        trainer.best_saved_step = best_pointer(trainer)["step"]
        _fence(trainer, new.number)
        _report_membership(trainer, old, new, time.monotonic() - began)
    if old is not None:
        trainer.phase("regroup")


def best_pointer(trainer: DistributedTrainer) -> dict[str, Any]:
    """``path`` and ``step`` of the best checkpoint; no path and step 0 where there is none, or storage fails."""
    nowhere = {"path": None, "step": 0}
    try:
        return trainer.rundir.read_json(BEST) or nowhere
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read: %s", BEST, error)
        return nowhere


def _fence(trainer: DistributedTrainer, generation: int) -> None:
    """From here on, who was left out can commit no checkpoint."""
    try:
        trainer.checkpoints.fence(generation)
    except FencedError as error:  # this one slept through a regroup of the others
        raise GroupError(str(error), communication=False) from error


def enter(trainer: DistributedTrainer, source: int | None, from_checkpoint: bool) -> None:
    """Work in the present world, with the state of rank ``source`` (None: all have it already)."""
    assert trainer.state is not None
    world, folder = trainer.world, None
    if from_checkpoint and world.rank == source:
        folder = _load_checkpoint(trainer)
    if source is not None:
        trainer.state.share(world, source)
    deal(trainer, world.rank, world.world_size)
    if trainer.loader is not None:
        trainer.loader.close()
    trainer.loader = BatchLoader(
        trainer.shards, trainer.sampler, world, trainer.faults, trainer.step.timer, trainer.config.prefetch_batches
    )
    trainer.step.adopt(world)
    probe_at = trainer.communication.probe_at if hasattr(trainer, "communication") else 0
    probe_at = max(world.gather(probe_at))  # who has come has heard of no probe
    trainer.window = StepWindow()
    trainer.communication = CommunicationProfiler(world, trainer.step.timer, probe_at)
    if from_checkpoint:
        [folder, *_] = world.gather(folder)
        trainer.saved_step = trainer.progress.step
        if folder and trainer.reporter:
            trainer.reporter.emit("resume", path=folder, step=trainer.progress.step)
    where = world.generation, world.rank, world.world_size, trainer.progress.step
    _log.info("generation %d: rank %d of %d trains from step %d on", *where)


def deal(trainer: DistributedTrainer, rank: int, world_size: int) -> None:
    """Deal samples to this rank of a world of this size. `trainer.config.ConfigError` if it cannot be."""
    config = trainer.config
    trainer.sampler = Sampler(
        samples=trainer.shards.count("train"),
        global_batch_size=config.global_batch_size,
        micro_batches=config.micro_batches,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        shuffle_block=config.shuffle_block,
    )


def report_as_this_rank(trainer: DistributedTrainer) -> None:
    """Report, and watch the node, as what this process is in the present world; waits for its group."""
    world, facts = trainer.world, trainer.facts
    sinks = sinks_of(trainer.job, trainer.rundir, world.rank)
    ranks = world.gather((facts.node_rank, os.getpid()))
    trainer.nodes = [node for node, _ in ranks]
    is_new = trainer.reporter is None
    if trainer.reporter is None:
        trainer.reporter = Reporter(trainer.rundir, world.rank, world.generation, sinks)
        for name, seconds in trainer.seconds.items():
            if seconds:
                trainer.reporter.emit("phase", name=name, seconds=round(seconds, 3))
    else:
        trainer.reporter.move(world.rank, world.generation, sinks)
    trainer.reporter.has_other_nodes = len(set(trainer.nodes)) > 1
    trainer.watchdog.attend(trainer.reporter, world.group, [node for node, _ in ranks], facts.node_rank)
    if facts.local_rank == 0 and trainer.monitor is None:
        pids = [pid for node, pid in ranks if node == facts.node_rank]
        interval = trainer.config.monitor_interval_seconds
        trainer.monitor = NodeMonitor(facts.node_rank, trainer.reporter, interval, pids)
        trainer.monitor.start()
    if is_new:  # the others wait in their next collective; where one is replaced, training goes on at once
        trainer.reporter.wait_until_open(min(OPENING_SECONDS, trainer.config.collective_timeout_seconds / 3))


def record(trainer: DistributedTrainer, error: GroupError) -> None:
    """A detailed record of what failed, as this rank saw it (D3)."""
    if trainer.reporter is None or not error.communication:
        return
    elastic = trainer.elastic
    generation = elastic.generation if elastic else None
    trainer.reporter.emit(
        "communication_error",
        step=trainer.progress.step,
        attempt=generation.attempt if generation else 0,
        peers=elastic.describe_peers() if elastic else {},
        **{"operation": "", "waited_seconds": None, "error": str(error), **error.detail},
    )


def use_less_memory(trainer: DistributedTrainer, error: Exception) -> None:
    """Out of memory: smaller parts, on all ranks, and the step once more (D4). `OutOfMemoryError` at the end of that
    road, or where ranks cannot agree because their world is fixed."""
    fit = smaller(trainer.step.fit, trainer.config.micro_batch_floor)
    traceback.clear_frames(error.__traceback__)  # which hold the activations of the pass that failed
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()
    if fit is None or (trainer.elastic is None and trainer.world.world_size > 1):
        now = trainer.step.fit
        raise OutOfMemoryError(
            f"out of memory at step {trainer.progress.step + 1} with {now.chunk} samples at once"
            + (" and activation checkpointing" if now.activation_checkpointing else "")
            + f": lower training.batch_size_per_gpu, or use a smaller model or a larger GPU ({error})"
        ) from error
    trainer.step.limit(fit)
    if trainer.reporter:
        trainer.reporter.emit(
            "out_of_memory",
            step=trainer.progress.step,
            samples=fit.chunk,
            activation_checkpointing=fit.activation_checkpointing,
        )
    if trainer.elastic is not None and trainer.world.group is not None:
        reason = f"out of memory on rank {trainer.world.rank}"
        trainer.world.group.fail(reason, communication=False)
        until_formed(trainer, partial(regroup, trainer, reason))


def _load_checkpoint(trainer: DistributedTrainer) -> str | None:
    """Restore the latest checkpoint in this process; its folder, None if there is none."""
    assert trainer.state is not None
    found = _find_checkpoint(trainer)
    if found is None:
        return None
    folder, state = found
    trainer.state.restore(state)
    progress = trainer.progress
    if progress.best_step and trainer.state.best is None:
        try:
            best_folder, best = trainer.checkpoints.load_best()
            if best["progress"]["step"] != progress.best_step:
                raise CheckpointError(f"{best_folder} is not of step {progress.best_step}")
            trainer.state.best = best["model"]
        except CheckpointError as error:
            if trainer.reporter:
                trainer.reporter.emit("error", message=f"the best weights are lost: {error}", fatal=False)
            progress.best_loss, progress.best_step = math.inf, 0
    return folder


def _find_checkpoint(trainer: DistributedTrainer) -> tuple[str, dict[str, Any]] | None:
    """The latest checkpoint. Storage that fails gets `LOAD_PAUSES` to come back: without it nobody can tell whether
    there is one, and to start over would throw away what was paid for. `NoGenerationError` where it does not."""
    for pause in LOAD_PAUSES:
        try:
            return trainer.checkpoints.load_latest()
        except (OSError, CheckpointError) as error:
            _log.warning("no checkpoint can be read (%s); trying again in %.1f s", error, pause)
            time.sleep(pause)
    try:
        return trainer.checkpoints.load_latest()
    except (OSError, CheckpointError) as error:
        raise NoGenerationError(f"the checkpoints in {trainer.rundir.uri} cannot be read: {error}") from error


def _report_membership(
    trainer: DistributedTrainer, old: Generation | None, new: Generation, seconds: float
) -> None:  # fmt: skip
    assert trainer.reporter is not None
    before = {seat.member: seat.node for seat in old.members} if old else {}
    now = {seat.member: seat.node for seat in new.members}
    fields: dict[str, Any] = {
        "world_size": len(new.members),
        "nodes": sorted(set(now.values())),
        "joined": sorted(node for member, node in now.items() if member not in before),
        "lost": sorted(node for member, node in before.items() if member not in now),
        "topology": trainer.world.topology,
        "reason": new.reason,
        "attempt": new.attempt,
        "step": trainer.progress.step,
        "seconds": seconds,
    }
    trainer.reporter.emit("membership", **fields)
    if old is None or old.rank_of(new.members[0].member) == 0:
        return
    if not trainer.recent_steps:
        return
    # This process has just become rank 0: what the one before had no time to write is written now.
    written = trainer.rundir.steps_reported(trainer.recent_steps[0]["step"])
    for item in trainer.recent_steps:
        if item["step"] not in written:
            trainer.reporter.emit("step", **item)
