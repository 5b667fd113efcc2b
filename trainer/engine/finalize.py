"""The end of a training: the best weights are proven equal on all ranks, evaluated and written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer.checkpoint.files import write_file
from trainer.comm.group import GroupError
from trainer.documents.schemas import FinishStage
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.joining import best_pointer
from trainer.engine.module_state import digest_state_dict
from trainer.engine.result import write_result
from trainer.engine.session import Session
from trainer.engine.workload import most_samples
from trainer.rundir import MODEL, WEIGHTS


def finalize(session: Session) -> dict[str, Any]:
    """Evaluate and write the best model, and return the fields of ``result.json``, and this process's ``rank``. This is
    a collective, which can be done again after a `GroupError`: the state of training is left as it was.

    Where the cluster releases a node that ends (`trainer.runtime.launch.Launch`), ranks other than 0 return
    once they have nothing more to do; rank 0 then writes alone what is left."""
    session.faults.reach("finish", session.progress.step)
    session.workload.settle_buffers()
    world = session.world
    go_back = session.state.hold_best(world)
    try:
        weights = session.state.module.state_dict()
        digests = [str(value) for value in world.all_gather_object(digest_state_dict(weights))]
        odd = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if odd:
            raise RuntimeError(f"the final weights of ranks {odd} differ from rank 0's: they must not be used")
        begin = partial(_begin_stage, session)
        report = session.problem.judge.report(session.judge_request(), session.rundir, begin)
        _begin_stage(session, "model")
        is_alone = _release_others(session)
        if world.rank == 0:
            if is_alone:
                session.faults.reach("alone", session.progress.step)
            if session.elastic is not None:
                session.elastic.require_current()
            _write_model(session, digests[0], report.get("correction", {}))
    except GroupError:
        go_back()
        raise
    session.reports.end_phase("finalise")
    best = None
    if world.rank == 0:
        if not session.checkpoints.wait(COMMIT_SECONDS):
            session.reports.emit("error", message="the last checkpoint is still being written", fatal=False)
        else:  # an earlier start was killed while it wrote its last checkpoint
            session.checkpoints.clean_up(world.generation)
        pointer = best_pointer(session.rundir)
        best = pointer["path"] if pointer["step"] == session.progress.best_step else None
    result = _result(session, digests[0], report, best)
    session.reports.emit("end", status="succeeded")
    if world.rank == 0:
        session.reports.close_reporter()  # MLflow's run is known once the writer is done
        if not write_result(session.rundir, result, session.launch):
            raise RuntimeError(f"could not write the result to {session.rundir.uri}: make room there, and resume")
        session.budget.close()
    if not is_alone:
        world.barrier()  # until the result is written: if a rank fails, those that are left can still write it
    return {**result, "rank": world.rank}


def _begin_stage(session: Session, stage: FinishStage) -> None:
    if session.world.rank == 0:
        session.reports.emit("finish", stage=stage)


def _release_others(session: Session) -> bool:
    """Return whether rank 0 does the rest alone, so that the others leave and are not paid for any longer: where the
    cluster releases them, and the last checkpoint is in storage, from which another node could go on if rank 0 was
    lost. A collective."""
    world, elastic = session.world, session.elastic
    if world.world_size == 1 or elastic is None or not session.participant.leaves_when_done:
        return False
    is_kept = False
    if world.rank == 0:
        session.checkpoints.wait(COMMIT_SECONDS)
        is_kept = session.checkpoints.committed_step() == session.progress.step
    world.barrier()
    elastic.let_others_leave()  # before they are told: the first to be told ends at once
    is_alone = world.all_gather_object(is_kept)[0]
    if not is_alone:
        elastic.let_others_leave(False)
    return is_alone


def _result(session: Session, weights_sha256: str, report: dict[str, Any], best: str | None) -> dict:
    progress = session.progress
    return {
        "status": "succeeded",
        "steps": progress.step,
        "epochs": progress.epochs(session.workload.sampler.samples),
        "early_stopped": progress.early_stopped,
        "best_step": progress.best_step,
        "best_valid_loss": progress.best_loss if math.isfinite(progress.best_loss) else None,
        "best_score": progress.best_score,
        "test": report["model"],
        "world_size": session.world.world_size,
        "backend": session.world.backend,
        "device": session.device.type,
        "open_traffic": session.world.open_traffic,
        "samples_seen": progress.samples_seen,
        "train_samples": most_samples(session.config, session.problem.data),
        "consumed": [item.record() for item in progress.consumed],
        "train_seconds": session.reports.seconds["training"],
        "phase_seconds": session.reports.seconds,
        "weights_sha256": weights_sha256,
        "weights_equal_on_ranks": True,
        "checkpoint": best,
    }


def _write_model(session: Session, weights_sha256: str, correction: Mapping[str, float]) -> None:
    """Write what serving needs: the weights, and how to build the module that they fit. ``correction``: arguments of
    the loss that were found after the training."""
    written = write_file(session.rundir.storage, WEIGHTS, session.state.module.state_dict())
    description = {
        **session.problem.description,
        **({"correction": dict(correction)} if correction else {}),
        "weights_sha256": weights_sha256,
        "file_sha256": written["sha256"],
    }
    session.rundir.write_json(MODEL, description)
