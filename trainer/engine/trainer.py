"""`DistributedTrainer`: the training loop, from the first world to the final weights.

A step, an evaluation or the end may fail at any point because a node is lost. `DistributedTrainer.train` then regroups
and continues from the furthest survivor's state: everything that the loop does can be done again without harm. The
state of a training is owned by `trainer.engine.session`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.comm.group import GroupError
from trainer.comm.launcher_env import RankFacts
from trainer.config import ConfigError, JobConfig
from trainer.data.batches import Batch
from trainer.documents.schemas import LEAVING, START
from trainer.engine.interruptions import BudgetSpent, Regroup, Stopped
from trainer.engine.joining import (
    join_generation,
    report_failure,
    retry_until_formed,
    save_start,
    take_up_state,
    use_less_memory,
)
from trainer.engine.lr_schedule import learning_rate
from trainer.engine.out_of_memory import is_out_of_memory
from trainer.engine.participant import Participant
from trainer.engine.problem import ProblemMaker, maker_of
from trainer.engine.reports import RankReports, Watch
from trainer.engine.session import Session
from trainer.engine.state import Entry, Progress
from trainer.engine.steps import DueStep, StepFlags, StepResult, Steps, carry_out
from trainer.engine.workload import Workload, count_steps, make_sampler, needs_evaluation
from trainer.model.optimizers import recipe_for
from trainer.model.task import mean_of
from trainer.observability.reporter import StepWindow
from trainer.observability.trace import StepProfiler
from trainer.rundir import RunDir
from trainer.runtime.host_memory import give_back_freed_memory
from trainer.runtime.packages import load

if TYPE_CHECKING:
    from trainer.evaluation.evaluate import Evaluation

OF_LOADER = "trainer.engine.given_problem:problem_of_loader"
WARM_START = "trainer.engine.warm_start:begin_from"
END = "trainer.engine.finalize:finalize"
TRY_OPTIMIZER = "trainer.model.optimizer_check:try_optimizer"
"""What only some trainings need, or the end of one."""


class DistributedTrainer:
    """A trainer of one job in this process, together with its peers.

    It trains either the job as it is configured: `initialize_distributed`, `setup`, `train`, `close`. Or a caller's own
    model on a loader of their own: `initialize_distributed`, `setup_data_parallel`, `train_epoch` for each epoch of the
    settings, `close`. A script has `trainer.Trainer` for that, and a loop of its own `trainer.Loop`.
    """

    def __init__(self, job: JobConfig, maker: ProblemMaker | None = None, watch: Watch | None = None) -> None:
        """``maker`` makes what is trained; None: what the job's configuration describes. ``watch`` is called with each
        event that this process reports."""
        self.job, self.config = job, job.training
        self.maker = maker
        self.rundir = RunDir(job.run_dir)
        self.reports = RankReports(job, self.rundir, watch)
        self._participant: Participant | None = None
        self._session: Session | None = None
        self._own_model: nn.Module | None = None
        self._own_steps: Steps[dict[str, Any]] | None = None
        self._due: DueStep | None = None
        """The next step of a caller's own model."""
        self._profiler: StepProfiler | None = None
        self._cut_off = 0
        self._leaves = False
        """Whether this process was asked to end, and has told the others in the latest step."""
        self._pending_flags: StepResult | None = None
        """The result of a step that is done, until its flags have been acted on."""

    @property
    def participant(self) -> Participant:
        """Return this process among its peers. Raise RuntimeError before `initialize_distributed`."""
        if self._participant is None:
            raise RuntimeError("call initialize_distributed() first")
        return self._participant

    @property
    def session(self) -> Session:
        """Return the state of the training. Raise RuntimeError before `setup`."""
        if self._session is None:
            raise RuntimeError("call setup() first")
        return self._session

    @property
    def launch(self) -> int | None:
        """The launch of the cluster that this process regroups in; None in a world of fixed ranks, or while unknown."""
        return self._participant.launch if self._participant else None

    @property
    def facts(self) -> RankFacts | None:
        """The place of this process as its environment gives it; None where it has none yet."""
        return self._participant.facts if self._participant else None

    @property
    def steps_done(self) -> int:
        """Optimizer steps done so far."""
        return self._session.progress.step if self._session else 0

    def initialize_distributed(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Find this process's rank and, in a world of fixed ranks, join the peers that the environment names.

        On a cluster (`Launch.is_elastic`) the process only announces itself: the first generation is
        formed when its data and model are there, in `setup`. Arguments, where given, must agree with the environment.
        """
        self._participant = Participant(self.job, self.reports, os.environ, lambda: self.steps_done, world_size, rank)
        self._participant.announce()
        self.reports.end_phase("startup")

    def setup_data_parallel(self, model: nn.Module) -> nn.Module:
        """Return the model, on this rank's device. `train_epoch` trains it with the job's loss, optimizer and settings;
        it begins with the weights of rank 0, or with those of the latest checkpoint."""
        self._own_model = model.to(self.participant.device)
        return self._own_model

    def setup(self) -> None:
        """Make the data, the model and the optimizer, join the first generation, and load the checkpoint, if there is
        one."""
        participant, reports = self.participant, self.reports
        maker = self.maker or maker_of(self.job)
        data = maker.open_data(self.job, participant.device)
        sampler = make_sampler(self.config, data, 0, participant.world.world_size)
        reports.end_phase("data")
        torch.manual_seed(self.config.seed)
        problem = maker.make(self.job, data, participant.device)
        recipe = recipe_for(self.job.optimizer, self.job.lr_scheduler, problem.recipe)
        if not recipe.is_usual:
            steps = count_steps(self.config, sampler, Progress())
            recipe = load(TRY_OPTIMIZER)(problem.module, recipe, self.config, steps, data.count("valid") > 0)
        problem = replace(problem, recipe=recipe)
        missing = self._begin_from(problem.module)
        parts, measure = problem.describe(self.config), problem.digest_measure(self.config)  # of the model as made
        workload = Workload(self.config, problem, sampler, participant.device, participant.faults)
        session = self._session = Session(participant, workload, parts, measure)
        session.callbacks.call("start")
        if session.elastic is None:
            session.world.barrier()  # one rank may take minutes to unpack the data or to make its model
            session.reports.wait_until_open()
            if session.world.rank == 0:
                session.checkpoints.fence(session.world.generation)
            take_up_state(session, Entry(resumes=self.config.resume))
            save_start(session)
        else:
            retry_until_formed(session, partial(join_generation, session, START))
        if missing is not None and not session.progress.step:
            raise missing
        assert reports.reporter is not None
        step, device = session.progress.step, participant.device
        self._profiler = StepProfiler(self.config, self.rundir, reports.reporter, device, step)
        reports.end_phase("startup")

    def _begin_from(self, module: nn.Module) -> ConfigError | None:
        """Let a model have the weights that it begins with, or return why not, where a checkpoint has others."""
        try:
            if self.config.start_from is not None:
                load(WARM_START)(module, self.job)
        except ConfigError as error:
            if not self.config.resume or self.rundir.latest_checkpoint() is None:
                raise
            return error
        return None

    def train(self) -> dict[str, Any]:
        """Carry out all `steps`, and return the fields of ``result.json``."""
        return carry_out(self.steps())

    def steps(self) -> Steps[dict[str, Any]]:
        """Yield each step to the end, through losses of nodes, and return the fields of ``result.json``.
        `trainer.engine.steps.carry_out` takes each, which calls `trainer.engine.step.TrainingStep`. Raise
        `Stopped` when asked to end, `trainer.comm.group.GroupError` when a node is lost in a world that cannot regroup,
        `GPUTooSmall` or `OutOfMemoryError` (`trainer.engine.interruptions`) where memory does not suffice."""
        session = self.session
        while True:
            try:
                session.callbacks.note_world(session.world.generation)
                self._catch_up()
                if not session.is_over:
                    epoch, offset = session.position
                    batches = session.workload.loader.batches(epoch, offset, session.progress.step)
                    yield from self.epoch_steps(batches, epoch)
                    continue
                session.callbacks.end()
                if self._profiler is not None:
                    self._profiler.close(session.progress.step)
                give_back_freed_memory()
                result: dict[str, Any] = load(END)(session)
                session.callbacks.deliver()
                return result
            except BudgetSpent as spent:
                session.save_at_end(spent.agreed)
                raise
            except Regroup as wish:
                retry_until_formed(session, partial(join_generation, session, str(wish)))
            except GroupError as error:
                report_failure(session, error)
                if session.elastic is None:
                    raise
                if self._leaves and self._pending_flags is not None:
                    self._act_on_flags(self._pending_flags)  # the others have acted and go on without this one
                self._pending_flags = None
                retry_until_formed(session, partial(join_generation, session, str(error), error.communication))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                use_less_memory(session, error)
                session.step.timer.drop()

    def train_epoch(self, dataloader: Iterable[Any], epoch: int = 0) -> dict[str, float]:
        """Train on the batches of (the rest of) an epoch, and return the mean loss over them and all ranks.

        After `setup_data_parallel` the model is the caller's, and the loader one of pairs (inputs, target), the same on
        all ranks: which samples are whose is the trainer's decision, through losses of nodes. After `setup` they are
        the `Batch`es of a loader, and the model is the job's.
        """
        if self._own_model is None:
            return self.synchronize_metrics(carry_out(self.epoch_steps(dataloader, epoch)))
        if self._own_steps is None:
            self.maker = load(OF_LOADER)(self.job, self._own_model, dataloader)
            self.setup()
            self._own_steps = self.steps()
            self._due = next(self._own_steps, None)
        return self._train_own(epoch, self._own_steps)

    def _train_own(self, epoch: int, steps: Steps[dict[str, Any]]) -> dict[str, float]:
        """Carry out the steps of a caller's own model to the end of an epoch, and return `synchronize_metrics` of their
        sums. Raise `ConfigError` after the last epoch."""
        if self._due is None:
            raise ConfigError(f"training.epochs = {self.config.epochs}: all of them are done")
        totals = {"loss_sum": 0.0, "weight": 0.0, "samples": 0.0}
        found: dict[str, float] = {}
        while (due := self._due) is not None and due.epoch <= epoch:
            self._due = None
            try:
                result = due.step(due.batch, due.number, due.learning_rate, due.flags)
            except Exception as error:
                self._due = steps.throw(error)
                continue
            totals["loss_sum"] += result.loss_sum
            totals["weight"] += result.weight
            totals["samples"] += due.batch.local_samples
            if due.number + 1 >= self.session.total_steps:  # at the end other ranks may leave
                found = self.synchronize_metrics(totals)
            with suppress(StopIteration):
                self._due = steps.send(result)
        return found or self.synchronize_metrics(totals)

    def synchronize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the sums over ranks; with ``loss_sum`` and ``weight``, or ``samples``, among them, also their ratio as
        ``loss``."""
        names = sorted(metrics)
        values = torch.tensor([metrics[name] for name in names], dtype=torch.float64)
        result = dict(zip(names, self.participant.world.all_reduce(values).tolist(), strict=True))
        if "loss_sum" in result:
            result["loss"] = mean_of(result["loss_sum"], result.get("weight", result.get("samples", 0.0)))
        return result

    def close(self, tracking_seconds: float = 60.0) -> None:
        """Stop the threads and leave the group; all reports are on disk afterwards."""
        self.reports.watchdog.stop()
        if self._session is not None:
            self._session.close()
        if self._profiler is not None:
            self._profiler.close(self.steps_done)
        self.reports.close(tracking_seconds)
        if self._participant is not None:
            self._participant.close()

    def epoch_steps(self, dataloader: Iterable[Batch], epoch: int) -> Steps[dict[str, float]]:
        """Yield the step of each of these batches, and return the sum of this rank's losses, and its samples."""
        session, config, watchdog, profiler = self.session, self.config, self.reports.watchdog, self._profiler
        step, progress, planned = session.step, session.progress, session.total_steps
        step.begin_epoch()
        step.timer.mark("other")
        watchdog.progress(progress.step)
        totals = {"loss_sum": 0.0, "weight": 0.0, "samples": 0.0}
        for batch in dataloader:
            rate = learning_rate(config, progress.step, planned)
            flags = self._collect_flags()
            result = yield DueStep(step, batch, progress.step, epoch, rate, flags)
            rate = step.scheduled.rate
            self._leaves = bool(flags.leaving)
            progress.commit(epoch, batch.samples, result.digest, batch.kind, batch.place)
            total_steps = planned if batch.place is None else session.total_steps  # fewer, where a stream has ended
            mine = batch.local_samples
            self._pending_flags = result
            progress.early_stopped = progress.early_stopped or bool(result.flags.ending)
            session.callbacks.call("step")
            watchdog.progress(progress.step)
            if profiler is not None:
                profiler.step(progress.step)
            totals["loss_sum"] += result.loss_sum
            totals["weight"] += result.weight
            totals["samples"] += mine
            session.window.add(result.loss_sum, mine, result.weight)
            session.workload.communication.add(mine)
            self._show_on_monitor(epoch, mine, rate, result)
            session.faults.reach("report", progress.step - 1)
            done = progress.step
            is_reported = done % config.log_frequency == 0 or done >= total_steps
            if is_reported:
                self._report_step(epoch, rate, result.grad_norm)
            if result.flags.budget and done < total_steps:
                raise BudgetSpent(agreed=True)
            if is_reported and config.timing:
                self._probe_links()
            often = config.eval_frequency or total_steps
            if not (done % config.checkpoint_frequency and done % often) or done >= total_steps:
                self._catch_up()  # what is due at the end of an epoch, `train` does
            self._act_on_flags(result)
            if done >= total_steps or progress.early_stopped:
                break
        self.reports.end_phase("training")
        return totals

    # Helpers of the methods above, in the order of their use.

    def _collect_flags(self) -> StepFlags:
        """Return the flags that this rank sends in the next step."""
        session = self.session
        elastic, cut_off = session.elastic, self._cut_off
        spent = int(session.budget.limit < math.inf and session.is_budget_due)
        leaving = int(session.participant.asked_to_stop)
        if elastic is None:
            return StepFlags(leaving=leaving, budget=spent)
        world = session.world
        may_regroup = world.rank == 0 and session.step.can_regroup
        wants = may_regroup and (bool(elastic.recovery_reason) or elastic.is_all_reduce_due(cut_off))
        misses = world.topology == "star" and elastic.is_cut_off
        return StepFlags(leaving, int(wants), int(misses), spent)

    def _show_on_monitor(self, epoch: int, samples: int, rate: float, result: StepResult) -> None:
        monitor, facts = self.reports.monitor, self.session.facts
        if monitor is not None:
            loss = mean_of(result.loss_sum, result.weight)
            step = self.session.progress.step
            monitor.update(epoch, step, loss, facts.local_world_size * samples, rate, result.grad_norm)

    def _act_on_flags(self, result: StepResult) -> None:
        """Stop or regroup as the flags of a step say, which are the same on all ranks."""
        session, flags = self.session, result.flags
        self._cut_off, self._pending_flags = flags.cut_off, None
        if flags.leaving:
            everybody = session.elastic is None or flags.leaving == session.world.world_size
            session.save(wait=everybody or session.participant.asked_to_stop)
            if everybody or self._leaves:
                raise Stopped(everybody)
            # A rank that was asked meanwhile says so in the next step: none may leave without being counted.
            raise Regroup(LEAVING)
        if flags.regroup and not session.is_over:
            assert session.elastic is not None
            again = "all-reduce is tried again" if session.world.topology == "star" else "a node came"
            raise Regroup(session.elastic.recovery_reason or again)

    def _report_step(self, epoch: int, rate: float, norm: float) -> None:
        """Report a ``step`` event with means since the last one, and now and then a ``timing`` event for a window: one
        collective."""
        session, reports, communication = self.session, self.reports, self.session.workload.communication
        step, total_steps = session.progress.step, session.total_steps
        window, session.window = session.window, StepWindow()
        measured = None
        if communication.is_due(step, is_last=step == total_steps):
            measured = communication.exchange(step, (window.loss_sum, window.weight, window.samples))
            loss_sum, weight, samples = measured.totals
            if reports.monitor:
                reports.monitor.communication_time_ms = 1000 * float(measured.network.mean())
        else:
            sums = torch.tensor([window.loss_sum, window.weight, window.samples], dtype=torch.float64)
            loss_sum, weight, samples = session.world.all_reduce(sums).tolist()
        seconds = (session.window.began - window.began) / window.steps
        fields = {
            "step": step,
            "epoch": epoch,
            "loss": mean_of(loss_sum, weight),
            "learning_rate": rate,
            "grad_norm": norm,
            "samples_per_second": samples / (seconds * window.steps),
            "step_seconds": seconds,
            "eta_seconds": seconds * (total_steps - step),
        }
        session.recent_steps.append(fields)
        session.callbacks.run.report()
        if session.world.rank == 0:
            reports.emit("step", **fields)
            if measured is not None:
                timing = communication.report(
                    measured,
                    samples_at_once=session.step.limit.max_samples,
                    micro_batches=session.step.config.micro_batches,
                    parameters_bytes=sum(parameter.nbytes for parameter in session.step.parameters),
                )
                reports.emit("timing", step=step, nodes=reports.nodes, **timing)
        session.step.timer.mark("other")  # of the next step: this one's marks have been taken

    def _probe_links(self) -> None:
        """Probe the links where that is due."""
        session, paused_at = self.session, time.monotonic()
        found = session.workload.communication.probe(session.progress.step)
        session.step.timer.mark(None)
        if found is not None and session.world.rank == 0:
            self.reports.emit("link", **found)
        session.window.began += time.monotonic() - paused_at  # this time is no part of a step

    def _catch_up(self) -> None:
        """Do what is due after the steps done so far: evaluation, checkpoint."""
        session, config = self.session, self.config
        progress, step, paused_at = session.progress, session.progress.step, time.monotonic()
        if needs_evaluation(config, session.workload.sampler.samples, progress, session.total_steps):
            self._validate()
        if step and (step % config.checkpoint_frequency == 0 or session.is_over) and session.saved_step < step:
            session.save()
        self.reports.watchdog.progress(step)
        session.window.began += time.monotonic() - paused_at  # this time is no part of a step

    def _validate(self) -> None:
        """Evaluate on the validation split, keep the best model, and count towards early stopping."""
        session, reports, progress = self.session, self.reports, self.session.progress
        reports.end_phase("training")
        began = time.monotonic()
        session.step.timer.mark("other")
        session.faults.reach("evaluate", progress.step)
        session.workload.settle_buffers()
        with session.state.whole(session.world):
            result = session.problem.judge.validate(session.judge_request(self._stop_evaluating))
        if result is not None and session.world.rank == 0:
            reports.emit(
                "evaluation",
                step=progress.step,
                split="valid",
                loss=result.loss,
                metrics=result.metrics,
                seconds=time.monotonic() - began,
            )
        give_back_freed_memory()
        reports.end_phase("evaluation")
        session.step.timer.mark(None)
        progress.evaluated_step = progress.step
        if result is None:
            return
        if not math.isfinite(result.loss):
            self._tell_unjudged(result)
        score, config = result.figure(self.config.monitor), self.config
        session.step.scheduled.note_evaluation(score)
        is_best = progress.note_evaluation(result.loss, score, config.mode, config.early_stopping_patience)
        session.callbacks.note_evaluation({"loss": result.loss, **result.metrics}, is_best)
        if session.problem.callbacks:
            session.world.barrier()  # which has patience
        if is_best:
            session.state.keep_best()
            session.save(is_best=True)

    def _tell_unjudged(self, result: Evaluation) -> None:
        """Say why a validation loss is no number. Raise `ConfigError` where a sample is none, after a checkpoint: no
        weights could be chosen by that split."""
        session = self.session
        message = f"the loss on the valid split is {result.loss} after step {session.progress.step}: {result.why}"
        if result.has_odd_sample:
            session.save_at_end(agreed=True)
            raise ConfigError(f"{message}; a checkpoint was saved, and the training continues from there")
        if session.world.rank == 0:
            self.reports.emit("error", message=message, fatal=False)

    def _stop_evaluating(self) -> None:
        """Raise if the training must stop; called between two batches of an evaluation, when ranks exchange nothing."""
        if self.session.is_budget_due:
            raise BudgetSpent(agreed=self.session.world.world_size == 1)
