"""`DistributedTrainer`: the loop, from the world to the final weights, in the order in which things happen."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint import CheckpointManager
from trainer.config import ConfigError, JobConfig
from trainer.evaluate import evaluate, final_report
from trainer.losses import build_loss
from trainer.metrics import TRACKING, Reporter, StepWindow, sinks_of
from trainer.model import build_model
from trainer.monitor import NodeMonitor
from trainer.profiling import StepProfiler
from trainer.rundir import RESULT, RunDir
from trainer.sampler import Sampler
from trainer.schedule import learning_rate
from trainer.shards import DatasetError, DataShardManager
from trainer.step import Batch, BatchLoader, Step, digest
from trainer.world import join, leave, rank_facts

EVAL_BATCH = 1024
WEIGHTS, MODEL = "model/weights.pt", "model/model.json"


class Stopped(Exception):
    """A rank was asked to end (SIGTERM); a checkpoint has been written."""


@dataclass(slots=True)
class Progress:
    """Where training stands; saved in every checkpoint. Everything else follows from the configuration."""

    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    evaluations_without_improvement: int = 0
    early_stopped: bool = False


class DistributedTrainer:
    """Trains one job in this process, together with its peers."""

    def __init__(self, job: JobConfig) -> None:
        self.job, self.config = job, job.training
        self.rundir = RunDir(job.run_dir)
        self.progress = Progress()
        self.seconds = dict.fromkeys(("startup", "data", "training", "evaluation", "checkpoint", "finalise"), 0.0)
        self._asked_to_stop = False
        self._old_handler: Any = None
        self._mark = time.monotonic()
        self.reporter: Reporter | None = None
        self.monitor: NodeMonitor | None = None

    def initialize_distributed(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Join the peers that the environment names; given arguments must agree with it. Sets ``self.world``."""
        if rank_facts(os.environ, self.config).rank == 0:
            self.rundir.storage.delete(RESULT)  # of an earlier start: from here on, only this one says how it ended
        world = join(self.config)
        for name, given, found in (("WORLD_SIZE", world_size, world.world_size), ("RANK", rank, world.rank)):
            if given is not None and given != found:
                leave(world)
                raise ConfigError(f"{name} is {found} in the environment, but {given} was asked for")
        if threading.current_thread() is threading.main_thread():
            # Only now: before, SIGTERM may end the process as it does any other, for nothing has been done yet.
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        threads = self.config.threads_per_rank
        if threads is None and "OMP_NUM_THREADS" not in os.environ:  # which the launcher knows better than we do
            threads = max(1, (os.cpu_count() or 1) // world.facts.local_world_size)
        if threads is not None:
            torch.set_num_threads(threads)
        generation = 0
        if world.rank == 0:
            generation = int(os.environ.get("DTRAIN_GENERATION") or self.rundir.last_generation() + 1)
        self.world = replace(world, generation=world.from_rank_0(generation))
        sinks = sinks_of(self.job, self.rundir, world.rank)
        self.reporter = Reporter(self.rundir, world.rank, self.world.generation, sinks)
        ranks = world.gather((world.node_rank, os.getpid()))
        if world.facts.local_rank == 0:
            pids = [pid for node, pid in ranks if node == world.node_rank]
            self.monitor = NodeMonitor(world.node_rank, self.reporter, self.config.monitor_interval_seconds, pids)
            self.monitor.start()
        self._phase("startup")

    def setup_data_parallel(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, its gradients averaged over ranks; as it is in a world of one."""
        model = model.to(self.world.device)
        if self.world.world_size == 1:
            return model
        ids = [self.world.device.index] if self.world.device.type == "cuda" else None
        # Looking for unused parameters lets a user's model have some, and keeps the first buckets. Rebuilt ones sum in
        # another order, and then the steps after a resume are not those of a run without one, bit for bit.
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, find_unused_parameters=True)

    def setup(self) -> None:
        """Data, model, optimizer, and the checkpoint to go on from, if there is one."""
        job, world = self.job, self.world
        self.shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in ("train", "valid", "test"):
            if self.shards.count(split) == 0:
                raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
        self.sampler = Sampler(
            samples=self.shards.count("train"),
            global_batch_size=self.config.global_batch_size,
            micro_batches=self.config.micro_batches,
            seed=self.config.seed,
            rank=world.rank,
            world_size=world.world_size,
        )
        self.loader = BatchLoader(self.shards, self.sampler, world)
        self.total_steps = self.config.epochs * self.sampler.steps_per_epoch
        if self.config.max_steps is not None:
            self.total_steps = min(self.total_steps, self.config.max_steps)
        self._phase("data")
        torch.manual_seed(self.config.seed)
        self.criterion = build_loss(job.loss, self.shards.spec).to(world.device)
        bare = build_model(job.model, self.shards.spec, int(self.criterion.outputs))  # type: ignore[arg-type]
        self.world.meet()  # one may have unpacked the data or made its model for minutes
        self.model = self.setup_data_parallel(bare)
        self.step = Step(self.model, self.criterion, self.config, world)
        self.checkpoints = CheckpointManager(self.rundir, self.config.keep_checkpoints, self._fingerprint())
        if self.config.resume:
            self._resume()
        self._phase("startup")

    def train(self) -> dict[str, Any]:
        """The whole training; what goes into ``result.json``. Raises `Stopped` when asked to end."""
        [stop] = self.world.any(self._asked_to_stop)
        if stop:  # while setting up: there is nothing to save yet
            raise Stopped
        self.profiler = StepProfiler(self.config.profile_steps, self.rundir, self.world.rank, self.world.device)
        self.window = StepWindow()
        while self.progress.step < self.total_steps and not self.progress.early_stopped:
            epoch, first_step = divmod(self.progress.step, self.sampler.steps_per_epoch)
            self.train_epoch(self.loader.batches(epoch, first_step), epoch)
        self.profiler.close()
        return self._finish()

    def train_epoch(self, dataloader: Iterable[Batch], epoch: int = 0) -> dict[str, float]:
        """Train on the batches of (the rest of) an epoch; the mean loss over them and all ranks."""
        self.model.train()
        totals = {"loss_sum": 0.0, "samples": 0.0}
        for batch in dataloader:
            rate = learning_rate(self.config, self.progress.step, self.total_steps)
            result = self.step(batch, self.progress.step, rate, self._asked_to_stop)
            self.profiler.step()
            self.progress.step += 1
            self.progress.samples_seen += batch.samples
            totals["loss_sum"] += result.loss_sum
            totals["samples"] += batch.local_samples
            self.window.add(result.loss_sum, batch.local_samples)
            if self.monitor:
                local = self.world.facts.local_world_size * batch.local_samples
                self.monitor.update(epoch, self.progress.step, result.loss_sum / batch.local_samples, local)
            last = self.progress.step == self.total_steps
            if self.progress.step % self.config.log_frequency == 0 or last:
                self._report_step(epoch, rate, result.grad_norm)
            paused_at = time.monotonic()
            if self._evaluation_is_due():
                self._validate()
            if self.progress.step % self.config.checkpoint_frequency == 0 or last:
                self._save()
            self.window.began += time.monotonic() - paused_at  # that is no part of a step's time
            if result.stop:
                self._save()
                raise Stopped
            if last or self.progress.early_stopped:
                break
        self._phase("training")
        return self.synchronize_metrics(totals)

    def synchronize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums over ranks; with ``loss_sum`` and ``samples`` among them, their ratio as ``loss``."""
        names = sorted(metrics)
        values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=self.world.device)
        result = dict(zip(names, self.world.sum(values).tolist(), strict=True))
        if result.get("samples"):
            result["loss"] = result["loss_sum"] / result["samples"]
        return result

    def close(self, tracking_seconds: float = 60.0) -> None:
        """Stop the threads and leave the group; what was reported is on disk afterwards."""
        if hasattr(self, "loader"):
            self.loader.close()
        if self.monitor:
            self.monitor.stop()
        if self.reporter:
            self.reporter.close(tracking_seconds)
        if hasattr(self, "world"):
            leave(self.world)
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    # The rest serves the methods above, in the order of their use.

    def _on_sigterm(self, *_: object) -> None:
        self._asked_to_stop = True  # no more here: the ranks agree at the next step

    def _phase(self, name: str) -> None:
        """Book the time since the last mark on a phase, and say so."""
        now = time.monotonic()
        self.seconds[name] += now - self._mark
        self._mark = now
        if self.reporter:
            self.reporter.emit("phase", name=name, seconds=round(self.seconds[name], 3))

    def _fingerprint(self) -> str:
        what = [self.shards.spec.dataset_id, asdict(self.job.model), asdict(self.job.loss)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _bare(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def _resume(self) -> None:
        found = self.checkpoints.load_latest()
        steps = self.world.gather(found[1]["progress"]["step"] if found else 0)
        if len(set(map(str, steps))) > 1:
            raise ConfigError(f"ranks see different checkpoints in {self.rundir.uri} (steps {steps}): is it shared?")
        if found is None:
            return
        folder, state = found
        self._bare.load_state_dict(state["model"])
        self.step.load_state_dict(state["step"])
        self.progress = Progress(**state["progress"])
        assert self.reporter
        self.reporter.emit("resume", path=folder, step=self.progress.step)

    def _report_step(self, epoch: int, rate: float, norm: float) -> None:
        """A ``step`` event with means since the one before; the sum over ranks is a collective."""
        window, self.window = self.window, StepWindow()
        done = self.synchronize_metrics({"loss_sum": window.loss_sum, "samples": window.samples})
        seconds = (self.window.began - window.began) / window.steps
        if self.world.rank == 0 and self.reporter:
            self.reporter.emit(
                "step",
                step=self.progress.step,
                epoch=epoch,
                loss=done["loss"],
                learning_rate=rate,
                grad_norm=norm,
                samples_per_second=done["samples"] / (seconds * window.steps),
                step_seconds=seconds,
                eta_seconds=seconds * (self.total_steps - self.progress.step),
            )

    def _evaluation_is_due(self) -> bool:
        frequency = self.config.eval_frequency or self.sampler.steps_per_epoch
        return self.progress.step % frequency == 0 or self.progress.step == self.total_steps

    def _validate(self) -> None:
        """Judge the validation split; keep the best model, count towards early stopping."""
        self._phase("training")
        began = time.monotonic()
        result = evaluate(self._bare, self.criterion, self.shards, "valid", self.world, EVAL_BATCH, self.world.device)
        if self.world.rank == 0 and self.reporter:
            self.reporter.emit(
                "evaluation", step=self.progress.step, split="valid", loss=result.loss, metrics=result.metrics,
                seconds=time.monotonic() - began,
            )  # fmt: skip
        self._phase("evaluation")
        progress = self.progress
        if result.loss < progress.best_loss:
            progress.best_loss, progress.best_step = result.loss, progress.step
            progress.evaluations_without_improvement = 0
            self._save(is_best=True)
        else:
            progress.evaluations_without_improvement += 1
            patience = self.config.early_stopping_patience
            progress.early_stopped = patience is not None and progress.evaluations_without_improvement >= patience

    def _save(self, is_best: bool = False) -> None:
        """A checkpoint by rank 0, on disk for all ranks when this returns."""
        self._phase("training")
        if self.world.rank == 0:
            began = time.monotonic()
            state = {
                "model": self._bare.state_dict(),
                "step": self.step.state_dict(),
                "progress": asdict(self.progress),
            }
            folder = self.checkpoints.save(state, self.progress.step, self.world.generation, is_best)
            assert self.reporter
            self.reporter.emit(
                "checkpoint", step=self.progress.step, path=folder, seconds=time.monotonic() - began, is_best=is_best
            )
        self.world.meet()
        self._phase("checkpoint")

    def _finish(self) -> dict[str, Any]:
        """The best model, proven equal on all ranks, judged and written."""
        best = None
        if self.progress.best_step:  # else no validation loss was ever finite
            best, state = self.checkpoints.load_best()
            self._bare.load_state_dict(state["model"])
        digests = [str(value) for value in self.world.gather(digest(list(self._bare.state_dict().items())))]
        odd = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if odd:
            raise RuntimeError(f"the final weights of ranks {odd} differ from rank 0's: they must not be used")
        report = final_report(
            self._bare, self.criterion, self.shards, self.world, self.world.device, self.rundir, EVAL_BATCH
        )
        if self.world.rank == 0:
            self._write_model(digests[0])
        self._phase("finalise")
        return {
            "status": "succeeded",
            "steps": self.progress.step,
            "epochs": self.progress.step / self.sampler.steps_per_epoch,
            "early_stopped": self.progress.early_stopped,
            "best_step": self.progress.best_step,
            "best_valid_loss": self.progress.best_loss if math.isfinite(self.progress.best_loss) else None,
            "test": report["model"],
            "world_size": self.world.world_size,
            "backend": self.world.backend,
            "device": self.world.device.type,
            "samples_seen": self.progress.samples_seen,
            "train_seconds": self.seconds["training"],
            "phase_seconds": self.seconds,
            "weights_sha256": digests[0],
            "weights_equal_on_ranks": True,
            "checkpoint": best,
        }

    def _write_model(self, weights_sha256: str) -> None:
        """What serving needs: the weights, and how to build the module that they fit."""
        buffer = io.BytesIO()
        torch.save(self._bare.state_dict(), buffer)
        data = buffer.getvalue()
        self.rundir.storage.write(WEIGHTS, data)
        description = {
            "model": asdict(self.job.model),
            "loss": asdict(self.job.loss),
            "spec": asdict(self.shards.spec),
            "weights_sha256": weights_sha256,
            "file_sha256": hashlib.sha256(data).hexdigest(),
        }
        self.rundir.write_json(MODEL, description)


def run_job(job: JobConfig) -> int:
    """Train the job in this process; the exit code. How it ended is in ``result.json``."""
    trainer = DistributedTrainer(job)
    result: dict[str, Any]
    try:
        trainer.initialize_distributed()
        trainer.setup()
        code, result = 0, trainer.train()
    except Stopped:
        code, result = 143, {"status": "stopped", "steps": trainer.progress.step}
    except (ConfigError, DatasetError) as error:
        code, result = 2, {"status": "failed", "error": str(error)}
    except (Exception, KeyboardInterrupt) as error:
        code, result = 1, {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    if trainer.reporter:
        if "error" in result:
            trainer.reporter.emit("error", message=result["error"], fatal=True)
        trainer.reporter.emit("end", status=result["status"])
    if "error" in result:
        print(result["error"], file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
        # Before the group is left: peers fail of that, later, and what failed first is the cause.
        _write_result(trainer.rundir, result)
    trainer.close(tracking_seconds=60.0 if code == 0 else 5.0)
    if "error" not in result and trainer.world.rank == 0:
        written = _write_result(trainer.rundir, result)  # MLflow's run is known once the writer is done
        code = code if written else 1
    return code


def _write_result(rundir: RunDir, result: dict[str, Any]) -> bool:
    """Write ``result.json`` unless a rank has: the first to fail says why. False if it cannot be written."""
    try:
        tracking = rundir.read_json(TRACKING) or {}
        text = json.dumps({**result, "mlflow_run_id": tracking.get("mlflow_run_id")}, indent=2, allow_nan=False)
        rundir.storage.create(RESULT, text.encode())
    except FileExistsError:
        pass
    except OSError as error:
        print(f"could not write {rundir.uri}/{RESULT}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return False
    return True
