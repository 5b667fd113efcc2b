"""`KerasTraining`: the loop that trains a Keras model, from the latest checkpoint to the report.

The order of things belongs here: steps, evaluations, checkpoints, the end. What TensorFlow computes is
`trainer.tensorflow.replica`; what users call is `trainer.tensorflow.face`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.manager import CheckpointError, CheckpointManager, check_fits
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import ConfigError, JobConfig
from trainer.data.batches import Batch
from trainer.data.dataset_data import DatasetData
from trainer.data.loader import BatchLoader
from trainer.data.sampler import micro_batch_seed
from trainer.engine.budget import COMMIT_SECONDS
from trainer.engine.lr_schedule import learning_rate
from trainer.engine.reports import RankReports, Watch
from trainer.engine.signals import Stopped
from trainer.engine.state import Progress, describe_changes, read_progress, take_up
from trainer.engine.step import NonFiniteError
from trainer.engine.workload import count_steps, make_sampler, needs_evaluation
from trainer.evaluation.evaluate import SharedWork
from trainer.observability.reporter import StepWindow
from trainer.rundir import EVALUATION, MODEL, RunDir
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer
from trainer.tensorflow.replica import Replica

CPU = torch.device("cpu")
"""Where samples are read; TensorFlow takes them from there."""
WEIGHTS = "model/model.weights.h5"
"""The weights of the trained model, for ``keras.Model.load_weights``."""
State = dict[str, Any]


class KerasTraining:
    """One training in this rank, together with its peers. All ranks call `train`."""

    def __init__(
        self, job: JobConfig, replica: Replica, data: DatasetData, facts: RankFacts, fingerprint: str,
        parts: Mapping[str, Any], watch: Watch | None = None,
    ) -> None:  # fmt: skip
        """``fingerprint`` and ``parts``: what its checkpoints belong to (`trainer.checkpoint.manager`)."""
        self.job, self.config, self.replica, self.data, self.facts = job, job.training, replica, data, facts
        self.rundir, self.fingerprint = RunDir(job.run_dir), fingerprint
        self.reports = RankReports(job, self.rundir, watch)
        self.faults = Faults(os.environ, facts.node_rank)
        self.sampler = make_sampler(self.config, data.count("train"), facts.rank, facts.world_size)
        measure = {"the validation samples": data.name_split("valid")}
        self.progress = Progress(settings=asdict(self.config), measure=measure)
        self.total_steps = count_steps(self.config, self.sampler, self.progress)
        self.best: State | None = None
        self.saved_step = 0
        self.window = StepWindow()
        self._world = World(facts, CPU, "gloo")  # of this process alone: TensorFlow knows the others
        self._checkpoints = CheckpointManager(
            self.rundir, self.config.keep_checkpoints, fingerprint, self.reports.emit, parts
        )
        self._is_asked_to_stop = False
        self._old_handler: Any = None
        self._generation = 1

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or early stopping has ended the training."""
        return self.progress.step >= self.total_steps or self.progress.early_stopped

    def train(self) -> dict[str, Any]:
        """Train from the latest checkpoint to the end, and return the fields of ``result.json``. A collective. Raise
        `ConfigError` for what cannot be trained, `Stopped` when asked to end, and one of
        `trainer.tensorflow.replica.LOST` when a peer is lost."""
        self._try_task()
        self._begin()
        reader = self.data.make_reader(CPU, self.config.prefetch_batches)
        loader = BatchLoader(reader, self.sampler, CPU, self.faults, StepTimer(False, CPU))
        self._catch_up()
        while not self.is_over:
            epoch, offset = self.progress.position(self.sampler.samples)
            self.window = StepWindow()
            for batch in loader.batches(epoch, offset, self.progress.step):
                self._step(batch, epoch)
                if self.is_over:
                    break
            self.reports.end_phase("training")
        loader.close()
        return self._finish()

    def close(self, tracking_seconds: float = 60.0) -> None:
        """End all threads; all reports are on disk afterwards."""
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
        self.data.close()
        self._checkpoints.close(5.0)
        self.reports.close(tracking_seconds)

    # The beginning

    def _try_task(self) -> None:
        """Judge the first samples. Raise `ConfigError` for a loss or a metric that is not one figure per sample; errors
        of the caller's own code are raised as they are."""
        positions = np.arange(min(2, self.data.count("train")), dtype=np.int64)
        self.replica.judge(*split_pair(self.data.read("train", positions, CPU)))

    def _begin(self) -> None:
        """Agree with the others on what is trained, load the checkpoint, and report from now on. A collective. Raise
        `ConfigError` on all ranks unless they train on the same samples."""
        mine = int(self.fingerprint[:15], 16)
        for rank, found in enumerate(self.replica.gather(self.facts, mine)):
            if found != mine:
                raise ConfigError(
                    f"rank {rank} has different training data or a different model than rank {self.facts.rank}: all "
                    "ranks must read the same samples in the same order. Data that differ from process to process "
                    "need one seed"
                )
        [self._generation, *_] = self.replica.gather(self.facts, self.rundir.last_generation() + 1)
        if self.facts.rank == 0:
            self.reports.enter_world(replace(self._world, generation=self._generation))
            self.reports.wait_until_open()
            self._checkpoints.fence(self._generation)
        if self.config.resume:
            self._resume()
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self.reports.end_phase("startup")

    def _resume(self) -> None:
        """Load the latest checkpoint, the same on all ranks. Raise `ConfigError` for one of another training."""
        found = self._checkpoints.load_latest()
        steps = self.replica.gather(self.facts, found[1]["progress"]["step"] if found else 0)
        if len(set(steps)) > 1:
            raise CheckpointError(f"the ranks found checkpoints of steps {steps}: they do not share one run directory")
        if found is None:
            return
        folder, state = found
        changes = describe_changes(state, self.progress)
        take_up(state, self.progress)
        check_fits(state["model"], self.replica.weights_by_name())
        self.progress = read_progress(state["progress"])
        self.total_steps = count_steps(self.config, self.sampler, self.progress)
        self.replica.load(state["model"])
        self.replica.load_optimizer(state["optimizer"])
        self.best = state.get("best")
        if self.best is None and self.progress.best_step == self.progress.step > 0:
            self.best = self.replica.weights_by_name()
        self.saved_step = self.progress.step
        self.reports.emit("resume", path=folder, step=self.progress.step, changes=changes)

    def _on_sigterm(self, *_: object) -> None:
        self._is_asked_to_stop = True  # the others are told in the next step

    # A step

    def _step(self, batch: Batch, epoch: int) -> None:
        """Train on one global batch, and do what is due after it. A collective."""
        step = self.progress.step
        self.reports.watchdog.progress(step)
        rate = learning_rate(self.config, step, self.total_steps)
        gradient, loss_sum = None, 0.0
        for part in batch.micro_batches:
            self.faults.reach("forward", step)
            inputs, target = split_pair(part.data)
            seed = micro_batch_seed(self.config.seed, step, part.number)
            loss, found = self.replica.differentiate(inputs, target, batch.samples, seed)
            gradient = found if gradient is None else gradient + found
            loss_sum += loss
        counts = [int(not math.isfinite(loss_sum)), int(self._is_asked_to_stop), batch.local_samples, batch.digest]
        broken, leaving, samples, digest = self.replica.sum_integers(counts)
        norm = math.nan
        if not broken:
            self.faults.reach("optimizer", step)
            norm = self.replica.update(self.replica.sum(gradient), rate)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the loss or its gradient is not finite at step {step + 1} (learning rate {rate:.3g}): lower "
                "training.learning_rate, raise training.warmup_steps, set training.clip_norm, or look for extreme "
                "values in the data; the last checkpoint is untouched"
            )
        if samples != batch.samples:
            raise RuntimeError(f"the ranks used {samples} samples of a batch of {batch.samples}: they disagree")
        self.progress.commit(epoch, batch.samples, digest)
        self.window.add(loss_sum, batch.local_samples)
        if self.progress.step % self.config.log_frequency == 0 or self.progress.step == self.total_steps:
            self._report_step(epoch, rate, norm)
        paused_at = time.monotonic()
        self._catch_up()
        self.window.began += time.monotonic() - paused_at
        if leaving:
            self._checkpoints.wait(COMMIT_SECONDS)
            if self.saved_step < self.progress.step:
                self._save()
            self._checkpoints.wait(COMMIT_SECONDS)
            self.replica.gather(self.facts, 0)  # none ends before the checkpoint is written
            raise Stopped(everybody=True)

    def _report_step(self, epoch: int, rate: float, norm: float) -> None:
        window, self.window = self.window, StepWindow()
        loss_sum, samples = self.replica.sum_floats([window.loss_sum, window.samples])
        seconds = (self.window.began - window.began) / window.steps
        step = self.progress.step
        self.reports.emit(
            "step", step=step, epoch=epoch, loss=loss_sum / samples, learning_rate=rate, grad_norm=norm,
            samples_per_second=samples / (seconds * window.steps), step_seconds=seconds,
            eta_seconds=seconds * (self.total_steps - step),
        )  # fmt: skip

    def _catch_up(self) -> None:
        """Do what is due after the steps done so far: evaluation, checkpoint. A collective."""
        config, progress, step = self.config, self.progress, self.progress.step
        is_due = needs_evaluation(config, self.sampler.samples, progress, self.total_steps)
        if is_due and self.data.count("valid"):
            self._validate()
        if step and (step % config.checkpoint_frequency == 0 or self.is_over) and self.saved_step < step:
            self._save()

    def _validate(self) -> None:
        self.reports.end_phase("training")
        began, progress = time.monotonic(), self.progress
        found = self._judge("valid")
        loss, seconds = found.pop("loss"), time.monotonic() - began
        self.reports.emit("evaluation", step=progress.step, split="valid", loss=loss, metrics=found, seconds=seconds)
        self.reports.end_phase("evaluation")
        progress.evaluated_step = progress.step
        if progress.note_evaluation(loss, self.config.early_stopping_patience):
            self.best = self.replica.weights_by_name()
            self._save(is_best=True)

    def _judge(self, split: str) -> dict[str, float]:
        """Return the means of loss and metrics over a split, each sample once. A collective."""
        count, size = self.data.count(split), self.config.batch_size_per_gpu
        work = SharedWork()
        work.rank, work.size = self.facts.rank, self.facts.world_size
        first, last = work.part(count, size)
        sums = dict.fromkeys(["loss", *sorted(self.replica.metrics)], 0.0)
        parts = [np.arange(start, min(start + size, last)) for start in range(first, last, size)]
        for data in self.data.read_each(split, parts, CPU):
            for name, value in self.replica.judge(*split_pair(data)).items():
                sums[name] += value
        totals = self.replica.sum_floats(list(sums.values()))
        return {name: value / count for name, value in zip(sums, totals, strict=True)}

    def _save(self, is_best: bool = False) -> None:
        """Have rank 0 save a checkpoint, written in the background. If two others are still being written, this one is
        left out, unless it is the best or the last."""
        self.reports.end_phase("training")
        if self.facts.rank == 0:
            if is_best or self.is_over:
                self._checkpoints.wait(COMMIT_SECONDS)
            self.faults.reach("save", self.progress.step)
            state: State = {
                "model": self.replica.weights_by_name(),
                "optimizer": self.replica.optimizer_state(),
                "progress": asdict(self.progress),
            }
            if self.best is not None and self.progress.best_step != self.progress.step:
                state["best"] = self.best
            if self._checkpoints.save(state, self.progress.step, self._generation, is_best, self.is_over):
                self.saved_step = self.progress.step
        self.reports.end_phase("checkpoint")

    # The end

    def _finish(self) -> dict[str, Any]:
        """Evaluate and write the best model, and return the fields of ``result.json``. A collective."""
        if self.best is not None:
            self.replica.load(self.best)
        digest = self.replica.digest()
        if len(set(self.replica.gather(self.facts, int(digest[:15], 16)))) > 1:
            raise RuntimeError("the final weights of the ranks differ: they must not be used")
        report = self._report()
        if self.facts.rank == 0:
            self.reports.emit("finish", stage="model")
            self._write_model(digest)
            if not self._checkpoints.wait(COMMIT_SECONDS):
                self.reports.emit("error", message="the last checkpoint is still being written", fatal=False)
        self.reports.end_phase("finalise")
        progress, phases = self.progress, self.reports.seconds
        return {
            "status": "succeeded", "steps": progress.step, "epochs": progress.epochs(self.sampler.samples),
            "early_stopped": progress.early_stopped, "best_step": progress.best_step,
            "best_valid_loss": progress.best_loss if math.isfinite(progress.best_loss) else None,
            "test": report["model"], "world_size": self.facts.world_size, "backend": "tensorflow",
            "device": self.replica.device, "samples_seen": progress.samples_seen,
            "train_samples": self.data.count("train"), "consumed": [asdict(item) for item in progress.consumed],
            "train_seconds": phases["training"], "phase_seconds": phases, "weights_sha256": digest,
            "weights_equal_on_ranks": True,
        }  # fmt: skip

    def _report(self) -> dict[str, Any]:
        """Judge the model on the test split, or on the validation split where there is none, and write the report. A
        collective. Raise ValueError where the loss is not finite."""
        self.reports.emit("finish", stage="test split")
        split = next((name for name in ("test", "valid") if self.data.count(name)), None)
        report: dict[str, Any] = {"model": {}, "baselines": {}, "notes": ["there is no test or validation split"]}
        if split is not None:
            found = self._judge(split)
            if not math.isfinite(found["loss"]):
                raise ValueError(f"the loss on the {split} split is {found['loss']}: lower training.learning_rate")
            figures = {name: value if math.isfinite(value) else None for name, value in found.items()}
            notes = ["the weights were chosen on this very split: there is no test split"] if split == "valid" else []
            model = {**figures, "samples": self.data.count(split)}
            report = {"model": model, "baselines": {}, "split": split, "notes": notes}
        self.reports.emit("finish", stage="report")
        if self.facts.rank == 0:
            self.rundir.write_json(EVALUATION, report)
        return report

    def _write_model(self, digest: str) -> None:
        """Write the weights as Keras does, and what they are of: the class of the model, its layers as Keras' JSON
        where they can be, and the file's sha256."""
        model = self.replica.model
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.weights.h5"
            model.save_weights(path)
            data = path.read_bytes()
        self.rundir.storage.write(WEIGHTS, data)
        try:
            layers = json.loads(model.to_json())
        except (NotImplementedError, TypeError, ValueError):  # of a class that does not say how it is made
            layers = None
        description = {
            "model": asdict(self.job.model), "loss": asdict(self.job.loss), "keras": layers, "weights_sha256": digest,
            "file_sha256": hashlib.sha256(data).hexdigest(),
        }  # fmt: skip
        self.rundir.write_json(MODEL, description)


def split_pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and target of a batch. Raise `ConfigError` for a batch that is no such pair. Pure."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ConfigError("samples must be pairs (inputs, target), each a tensor or a structure of tensors")
    return batch[0], batch[1]
