"""`DistributedTrainer`: the loop, from the world to the final weights, in the order in which things happen.

A step, an evaluation or the end may fail because a node is lost, at any point. `DistributedTrainer.train` then regroups
and goes on where the furthest survivor stands: everything the loop does can be done again without harm.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.manager import CheckpointManager
from trainer.comm.group import GroupError
from trainer.comm.launcher_env import rank_facts
from trainer.comm.static_rendezvous import join
from trainer.comm.world import World, choose_device
from trainer.config import ConfigError, JobConfig
from trainer.data.loader import Batch, BatchLoader, keep_on_gpu
from trainer.data.sampler import Sampler
from trainer.data.shards import DatasetError, DataShardManager
from trainer.elastic.dynamic_rendezvous import Elastic
from trainer.elastic.generation import START
from trainer.engine import budget
from trainer.engine.budget import COMMIT_SECONDS, Budget, BudgetSpent
from trainer.engine.finalize import finish
from trainer.engine.lr_schedule import learning_rate
from trainer.engine.out_of_memory import give_back_freed_memory, is_out_of_memory, keep_freed_memory
from trainer.engine.recovery import (
    LEAVING,
    deal,
    enter,
    record,
    regroup,
    report_as_this_rank,
    until_formed,
    use_less_memory,
)
from trainer.engine.result import Regroup, Stopped
from trainer.engine.state import Progress, TrainingState
from trainer.engine.step import Step, StepResult, Votes
from trainer.evaluation.evaluate import EVAL_BATCH, evaluate
from trainer.model.losses import build_loss
from trainer.model.stock import build_model
from trainer.observability.comm_profiler import CommunicationProfiler, Window
from trainer.observability.node_monitor import NodeMonitor
from trainer.observability.reporter import Reporter, StepWindow
from trainer.observability.trace import StepProfiler
from trainer.observability.watchdog import Watchdog
from trainer.rundir import RESULT, RunDir
from trainer.runtime.affinity import AVAILABLE, bind
from trainer.runtime.fault_injection import Faults


class DistributedTrainer:
    """Trains one job in this process, together with its peers."""

    def __init__(self, job: JobConfig) -> None:
        self.job, self.config = job, job.training
        self.rundir = RunDir(job.run_dir)
        self.seconds = dict.fromkeys(
            ("startup", "data", "training", "evaluation", "checkpoint", "regroup", "finalise"), 0.0
        )
        self.asked_to_stop = False
        self._old_handler: Any = None
        self._mark = time.monotonic()
        self.saved_step = 0
        self.best_saved_step = 0
        """Of the best checkpoint that is known to be in storage."""
        self.recent_steps: deque[dict[str, Any]] = deque(maxlen=64)
        self._cut_off = 0
        self._leaves = False
        """Was this process asked to end, and has it told the others so in the latest step?"""
        self._unheeded: StepResult | None = None
        """Of a step that is done, until what ranks agreed in it has been seen to."""
        self.elastic: Elastic | None = None
        self.reporter: Reporter | None = None
        self.monitor: NodeMonitor | None = None
        self.watchdog = Watchdog(self.config)
        self.budget: Budget | None = None
        self.launch: int | None = None
        """Of the cluster that this process regroups in; None in a world of fixed ranks."""
        self.state: TrainingState | None = None
        self.loader: BatchLoader | None = None
        self.sampler: Sampler
        self.world: World
        self.nodes: list[int] = []
        """The node of each rank."""
        self.communication: CommunicationProfiler

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
        if "DTRAIN_LAUNCH" in os.environ and self.config.regroup:
            self.launch = int(os.environ["DTRAIN_LAUNCH"])
        if self.launch is None and facts.rank == 0:
            self.rundir.storage.delete(RESULT)  # of an earlier start: only this one says how it ended
        self.budget = budget.begin(self)
        self.device, _ = choose_device(facts, self.config.backend)
        threads = self.config.threads_per_rank
        if threads is None and "OMP_NUM_THREADS" not in os.environ:  # which the launcher knows better than we do
            threads = max(1, len(AVAILABLE) // facts.local_world_size)
        if threads is not None:
            torch.set_num_threads(threads)  # before there are other threads, which keep what they begin with
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.launch is not None:
            self.elastic = Elastic(self.rundir, self.config, facts, self.device, os.environ, self.job.job_id)
            self.elastic.announce()
        else:
            self.world = join(self.config)
        if threading.current_thread() is threading.main_thread():
            # Only now: before, SIGTERM may end the process as it does any other, for nothing has been done yet.
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        if self.elastic is None:
            [generation, *_] = self.world.gather(self.rundir.last_generation() + 1)
            self.world = replace(self.world, generation=generation)
            report_as_this_rank(self)
        self.phase("startup")

    def setup_data_parallel(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, its gradients summed over ranks in each backward pass through its outputs,
        in a training loop of the caller's own; as it is in a world of one."""
        untimed = replace(self.config, timing=False)  # nobody takes the marks away
        step = Step(model.to(self.device), self.criterion, untimed, self.device, self.faults, flat=False)
        step.adopt(self.world)
        step.sync.sum_each_pass(step.model, step.module)
        return step.model

    def setup(self) -> None:
        """Data, model, optimizer, the first generation, and the checkpoint to go on from, if there is one."""
        job = self.job
        self.shards = DataShardManager(job.dataset.uri, expected_id=job.dataset.dataset_id)
        for split in ("train", "valid", "test"):
            if self.shards.count(split) == 0:
                raise DatasetError(f"{job.dataset.uri}: the {split} split has no samples; choose other split dates")
        if self.config.data_on_device:
            keep_on_gpu(self.shards, self.device)
        deal(self, 0, 1 if self.elastic else self.world.world_size)
        self.total_steps = self.config.epochs * self.sampler.steps_per_epoch
        if self.config.max_steps is not None:
            self.total_steps = min(self.total_steps, self.config.max_steps)
        self.phase("data")
        torch.manual_seed(self.config.seed)
        self.criterion = build_loss(job.loss, self.shards.spec).to(self.device)
        module = build_model(job.model, self.shards.spec, int(self.criterion.outputs)).to(self.device)  # type: ignore[arg-type]
        self.step = Step(module, self.criterion, self.config, self.device, self.faults)
        self.state = TrainingState(module, self.step)
        self.checkpoints = CheckpointManager(
            self.rundir, self.config.keep_checkpoints, self._fingerprint(), self._report_checkpoint
        )
        self.window = StepWindow()
        if self.elastic is None:
            self.world.meet()  # one may have unpacked the data or made its model for minutes
            if self.world.rank == 0:
                self.checkpoints.fence(self.world.generation)
            enter(self, source=0, from_checkpoint=self.config.resume)
        else:
            until_formed(self, partial(regroup, self, START))
        assert self.reporter is not None
        self.profiler = StepProfiler(self.config, self.rundir, self.reporter, self.device, self.progress.step)
        self.phase("startup")

    def train(self) -> dict[str, Any]:
        """The whole training, through losses of nodes; what goes into ``result.json``. Raises `Stopped` when asked to
        end, `trainer.comm.group.GroupError` when a node is lost in a world that cannot regroup."""
        while True:
            try:
                self._catch_up()
                if not self._is_over():
                    epoch, first_step = divmod(self.progress.step, self.sampler.steps_per_epoch)
                    assert self.loader is not None
                    self.train_epoch(self.loader.batches(epoch, first_step), epoch)
                    continue
                self.profiler.close(self.progress.step)
                give_back_freed_memory()
                return finish(self)
            except BudgetSpent as spent:
                budget.save(self, spent)
                raise
            except Regroup as wish:
                until_formed(self, partial(regroup, self, str(wish)))
            except GroupError as error:
                record(self, error)
                if self.elastic is None:
                    raise
                if self._leaves and self._unheeded is not None:
                    self._heed(self._unheeded)  # the others were quicker: they go on without this one already
                self._unheeded = None
                until_formed(self, partial(regroup, self, str(error), error.communication))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                use_less_memory(self, error)

    def train_epoch(self, dataloader: Iterable[Batch], epoch: int = 0) -> dict[str, float]:
        """Train on the batches of (the rest of) an epoch; the mean loss over them and all ranks."""
        self.step.module.train()
        self.step.check_parameters()
        self.step.timer.mark(None)
        self.watchdog.progress(self.progress.step)
        totals = {"loss_sum": 0.0, "samples": 0.0}
        for batch in dataloader:
            rate = learning_rate(self.config, self.progress.step, self.total_steps)
            votes = self._votes()
            result = self.step(batch, self.progress.step, rate, votes)
            self._leaves = bool(votes.leaving)
            self.progress.commit(epoch, batch.samples, result.digest)
            self._unheeded = result
            self.watchdog.progress(self.progress.step)
            self.profiler.step(self.progress.step)
            totals["loss_sum"] += result.loss_sum
            totals["samples"] += batch.local_samples
            self.window.add(result.loss_sum, batch.local_samples)
            self.communication.add(batch.local_samples)
            if self.monitor:
                local, loss = self.facts.local_world_size * batch.local_samples, result.loss_sum / batch.local_samples
                self.monitor.update(epoch, self.progress.step, loss, local, rate, result.grad_norm)
            is_reported = self.progress.step % self.config.log_frequency == 0 or self.progress.step == self.total_steps
            measured = self._report_step(epoch, rate, result.grad_norm) if is_reported else None
            if result.votes.budget and not self._is_over():
                raise BudgetSpent(agreed=True)
            paused_at = time.monotonic()
            if is_reported and self.config.timing:
                self._look_at_communication(measured)
            self._catch_up()
            self.watchdog.progress(self.progress.step)
            self.window.began += time.monotonic() - paused_at  # that is no part of a step's time
            self._heed(result)
            if self._is_over():
                break
        self.phase("training")
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
        self.watchdog.stop()
        if self.loader:
            self.loader.close()
        if hasattr(self, "checkpoints"):
            self.checkpoints.close(5.0)
        if hasattr(self, "profiler"):
            self.profiler.close(self.progress.step)
        if self.monitor:
            self.monitor.stop()
        if self.reporter:
            self.reporter.close(tracking_seconds)
        if self.elastic:
            self.elastic.leave()
        elif hasattr(self, "world"):
            self.world.leave()
        if self.budget:
            self.budget.close()
        bind(AVAILABLE)  # a process that goes on has its cores back
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    # The rest serves the methods above, in the order of their use.

    def _on_sigterm(self, *_: object) -> None:
        self.asked_to_stop = True  # no more here: the ranks hear of it at the next step

    def phase(self, name: str) -> None:
        """Book the time since the last mark on a phase, and say so."""
        self.watchdog.rest()
        now = time.monotonic()
        self.seconds[name] += now - self._mark
        self._mark = now
        if self.reporter:
            self.reporter.emit("phase", name=name, seconds=round(self.seconds[name], 3))

    def _fingerprint(self) -> str:
        what = [self.shards.spec.dataset_id, asdict(self.job.model), asdict(self.job.loss)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def _report_checkpoint(self, kind: str, **fields: Any) -> None:
        if fields.get("is_best"):
            self.best_saved_step = fields["step"]
        if self.budget and kind == "checkpoint":
            self.budget.measured(fields["seconds"])
        if self.reporter:
            self.reporter.emit(kind, **fields)

    def _votes(self) -> Votes:
        elastic, cut_off, spent = self.elastic, self._cut_off, int(budget.is_due(self))
        if elastic is None:
            return Votes(leaving=int(self.asked_to_stop), budget=spent)
        wants = self.world.rank == 0 and (bool(elastic.wants_regroup) or elastic.wants_allreduce(cut_off))
        misses = self.world.topology == "star" and elastic.cut_off
        return Votes(int(self.asked_to_stop), int(wants), int(misses), spent)

    def _heed(self, result: StepResult) -> None:
        """After a step: does somebody leave, or does rank 0 want another generation? All ranks see the same votes."""
        votes, self._cut_off, self._unheeded = result.votes, result.votes.cut_off, None
        if votes.leaving:
            everybody = self.elastic is None or votes.leaving == self.world.world_size
            self.save(wait=everybody or self.asked_to_stop)
            if everybody or self._leaves:
                raise Stopped(everybody)
            # Who has been asked meanwhile says so in the next step: nobody must go without being counted.
            raise Regroup(LEAVING)
        if votes.regroup and not self._is_over():
            assert self.elastic is not None
            again = "all-reduce is tried again" if self.world.topology == "star" else "somebody came"
            raise Regroup(self.elastic.wants_regroup or again)

    def _report_step(self, epoch: int, rate: float, norm: float) -> Window | None:
        """A ``step`` event with means since the one before, and now and then a ``timing`` event beside it, of the
        window that is returned: one collective."""
        window, self.window = self.window, StepWindow()
        measured = None
        if self.communication.is_due(self.progress.step, is_last=self.progress.step == self.total_steps):
            measured = self.communication.exchange(self.progress.step, (window.loss_sum, window.samples))
            loss_sum, samples = measured.totals
            if self.monitor:
                self.monitor.communication_time_ms = 1000 * float(measured.wire.mean())
        else:
            done = self.synchronize_metrics({"loss_sum": window.loss_sum, "samples": window.samples})
            loss_sum, samples = done["loss_sum"], done["samples"]
        seconds = (self.window.began - window.began) / window.steps
        fields = {
            "step": self.progress.step,
            "epoch": epoch,
            "loss": loss_sum / samples,
            "learning_rate": rate,
            "grad_norm": norm,
            "samples_per_second": samples / (seconds * window.steps),
            "step_seconds": seconds,
            "eta_seconds": seconds * (self.total_steps - self.progress.step),
        }
        self.recent_steps.append(fields)
        if self.world.rank == 0 and self.reporter:
            self.reporter.emit("step", **fields)
            if measured is not None:
                timing = self.communication.report(
                    measured,
                    samples_at_once=self.step.fit.chunk,
                    micro_batches=self.step.config.micro_batches,
                    parameters_bytes=sum(parameter.nbytes for parameter in self.step.parameters),
                )
                self.reporter.emit("timing", step=self.progress.step, nodes=self.nodes, **timing)
        return measured

    def _look_at_communication(self, measured: Window | None) -> None:
        """Are links worth a probe, and is what ``training.communication = "auto"`` has chosen still the best?"""
        chosen = self.step.sync.review(measured) if measured is not None else None
        probed = self.communication.probe(self.progress.step)
        self.step.timer.mark(None)
        for kind, found in (("communication", chosen), ("link", probed)):
            if found is not None and self.world.rank == 0 and self.reporter:
                self.reporter.emit(kind, **{"step": self.progress.step, **found})

    def _is_over(self) -> bool:
        return self.progress.step >= self.total_steps or self.progress.early_stopped

    def _catch_up(self) -> None:
        """Whatever is due after the steps done so far and not done yet: evaluation, checkpoint."""
        step = self.progress.step
        frequency = self.config.eval_frequency or self.sampler.steps_per_epoch
        if step and (step % frequency == 0 or step == self.total_steps) and self.progress.evaluated_step < step:
            self._validate()
        if step and (step % self.config.checkpoint_frequency == 0 or self._is_over()) and self.saved_step < step:
            self.save()

    def _validate(self) -> None:
        """Judge the validation split; keep the best model, count towards early stopping."""
        assert self.state is not None
        self.phase("training")
        began = time.monotonic()
        self.step.timer.mark("other")
        self.faults.reach("evaluate", self.progress.step)
        self.settle_buffers()
        result = evaluate(
            self.state.module, self.criterion, self.shards, "valid", self.world, EVAL_BATCH, self.device,
            before_batch=partial(budget.stop_judging, self),
        )  # fmt: skip
        if self.world.rank == 0 and self.reporter:
            self.reporter.emit(
                "evaluation", step=self.progress.step, split="valid", loss=result.loss, metrics=result.metrics,
                seconds=time.monotonic() - began,
            )  # fmt: skip
        give_back_freed_memory()
        self.phase("evaluation")
        self.step.timer.mark(None)
        progress = self.progress
        progress.evaluated_step = progress.step
        if result.loss < progress.best_loss:
            progress.best_loss, progress.best_step = result.loss, progress.step
            progress.evaluations_without_improvement = 0
            self.state.keep_best()
            self.save(is_best=True)
        else:
            progress.evaluations_without_improvement += 1
            patience = self.config.early_stopping_patience
            progress.early_stopped = patience is not None and progress.evaluations_without_improvement >= patience

    def settle_buffers(self) -> None:
        """Running statistics are each rank's own while it trains; rank 0's count."""
        assert self.state is not None
        for buffer in self.state.module.buffers():
            self.world.broadcast(buffer)

    def save(self, is_best: bool = False, wait: bool = False) -> None:
        """A checkpoint by rank 0, written in the background. Where nothing was taken, since two others are still to be
        written, the next one comes as planned; with ``wait`` it is this one that counts."""
        assert self.state is not None
        self.phase("training")
        self.step.timer.mark("other")
        step = self.progress.step
        taken = True
        if self.world.rank == 0:
            self.faults.reach("save", step)
            best_is_saved = self.progress.best_step in (step, self.best_saved_step)
            state = self.state.capture(best_is_saved)
            taken = self.checkpoints.save(state, step, self.world.generation, is_best, self._is_over())
            if wait and self.checkpoints.wait(COMMIT_SECONDS) and not taken:
                taken = self.checkpoints.save(state, step, self.world.generation, is_best)
                self.checkpoints.wait(COMMIT_SECONDS)
        if taken:
            self.saved_step = step
        self.step.timer.mark("checkpoint")
        self.phase("checkpoint")
