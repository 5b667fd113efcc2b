"""The end of a training: the best weights, proven equal on all ranks, judged and written."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from trainer.comm.group import GroupError
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.recovery import best_pointer
from trainer.engine.result import write_result
from trainer.engine.step import digest
from trainer.evaluation.evaluate import EVAL_BATCH, final_report

if TYPE_CHECKING:
    from trainer.engine.trainer import DistributedTrainer

WEIGHTS, MODEL = "model/weights.pt", "model/model.json"


def finish(trainer: DistributedTrainer) -> dict[str, Any]:
    """Judge and write the best model; what goes into ``result.json``. A collective, which can be done again after a
    `GroupError`: the state of training is left as it was."""
    assert trainer.state is not None
    assert trainer.reporter is not None
    trainer.faults.reach("finish", trainer.progress.step)
    trainer.settle_buffers()
    module, last = trainer.state.module, None
    if trainer.state.best is not None:  # else no validation loss was ever finite
        last = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.load_state_dict(trainer.state.best)
    world = trainer.world
    try:
        digests = [str(value) for value in world.gather(digest(list(module.state_dict().items())))]
        odd = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if odd:
            raise RuntimeError(f"the final weights of ranks {odd} differ from rank 0's: they must not be used")
        report = final_report(
            module, trainer.criterion, trainer.shards, world, trainer.device, trainer.rundir, EVAL_BATCH
        )
        if world.rank == 0:
            if trainer.elastic is not None:
                trainer.elastic.require_current()
            _write_model(trainer, digests[0])
    except GroupError:
        if last is not None:
            module.load_state_dict(last)
        raise
    trainer.phase("finalise")
    best = None
    if world.rank == 0:
        if not trainer.checkpoints.wait(COMMIT_SECONDS):
            trainer.reporter.emit("error", message="the last checkpoint is still being written", fatal=False)
        else:  # of an earlier start, which was killed over its last checkpoint
            trainer.checkpoints.clean_up(world.generation)
        pointer = best_pointer(trainer)
        best = pointer["path"] if pointer["step"] == trainer.progress.best_step else None
    result = _result(trainer, digests[0], report, best)
    trainer.reporter.emit("end", status="succeeded")
    if world.rank == 0:
        trainer.reporter.close()  # MLflow's run is known once the writer is done
        if not write_result(trainer.rundir, result, trainer.launch):
            raise RuntimeError(f"could not write the result to {trainer.rundir.uri}: make room there, and resume")
        if trainer.budget:
            trainer.budget.close()
    world.meet()  # nobody leaves before the result is there: who is left could still write it
    return result


def _result(trainer: DistributedTrainer, weights_sha256: str, report: dict[str, Any], best: str | None) -> dict:
    progress = trainer.progress
    return {
        "status": "succeeded",
        "steps": progress.step,
        "epochs": progress.step / trainer.sampler.steps_per_epoch,
        "early_stopped": progress.early_stopped,
        "best_step": progress.best_step,
        "best_valid_loss": progress.best_loss if math.isfinite(progress.best_loss) else None,
        "test": report["model"],
        "world_size": trainer.world.world_size,
        "backend": trainer.world.backend,
        "device": trainer.device.type,
        "samples_seen": progress.samples_seen,
        "train_samples": trainer.shards.count("train"),
        "consumed": [asdict(item) for item in progress.consumed],
        "train_seconds": trainer.seconds["training"],
        "phase_seconds": trainer.seconds,
        "weights_sha256": weights_sha256,
        "weights_equal_on_ranks": True,
        "checkpoint": best,
    }


def _write_model(trainer: DistributedTrainer, weights_sha256: str) -> None:
    """What serving needs: the weights, and how to build the module that they fit."""
    assert trainer.state is not None
    buffer = io.BytesIO()
    torch.save(trainer.state.module.state_dict(), buffer)
    data = buffer.getvalue()
    trainer.rundir.storage.write(WEIGHTS, data)
    description = {
        "model": asdict(trainer.job.model),
        "loss": asdict(trainer.job.loss),
        "spec": asdict(trainer.shards.spec),
        "weights_sha256": weights_sha256,
        "file_sha256": hashlib.sha256(data).hexdigest(),
    }
    trainer.rundir.write_json(MODEL, description)
