"""`DistributedTrainer`: the loop, from the world to the final weights, in the order in which things happen.

A step, an evaluation or the end may fail because a node is lost, at any point. `DistributedTrainer.train` then regroups
and goes on where the furthest survivor stands: everything the loop does can be done again without harm.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from trainer.checkpoint import BEST, CheckpointError, CheckpointManager
from trainer.config import ConfigError, JobConfig
from trainer.elastic import Elastic
from trainer.evaluate import evaluate, final_report
from trainer.faults import Faults
from trainer.group import GroupError
from trainer.losses import build_loss
from trainer.memory import Fit, is_out_of_memory, smaller
from trainer.metrics import Reporter, StepWindow, sinks_of
from trainer.model import build_model
from trainer.monitor import NodeMonitor
from trainer.outcome import OutOfMemoryError, Regroup, Stopped, raise_if_ended, write_result
from trainer.profiling import StepProfiler
from trainer.rundir import RESULT, RunDir
from trainer.sampler import Sampler
from trainer.schedule import learning_rate
from trainer.shards import DatasetError, DataShardManager
from trainer.state import Progress, TrainingState
from trainer.step import Batch, BatchLoader, Step, StepResult, Votes, digest
from trainer.world import choose_device, join, rank_facts

EVAL_BATCH = 1024
WEIGHTS, MODEL = "model/weights.pt", "model/model.json"
COMMIT_SECONDS = 60.0
"""How long the end of a training waits for the last checkpoint."""


class DistributedTrainer:
    """Trains one job in this process, together with its peers."""

    def __init__(self, job: JobConfig) -> None:
        self.job, self.config = job, job.training
        self.rundir = RunDir(job.run_dir)
        self.seconds = dict.fromkeys(("startup", "data", "training", "evaluation", "checkpoint", "finalise"), 0.0)
        self._asked_to_stop = False
        self._old_handler: Any = None
        self._mark = time.monotonic()
        self._saved_step = 0
        self._recent_steps: deque[dict[str, Any]] = deque(maxlen=64)
        self._cut_off = 0
        self.elastic: Elastic | None = None
        self.reporter: Reporter | None = None
        self.monitor: NodeMonitor | None = None
        self.state: TrainingState | None = None

    @property
    def progress(self) -> Progress:
        return self.state.progress if self.state else Progress()

    def initialize_distributed(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Find out who this process is and, in a world of fixed ranks, join the peers that the environment names.

        On a cluster (DTRAIN_LAUNCH in the environment) the process only says that it is coming: the first generation
        is formed when its data and model are there, in `setup`. Given arguments must agree with the environment.
        """
        facts = rank_facts(os.environ, self.config)
        for name, given, found in (("WORLD_SIZE", world_size, facts.world_size), ("RANK", rank, facts.rank)):
            if given is not None and given != found:
                raise ConfigError(f"{name} is {found} in the environment, but {given} was asked for")
        self.facts, self.faults = facts, Faults(os.environ, facts.node_rank)
        self.device, _ = choose_device(facts, self.config.backend)
        if "DTRAIN_LAUNCH" in os.environ and self.config.regroup:
            self.elastic = Elastic(self.rundir, self.config, facts, self.device, os.environ, self.job.job_id)
            self.elastic.announce()
        else:
            if facts.rank == 0:
                self.rundir.storage.delete(RESULT)  # of an earlier start: only this one says how it ended
            self.world = join(self.config)
        if threading.current_thread() is threading.main_thread():
            # Only now: before, SIGTERM may end the process as it does any other, for nothing has been done yet.
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        threads = self.config.threads_per_rank
        if threads is None and "OMP_NUM_THREADS" not in os.environ:  # which the launcher knows better than we do
            threads = max(1, (os.cpu_count() or 1) // facts.local_world_size)
        if threads is not None:
            torch.set_num_threads(threads)
        if self.elastic is None:
            [generation, *_] = self.world.gather(self.rundir.last_generation() + 1)
            self.world = replace(self.world, generation=generation)
            self._report_as_this_rank()
        self._phase("startup")

    def setup_data_parallel(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, its gradients summed over ranks; as it is in a world of one."""
        step = Step(model.to(self.device), self.criterion, self.config, self.device, self.faults)
        step.adopt(self.world)
        return step.model

    def setup(self) -> None:
        """Data, model, optimizer, the first generation, and the checkpoint to go on from, if there is one."""
        job = self.job
        self.shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in ("train", "valid", "test"):
            if self.shards.count(split) == 0:
                raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
        self._deal(0, 1 if self.elastic else self.world.world_size)
        self.total_steps = self.config.epochs * self.sampler.steps_per_epoch
        if self.config.max_steps is not None:
            self.total_steps = min(self.total_steps, self.config.max_steps)
        self._phase("data")
        torch.manual_seed(self.config.seed)
        self.criterion = build_loss(job.loss, self.shards.spec).to(self.device)
        module = build_model(job.model, self.shards.spec, int(self.criterion.outputs)).to(self.device)  # type: ignore[arg-type]
        self.step = Step(module, self.criterion, self.config, self.device, self.faults)
        self.state = TrainingState(module, self.step)
        self.checkpoints = CheckpointManager(
            self.rundir, self.config.keep_checkpoints, self._fingerprint(), self._report_checkpoint
        )
        self.profiler = StepProfiler(self.config.profile_steps, self.rundir, self.facts.rank, self.device)
        self.window = StepWindow()
        if self.elastic is None:
            self.world.meet()  # one may have unpacked the data or made its model for minutes
            self._enter(source=0, from_checkpoint=self.config.resume)
        else:
            self._until_formed(lambda: self._regroup("start"))
        self._phase("startup")

    def train(self) -> dict[str, Any]:
        """The whole training, through losses of nodes; what goes into ``result.json``. Raises `Stopped` when asked to
        end, `trainer.group.GroupError` when a node is lost in a world that cannot regroup."""
        while True:
            try:
                self._catch_up()
                if not self._is_over():
                    epoch, first_step = divmod(self.progress.step, self.sampler.steps_per_epoch)
                    self.train_epoch(self.loader.batches(epoch, first_step), epoch)
                    continue
                self.profiler.close()
                return self._finish()
            except Regroup as wish:
                self._until_formed(lambda reason=str(wish): self._regroup(reason))
            except GroupError as error:
                self._record(error)
                if self.elastic is None:
                    raise
                self._until_formed(lambda error=error: self._regroup(str(error), error.communication))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._use_less_memory(error)

    def train_epoch(self, dataloader: Iterable[Batch], epoch: int = 0) -> dict[str, float]:
        """Train on the batches of (the rest of) an epoch; the mean loss over them and all ranks."""
        self.step.module.train()
        totals = {"loss_sum": 0.0, "samples": 0.0}
        for batch in dataloader:
            rate = learning_rate(self.config, self.progress.step, self.total_steps)
            result = self.step(batch, self.progress.step, rate, self._votes())
            self.progress.commit(epoch, batch.samples, result.digest)
            self.profiler.step()
            totals["loss_sum"] += result.loss_sum
            totals["samples"] += batch.local_samples
            self.window.add(result.loss_sum, batch.local_samples)
            if self.monitor:
                local = self.facts.local_world_size * batch.local_samples
                self.monitor.update(epoch, self.progress.step, result.loss_sum / batch.local_samples, local)
            if self.progress.step % self.config.log_frequency == 0 or self.progress.step == self.total_steps:
                self._report_step(epoch, rate, result.grad_norm)
            paused_at = time.monotonic()
            self._catch_up()
            self.window.began += time.monotonic() - paused_at  # that is no part of a step's time
            self._heed(result)
            if self._is_over():
                break
        self._phase("training")
        return self.synchronize_metrics(totals)

    def synchronize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums over ranks; with ``loss_sum`` and ``samples`` among them, their ratio as ``loss``."""
        names = sorted(metrics)
        values = self.world.sum(torch.tensor([metrics[name] for name in names], dtype=torch.float64))
        result = dict(zip(names, values.tolist(), strict=True))
        if result.get("samples"):
            result["loss"] = result["loss_sum"] / result["samples"]
        return result

    def close(self, tracking_seconds: float = 60.0) -> None:
        """Stop the threads and leave the group; what was reported is on disk afterwards."""
        if hasattr(self, "loader"):
            self.loader.close()
        if hasattr(self, "checkpoints"):
            self.checkpoints.close(5.0)
        if self.monitor:
            self.monitor.stop()
        if self.reporter:
            self.reporter.close(tracking_seconds)
        if self.elastic:
            self.elastic.leave()
        elif hasattr(self, "world"):
            self.world.leave()
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    # The rest serves the methods above, in the order of their use.

    def _on_sigterm(self, *_: object) -> None:
        self._asked_to_stop = True  # no more here: the ranks hear of it at the next step

    def _phase(self, name: str) -> None:
        """Book the time since the last mark on a phase, and say so."""
        now = time.monotonic()
        self.seconds[name] += now - self._mark
        self._mark = now
        if self.reporter:
            self.reporter.emit("phase", name=name, seconds=round(self.seconds[name], 3))

    def _report_as_this_rank(self) -> None:
        """Report, and watch the node, as what this process is in the present world."""
        world = self.world
        sinks = sinks_of(self.job, self.rundir, world.rank)
        if self.reporter is None:
            self.reporter = Reporter(self.rundir, world.rank, world.generation, sinks)
        else:
            self.reporter.move(world.rank, world.generation, sinks)
        ranks = world.gather((self.facts.node_rank, os.getpid()))
        if self.facts.local_rank == 0 and self.monitor is None:
            pids = [pid for node, pid in ranks if node == self.facts.node_rank]
            interval = self.config.monitor_interval_seconds
            self.monitor = NodeMonitor(self.facts.node_rank, self.reporter, interval, pids)
            self.monitor.start()

    def _deal(self, rank: int, world_size: int) -> None:
        self.sampler = Sampler(
            samples=self.shards.count("train"),
            global_batch_size=self.config.global_batch_size,
            micro_batches=self.config.micro_batches,
            seed=self.config.seed,
            rank=rank,
            world_size=world_size,
        )

    def _fingerprint(self) -> str:
        what = [self.shards.spec.dataset_id, asdict(self.job.model), asdict(self.job.loss)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def _report_checkpoint(self, kind: str, **fields: Any) -> None:
        if self.reporter:
            self.reporter.emit(kind, **fields)

    def _until_formed(self, attempt: Any) -> None:
        """Regroup until a group stands: members may be lost while it forms."""
        while True:
            try:
                return attempt()
            except GroupError as error:
                self._record(error)
                attempt = lambda error=error: self._regroup(str(error), error.communication)  # noqa: E731

    def _regroup(self, reason: str, communication: bool = False) -> None:
        """Agree on who is in, take over the state of the furthest, and be ready for the next step."""
        assert self.elastic and self.state
        began, old = time.monotonic(), self.elastic.generation
        self.faults.reach("regroup", self.progress.step)
        fit = self.step.fit
        whole = fit.chunk >= self.config.batch_size_per_gpu
        self.world = self.elastic.regroup(
            lambda: raise_if_ended(self.rundir, self.elastic.launch, self._asked_to_stop),  # type: ignore[union-attr]
            step=self.progress.step,
            progress=self.progress.evaluated_step,
            chunk=None if whole else fit.chunk,
            activation_checkpointing=fit.activation_checkpointing,
            communication=communication,
            reason=reason,
        )
        generation = self.elastic.generation
        assert generation is not None
        if generation.chunk is not None:
            self.step.limit(Fit(generation.chunk, generation.activation_checkpointing))
        self._report_as_this_rank()
        seats = generation.members
        equal = all(
            seat.was_in and (seat.step, seat.progress) == (generation.step, seats[0].progress) for seat in seats
        )
        if not generation.has_state:
            self._enter(source=0, from_checkpoint=self.config.resume)
        else:
            self._enter(source=None if equal else generation.source, from_checkpoint=False)
        if self.world.rank == 0:
            self.checkpoints.fence(generation.number)
            self._report_membership(began, old, reason)

    def _enter(self, source: int | None, from_checkpoint: bool) -> None:
        """Work in the present world, with the state of rank ``source`` (None: all have it already)."""
        assert self.state and self.reporter
        folder = None
        if from_checkpoint and self.world.rank == source:
            folder = self._load_checkpoint()
        if source is not None:
            self.state.share(self.world, source)
        self._deal(self.world.rank, self.world.world_size)
        if hasattr(self, "loader"):
            self.loader.close()
        self.loader = BatchLoader(self.shards, self.sampler, self.world)
        self.step.adopt(self.world)
        self.window = StepWindow()
        self._saved_step = max(self._saved_step, self.progress.step if from_checkpoint else 0)
        if from_checkpoint:
            [folder, *_] = self.world.gather(folder)
            if folder:
                self.reporter.emit("resume", path=folder, step=self.progress.step)

    def _load_checkpoint(self) -> str | None:
        """Restore the latest checkpoint in this process; its folder, None if there is none."""
        assert self.state
        found = self.checkpoints.load_latest()
        if found is None:
            return None
        folder, state = found
        self.state.restore(state)
        if self.progress.best_step:
            try:
                best_folder, best = self.checkpoints.load_best()
                if best["progress"]["step"] != self.progress.best_step:
                    raise CheckpointError(f"{best_folder} is not of step {self.progress.best_step}")
                self.state.best = best["model"]
            except CheckpointError as error:
                self._report_checkpoint("error", message=f"the best weights are lost: {error}", fatal=False)
                self.progress.best_loss, self.progress.best_step = math.inf, 0
        return folder

    def _report_membership(self, began: float, old: Any, reason: str) -> None:
        assert self.elastic and self.elastic.generation and self.reporter
        new = self.elastic.generation
        before = {seat.member: seat.node for seat in old.members} if old else {}
        now = {seat.member: seat.node for seat in new.members}
        self.reporter.emit(
            "membership", world_size=len(new.members), nodes=sorted(set(now.values())), topology=self.world.topology,
            joined=sorted(node for member, node in now.items() if member not in before),
            lost=sorted(node for member, node in before.items() if member not in now),
            reason=new.reason, step=self.progress.step, attempt=new.attempt, seconds=time.monotonic() - began,
        )  # fmt: skip
        try:
            written = {item["step"] for item in self.rundir.events("step")}
        except OSError:
            return
        for item in self._recent_steps:  # what a rank 0 that was lost had no time to write
            if item["step"] not in written:
                self.reporter.emit("step", **item)

    def _record(self, error: GroupError) -> None:
        """A detailed record of what failed, as this rank saw it (D3)."""
        if self.reporter is None or not error.communication:
            return
        peers = self.elastic.describe_peers() if self.elastic else {}
        generation = self.elastic.generation if self.elastic else None
        attempt = generation.attempt if generation else 0
        detail = {"operation": "", "waited_seconds": None, "error": str(error), **error.detail}
        self.reporter.emit("communication_error", step=self.progress.step, attempt=attempt, peers=peers, **detail)

    def _use_less_memory(self, error: Exception) -> None:
        """Out of memory: smaller parts, on all ranks, and the step once more (D4)."""
        fit = smaller(self.step.fit, self.config.micro_batch_floor)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if fit is None or (self.elastic is None and self.world.world_size > 1):
            raise OutOfMemoryError(
                f"out of memory at step {self.progress.step + 1} with {self.step.fit.chunk} samples at once"
                + (" and activation checkpointing" if self.step.fit.activation_checkpointing else "")
                + f": lower training.batch_size_per_gpu, or use a smaller model or a larger GPU ({error})"
            ) from error
        self.step.limit(fit)
        assert self.reporter
        self.reporter.emit("out_of_memory", step=self.progress.step, samples=fit.chunk,
                           activation_checkpointing=fit.activation_checkpointing)  # fmt: skip
        if self.elastic is not None and self.world.group is not None:
            reason = f"out of memory on rank {self.world.rank}"
            self.world.group.fail(reason, communication=False)
            self._until_formed(lambda: self._regroup(reason))

    def _votes(self) -> Votes:
        elastic, cut_off = self.elastic, self._cut_off
        if elastic is None:
            return Votes(leaving=int(self._asked_to_stop))
        wants = self.world.rank == 0 and (bool(elastic.wants_regroup) or elastic.wants_allreduce(cut_off))
        return Votes(int(self._asked_to_stop), int(wants), int(self.world.topology == "star" and elastic.cut_off))

    def _heed(self, result: StepResult) -> None:
        """After a step: does somebody leave, or does rank 0 want another generation? All ranks see the same votes."""
        votes, self._cut_off = result.votes, result.votes.cut_off
        if votes.leaving:
            self._save(wait=self._asked_to_stop)
            if self.elastic is None or votes.leaving == self.world.world_size or self._asked_to_stop:
                raise Stopped(everybody=self.elastic is None or votes.leaving == self.world.world_size)
            raise Regroup("a node was asked to leave")
        if votes.regroup and not self._is_over():
            assert self.elastic
            raise Regroup(self.elastic.wants_regroup or "a newcomer, or all-reduce again")

    def _report_step(self, epoch: int, rate: float, norm: float) -> None:
        """A ``step`` event with means since the one before; the sum over ranks is a collective."""
        window, self.window = self.window, StepWindow()
        done = self.synchronize_metrics({"loss_sum": window.loss_sum, "samples": window.samples})
        seconds = (self.window.began - window.began) / window.steps
        fields = {
            "step": self.progress.step,
            "epoch": epoch,
            "loss": done["loss"],
            "learning_rate": rate,
            "grad_norm": norm,
            "samples_per_second": done["samples"] / (seconds * window.steps),
            "step_seconds": seconds,
            "eta_seconds": seconds * (self.total_steps - self.progress.step),
        }
        self._recent_steps.append(fields)
        if self.world.rank == 0 and self.reporter:
            self.reporter.emit("step", **fields)

    def _is_over(self) -> bool:
        return self.progress.step >= self.total_steps or self.progress.early_stopped

    def _catch_up(self) -> None:
        """Whatever is due after the steps done so far and not done yet: evaluation, checkpoint."""
        step = self.progress.step
        frequency = self.config.eval_frequency or self.sampler.steps_per_epoch
        if step and (step % frequency == 0 or step == self.total_steps) and self.progress.evaluated_step < step:
            self._validate()
        if step and (step % self.config.checkpoint_frequency == 0 or self._is_over()) and self._saved_step < step:
            self._save()

    def _validate(self) -> None:
        """Judge the validation split; keep the best model, count towards early stopping."""
        assert self.state
        self._phase("training")
        began = time.monotonic()
        self.faults.reach("evaluate", self.progress.step)
        self._settle_buffers()
        result = evaluate(self.state.module, self.criterion, self.shards, "valid", self.world, EVAL_BATCH, self.device)
        if self.world.rank == 0 and self.reporter:
            self.reporter.emit(
                "evaluation", step=self.progress.step, split="valid", loss=result.loss, metrics=result.metrics,
                seconds=time.monotonic() - began,
            )  # fmt: skip
        progress = self.progress
        progress.evaluated_step = progress.step
        if result.loss < progress.best_loss:
            progress.best_loss, progress.best_step = result.loss, progress.step
            progress.evaluations_without_improvement = 0
            self.state.keep_best()
            self._save(is_best=True)
        else:
            progress.evaluations_without_improvement += 1
            patience = self.config.early_stopping_patience
            progress.early_stopped = patience is not None and progress.evaluations_without_improvement >= patience
        self._phase("evaluation")

    def _settle_buffers(self) -> None:
        """Running statistics are each rank's own while it trains; rank 0's count."""
        assert self.state
        for buffer in self.state.module.buffers():
            self.world.broadcast(buffer)

    def _save(self, is_best: bool = False, wait: bool = False) -> None:
        """A checkpoint by rank 0, written in the background; the next step is due again where nothing was taken."""
        assert self.state
        self._phase("training")
        step = self.progress.step
        taken = True
        if self.world.rank == 0:
            self.faults.reach("save", step)
            taken = self.checkpoints.save(self.state.capture(), step, self.world.generation, is_best)
            if wait:
                self.checkpoints.wait(COMMIT_SECONDS)
        if taken:
            self._saved_step = step
        self._phase("checkpoint")

    def _finish(self) -> dict[str, Any]:
        """The best model, proven equal on all ranks, judged and written."""
        assert self.state and self.reporter
        self.faults.reach("finish", self.progress.step)
        self._settle_buffers()
        module, last = self.state.module, None
        if self.state.best is not None:  # else no validation loss was ever finite
            last = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            module.load_state_dict(self.state.best)
        try:
            digests = [str(value) for value in self.world.gather(digest(list(module.state_dict().items())))]
            odd = [rank for rank, value in enumerate(digests) if value != digests[0]]
            if odd:
                raise RuntimeError(f"the final weights of ranks {odd} differ from rank 0's: they must not be used")
            report = final_report(module, self.criterion, self.shards, self.world, self.device, self.rundir, EVAL_BATCH)
            if self.world.rank == 0:
                self._write_model(digests[0])
        except GroupError:
            if last is not None:
                module.load_state_dict(last)  # a regroup shares the state of training
            raise
        self._phase("finalise")
        best = None
        if self.world.rank == 0:
            if not self.checkpoints.wait(COMMIT_SECONDS):
                self.reporter.emit("error", message="the last checkpoint is still being written", fatal=False)
            pointer = self.rundir.read_json(BEST)
            best = pointer["path"] if pointer and pointer["step"] == self.progress.best_step else None
        result = self._result(digests[0], report, best)
        if self.world.rank == 0:
            self.reporter.emit("end", status="succeeded")
            self.reporter.close()  # MLflow's run is known once the writer is done
            write_result(self.rundir, result, self.elastic.launch if self.elastic else None)
        self.world.meet()  # nobody leaves before the result is there: who is left could still finish it
        return result

    def _result(self, weights_sha256: str, report: dict[str, Any], best: str | None) -> dict[str, Any]:
        progress = self.progress
        return {
            "status": "succeeded",
            "steps": progress.step,
            "epochs": progress.step / self.sampler.steps_per_epoch,
            "early_stopped": progress.early_stopped,
            "best_step": progress.best_step,
            "best_valid_loss": progress.best_loss if math.isfinite(progress.best_loss) else None,
            "test": report["model"],
            "world_size": self.world.world_size,
            "backend": self.world.backend,
            "device": self.device.type,
            "samples_seen": progress.samples_seen,
            "train_samples": self.shards.count("train"),
            "consumed": [asdict(item) for item in progress.consumed],
            "train_seconds": self.seconds["training"],
            "phase_seconds": self.seconds,
            "weights_sha256": weights_sha256,
            "weights_equal_on_ranks": True,
            "checkpoint": best,
        }

    def _write_model(self, weights_sha256: str) -> None:
        """What serving needs: the weights, and how to build the module that they fit."""
        assert self.state
        buffer = io.BytesIO()
        torch.save(self.state.module.state_dict(), buffer)
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
