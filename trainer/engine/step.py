"""One optimizer step: the rank's micro-batches, the sums of gradients, their norm and clipping, agreement that all is
finite, update. Which class makes the steps of a strategy is in `STRATEGIES`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.comm.group import CollectiveResult, CompletedCollective, is_communication_error, shorten_error, summed
from trainer.comm.world import RankFacts, World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples, find_odd_row
from trainer.data.sampler import micro_batch_seed
from trainer.engine.module_state import (
    holds_module_state,
    put_module_state,
    read_module_state,
    refuse_extra_state,
)
from trainer.engine.out_of_memory import MicroBatchLimit
from trainer.engine.precision import AUTOCAST, refuse_precision, tf32_products
from trainer.engine.steps import StepFlags, StepResult, count_step, explain_non_finite
from trainer.model.optimizers import USUAL, OptimizerRecipe, ScheduledOptimizer
from trainer.model.task import Task, per_sample, weigher
from trainer.parallel.buckets import gradient_norm
from trainer.parallel.synchronizer import GradientSync, GradientSynchronizer
from trainer.runtime.fault_injection import Faults
from trainer.runtime.packages import load
from trainer.runtime.step_timer import StepTimer
from trainer.strategies import can_record

if TYPE_CHECKING:
    from trainer.engine.graphs import StepGraphs

COMPILED = "trainer.model.compile:compiled_loss"
GRAPHS, CUDA_RECORDER = "trainer.engine.graphs:StepGraphs", "trainer.engine.graphs:CudaRecorder"
_SHARDED = {"step": "trainer.engine.sharded:ShardedStep", "state": "trainer.engine.sharded:ShardedState"}
STRATEGIES: Mapping[str, Mapping[str, str]] = {
    "fsdp": _SHARDED,
    "hsdp": _SHARDED,
    "horovod": {"synchronizer": "trainer.parallel.horovod_synchronizer:HorovodSynchronizer"},
    "deepspeed": {"step": "trainer.engine.deepspeed_step:ZeroStep"},
}
"""The classes of a strategy that are others than `TrainingStep`, `trainer.engine.state.TrainingState` and
`GradientSynchronizer`. They are loaded when a training needs them."""
_COMMIT = "commit of the step"
_log = logging.getLogger(__name__)
EPSILON = 1e-6


def class_of(strategy: str, part: str, usual: Any) -> Any:
    """Return the class of a part (``step``, ``state`` or ``synchronizer``) of a strategy, which is loaded now where it
    is not the ``usual`` one."""
    name = STRATEGIES.get(strategy, {}).get(part)
    return usual if name is None else load(name)


class TrainingStep:
    """An optimizer step on one model. `adopt` gives it a world, and a new one after each regroup."""

    is_divided = False
    """Whether ranks hold parts of the state, which only all of them together can read."""
    divides_parameters = False
    """Whether ranks hold rows of the parameters between passes, so that each pass is a collective."""
    can_regroup = True
    sharing = 1
    """The ranks that hold one copy of the parameters together."""

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        config: DistributedTrainingConfig,
        device: torch.device,
        faults: Faults,
        recipe: OptimizerRecipe = USUAL,
        total_steps: int = 0,
    ) -> None:
        """``total_steps``: of the whole training, for a schedule that depends on it."""
        refuse_precision(config.precision, device)
        refuse_extra_state(module, config.strategy)
        self.module, self.task, self.config, self.device, self.faults = module, task, config, device, faults
        self._weigh = weigher(task)
        self._recipe, self._total_steps = recipe, total_steps
        self.graphs: StepGraphs | None = self._make_graphs()
        """The recordings of the step; None where it is never recorded."""
        self.scheduled = self._make_optimizer()
        """The optimizer and its learning rates."""
        self.loss: Callable[[Any], Tensor] = self._make_loss(module)
        """Returns the losses of a batch in a pass, compiled or not."""
        self.scaler = torch.amp.GradScaler(enabled=config.precision == "fp16")
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.limit = MicroBatchLimit(config.batch_size_per_gpu, False)
        self.timer = StepTimer(config.timing, device)
        self.world = World(RankFacts(), device, "gloo")
        """The world, which has only this process until `adopt`."""
        self.sync: GradientSync = GradientSynchronizer(self.world, faults, self.timer, config=config)
        self.awaits_commit: int | None = None
        """The step whose gradients are complete and whose commit this rank waits for, or has missed."""
        self._kind, self._micro_batches = AUTOCAST[config.precision], config.micro_batches
        self._holders = {
            name: item
            for name, item in module.named_modules()
            if holds_module_state(item) and not getattr(item, "has_constant_buffers", False)
        }
        """The modules that may have running statistics, by name."""
        self._no_share = torch.zeros((), device=device)
        self._commit: CollectiveResult | None = None
        self._norm_here = torch.zeros((), device=device)
        """The norm of the gradients of a step, where `update` clips them."""
        self._is_checkpointed = False
        if config.activation_checkpointing:
            self.apply_limit(MicroBatchLimit(config.batch_size_per_gpu, True))

    @property
    def optimizer(self) -> Optimizer:
        """What updates the weights."""
        return self.scheduled.optimizer

    def adopt(self, world: World) -> None:
        """Work in this world from now on; waits for its group. All state must be equal on all its ranks already."""
        self.sync.unwrap()
        self.optimizer.zero_grad(set_to_none=True)
        self.world = world
        kind = class_of(self.config.strategy, "synchronizer", GradientSynchronizer)
        self.sync = sync = kind(world, self.faults, self.timer, config=self.config)
        if self.graphs is not None:
            self.graphs.clear()
            sync.is_in_place = True
        sync.wrap(self.module)

    def begin_epoch(self) -> None:
        """Prepare the steps of (the rest of) an epoch. Raise as `check_parameters` does."""
        self.module.train()
        self.check_parameters()

    def check_parameters(self) -> None:
        """Raise `ConfigError` if the model has unfrozen parameters, whose gradients nothing would sum or clear."""
        known = set(map(id, self.parameters))
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"{name} was frozen when training began and no longer is: freeze and unfreeze parameters where "
                    "the model is created; to train some of them later, detach them in the model until then"
                )

    def apply_limit(self, fit: MicroBatchLimit) -> None:
        """Limit the samples that go through the model at once, by which the sampler of the next world cuts
        micro-batches."""
        self.limit = fit
        if self.graphs is not None:
            self.graphs.clear()  # what they hold is memory that may be short
        if fit.activation_checkpointing and not self._is_checkpointed:
            self._is_checkpointed = True
            load("trainer.model.blocks:checkpoint_activations")(self.module)
            if self.graphs is not None:
                self.graphs.refuse("activations are computed twice, which sets random numbers within a pass")
            if self.config.compile != "off":  # what was compiled before keeps all activations
                torch.compiler.reset()
                self.loss = self._make_loss(self.module)

    def __call__(self, batch: Batch, step: int, learning_rate: float, flags: StepFlags) -> StepResult:
        """Train on one global batch. All ranks must call it for the same step; it is done on all or on none of those
        that return. ``learning_rate``: that of the settings.

        Raise `NonFiniteError` on all ranks, before the weights are touched, if any rank's loss or gradient is not
        finite. Raise `trainer.comm.group.GroupError` where communication fails, and any error of the model: then the
        step is not done, and can be done again.
        """
        self.timer.mark("input")
        self.scheduled.set_rate(learning_rate)
        self.sync.clear(self.parameters)
        self.sync.step = step
        self._commit = self.awaits_commit = None
        before = read_module_state(self._holders) if self._holders else {}
        passes = tf32_products()(self._forward_backward) if self.config.precision == "tf32" else self._forward_backward
        try:
            losses, weight = passes(batch, step, flags)
            self.sync.finish(self.module)
            norm = self._measure_norm()
            loss_sum, grad_norm = self._read(batch, flags, losses, norm)
            self._clip(grad_norm, norm)
            self.timer.mark("optimizer")
            if not self._commits_on_device:  # there gradients are not known to be complete before the commit
                self.awaits_commit = step
            result = self._agree(batch, flags, loss_sum, weight, grad_norm)
            self.timer.mark("exposed")
        except BaseException as error:
            peers = self.world.group
            if peers is not None and is_communication_error(error):
                peers.fail(shorten_error(error))  # first, since a broken GPU may refuse all that follows
            if self.awaits_commit is None:
                self.sync.abandon()
            put_module_state(self._holders, before)  # running statistics must not count a step twice
            self.timer.drop()
            if peers is not None and peers.error is not None:
                raise peers.error from error  # autograd may have wrapped it
            raise
        if result is None:
            raise explain_non_finite(step, self.scheduled.rate, grad_norm, self._find_odd(batch))
        self.faults.reach("optimizer", step)
        self.update()
        self.timer.mark("optimizer")
        return result

    def update(self) -> None:
        """Update the weights with the gradients of a step that is committed."""
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.graphs is not None:
            without = tuple(place for place, each in enumerate(self.parameters) if each.grad is None)
            self.graphs.do_update(self._clip_and_update, key=without)
        else:
            self.optimizer.step()
        self.scheduled.advance()
        self.awaits_commit = None

    def _clip_and_update(self, _: Any) -> tuple[None, None]:
        if self.config.clip_norm is not None:
            factor = (self.config.clip_norm / (self._norm_here + EPSILON)).clamp(max=1.0)
            for gradient in self._gradients():
                gradient.mul_(factor)
        self._clip_values()
        self.optimizer.step()
        return None, None

    def _forward_backward(self, batch: Batch, step: int, flags: StepFlags) -> tuple[list[Tensor], float]:
        """Return the sums of this rank's losses, one for each pass, and what its samples weigh, and leave the gradient
        of the *global* mean in the parameters, on every rank."""
        sync = self.sync
        sums: list[Tensor] = []
        weight, total = self._weigh_batch(batch)
        share = self._no_share
        work, real = list(batch.passes), len(batch.micro_batches)
        # Where passes are collectives, all ranks make equally many, the last ones with a share of 0; so does a rank
        # whose part of a stream has ended.
        samples = batch.samples if batch.largest is None else batch.largest * self._micro_batches
        most = sync.passes(samples, self._micro_batches, self.limit.max_samples)
        work += [work[-1]] * (most - len(work))
        self.timer.mark("other")
        graphs = self._graphs_of_passes(batch)
        for place, part in enumerate(work):
            self._seed(micro_batch_seed(self.config.seed, step, part.number, part.place))
            self.faults.reach("forward", step)
            if place == real:
                share, held = self._no_share, read_module_state(self._holders)
            if graphs is not None:
                share = self._share_of(total()) if place == 0 and real else share
                self.faults.reach("backward", step)
                sync.require_sync(False)
                loss = self._pass_by(graphs, part, share)
                sums.append(loss if place < real else torch.zeros_like(loss))
                continue
            sync.begin_forward()
            loss = self._losses(self.loss, part.count, part.data).sum()
            if place < real or not real:
                sums.append(loss.detach() if real else torch.zeros_like(loss.detach()))
            if place == 0 and real:
                share = self._share_of(total())
            self.timer.mark("forward")
            self.faults.reach("backward", step)
            is_last = place == len(work) - 1
            sync.require_sync(is_last)
            if is_last:
                self._commit_with_last_bucket(batch, flags, sums)
            self._backward(loss, share)
            if not is_last:  # which `GradientSynchronizer.finish` waits for
                self.timer.mark("backward")
        if len(work) > real:
            put_module_state(self._holders, held)
        if graphs is not None:
            sync.require_sync(True)  # all gradients are there: `finish` hands over all buckets
            self._commit_with_last_bucket(batch, flags, sums)
        return sums, weight

    def _share_of(self, whole: float) -> Tensor:
        """Return what the loss is multiplied by. Gradients are summed over ranks, not averaged: that makes the sum the
        gradient of the mean over the global batch."""
        return torch.full((), 1.0 / whole if whole else 0.0, device=self.device)

    def _commit_with_last_bucket(self, batch: Batch, flags: StepFlags, sums: list[Tensor]) -> None:
        if self.device.type == "cpu" and self.world.group is not None:  # a GPU's losses are not there yet
            self.sync.on_last_bucket = partial(self._submit_commit, batch, flags, sums)

    def _graphs_of_passes(self, batch: Batch) -> StepGraphs | None:
        """Return the recordings if the passes of this step use them. Where some gradients are summed while a pass still
        computes others, that is worth more than a recording, unless those are required."""
        graphs = self.graphs
        if graphs is None:
            return None
        first = batch.passes[0]
        graphs.examine(self.module, first.data, partial(self.run_alone, first.data, first.count))
        is_overlapped = self.sync.overlaps and self.config.cuda_graphs == "auto"
        return graphs if graphs.is_used and not is_overlapped else None

    def _pass_by(self, graphs: StepGraphs, part: Samples, share: Tensor) -> Tensor:
        """Return the sum of a micro-batch's losses, after its gradients were added."""

        def work(given: tuple[Any, Tensor]) -> tuple[Tensor, list[set[int]]]:
            data, share = given
            loss = self._losses(self.loss, part.count, data).sum()
            self._backward(loss, share)
            return loss.detach(), self.sync.used_places()

        loss, used = graphs.do_pass(work, (part.data, share), key=part.count)
        self.sync.note_used(used)
        assert loss is not None
        return loss

    def _weigh_batch(self, batch: Batch) -> tuple[float, Callable[[], float]]:
        """Return what this rank's samples weigh, and a function that returns what those of all ranks do, which are
        summed meanwhile."""
        if self._weigh is None:
            return batch.local_samples, lambda: batch.samples
        found = [
            per_sample(self._weigh(part.data), part.count, "the loss", summed=True).double().sum()
            for part in batch.micro_batches
        ]
        mine = torch.stack(found).sum().cpu() if found else torch.zeros((), dtype=torch.float64)
        if self.world.group is None:
            return mine.item(), mine.item
        total = self.world.group.submit("weights of the samples", partial(summed, mine.clone()), mine.nbytes)
        return mine.item(), lambda: total.result().item()

    def _backward(self, loss: Tensor, share: Tensor) -> None:
        self.scaler.scale(loss).backward(share)

    def _plain_loss(self, data: Any) -> Tensor:
        return self.task.loss(self.module, data)

    def _make_loss(self, model: Any) -> Callable[[Any], Tensor]:
        if self.config.compile == "off":
            return partial(self.task.loss, model)
        made: Callable[[Any], Tensor] = load(COMPILED)(self.task, model, self.config.compile, self.device)
        return made

    def _losses(self, loss: Callable[[Any], Tensor], count: int, data: Any) -> Tensor:
        """Return the loss of each of ``count`` samples."""
        if self._kind is None:
            losses = loss(data)
        else:
            with torch.autocast(self.device.type, dtype=self._kind):
                losses = loss(data)
        return per_sample(losses, count, "the loss", summed=self._weigh is not None)

    def _find_odd(self, batch: Batch) -> str:
        """Return what is not finite in the samples of a global batch, "" where all are. A collective."""
        held, mine = read_module_state(self._holders), list[tuple[bool, str]]()
        for part in batch.micro_batches:
            losses = torch.zeros(part.count)
            if not self.divides_parameters:
                with suppress(Exception), torch.enable_grad():
                    losses = self._losses(self._plain_loss, part.count, part.data).detach()
            said = ""
            if (found := find_odd_row(part.data, losses)) is not None:
                row, name, value = found
                sample = "a sample" if part.positions is None else f"sample {part.positions[row]}"
                said = f"{sample} of the training split has {value} in {name}: fix that sample, or leave it out"
            mine.append((not bool(torch.isfinite(losses).all()), said))
        put_module_state(self._holders, held)
        every = [each for told in self.world.all_gather_object(mine) for each in told]
        odd = [each for each in every if each[0]]
        return next((said for _, said in odd or every if said), "")

    def _make_optimizer(self) -> ScheduledOptimizer:
        recorded_on = None if self.graphs is None else self.device
        return ScheduledOptimizer(self.module, self._recipe, self.config, self._total_steps, recorded_on)

    def _make_graphs(self) -> StepGraphs | None:
        """Return what records this step, None where it is never recorded."""
        mode = self.config.cuda_graphs
        if mode == "on" and self.device.type != "cuda":
            raise ConfigError("training.cuda_graphs = 'on' needs a GPU; use 'auto', which records where there is one")
        if mode == "on" and not self._recipe.is_usual:
            raise ConfigError(
                "training.cuda_graphs = 'on' records AdamW with the schedule of the settings: use 'auto', which trains "
                "without recordings with an optimizer or a scheduler of your own"
            )
        if mode == "off" or self.device.type != "cuda" or not can_record(self.config) or not self._recipe.is_usual:
            return None
        made: StepGraphs = load(GRAPHS)(load(CUDA_RECORDER)(self.device), _log.warning, mode == "on")
        return made

    def _seed(self, seed: int) -> None:
        """Seed torch's generator of this device only: `torch.manual_seed` formats a stack trace for GPUs even where
        there are none, which takes as long as a small model's forward pass."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _measure_norm(self) -> Tensor:
        """Return the norm of the whole gradient, before clipping, like `torch.nn.utils`."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        return self.sync.whole_norm(gradient_norm(self._gradients(), self.device))

    @property
    def _commits_on_device(self) -> bool:
        """Whether the commit is a sum on the device, after those of the gradients, so that the host waits once in a
        step. A rank that holds rows has to know first whether its gradients are complete."""
        group = self.world.group
        return group is not None and group.events is not None and not self.is_divided

    def _read(self, batch: Batch, flags: StepFlags, losses: list[Tensor], norm: Tensor) -> tuple[float, float]:
        """Return the sum of this rank's losses and the norm: the place at which the host waits for the device."""
        if self._commits_on_device:
            group = self.world.group
            assert group is not None
            counts = count_step(batch, flags, False, self.sync.missing_flags()).to(self.device, non_blocking=True)
            counts[0] = ~torch.isfinite(torch.stack(losses)).all()
            group.submit(_COMMIT, partial(summed, counts), counts.nbytes).result()
            *numbers, found = group.fetch(*losses, norm, counts)
            self._commit = CompletedCollective(found)
            *sums, grad_norm = [each.item() for each in numbers]
        else:
            read = [*losses, norm]
            *sums, grad_norm = [it.item() for it in read] if norm.is_cpu else torch.stack(read).tolist()
        return sum(sums), grad_norm

    def _clip(self, grad_norm: float, norm: Tensor) -> None:
        limit = self.config.clip_norm
        if self.graphs is not None and not self.scaler.is_enabled():
            self._norm_here.copy_(norm)  # `update` clips
        elif limit is not None and grad_norm + EPSILON > limit:  # else every gradient would be multiplied by one
            for gradient in self._gradients():
                gradient.mul_(limit / (grad_norm + EPSILON))
        else:
            self._clip_values()

    def _clip_values(self) -> None:
        if (limit := self.config.clip_value) is not None:
            for gradient in self._gradients():
                gradient.clamp_(-limit, limit)

    def _gradients(self) -> list[Tensor]:
        found = self.sync.flat_gradients()
        return [each.grad for each in self.parameters if each.grad is not None] if found is None else found

    def _submit_commit(self, batch: Batch, flags: StepFlags, losses: list[Tensor]) -> None:
        """Submit the commit right behind the last gradients: no thread has to wake up in between."""
        assert self.world.group is not None
        broken = not all(math.isfinite(loss.item()) for loss in losses)
        counts = count_step(batch, flags, broken, self.sync.missing_flags())
        self._commit = self.world.group.all_reduce(_COMMIT, counts)

    def _agree(
        self, batch: Batch, flags: StepFlags, loss_sum: float, weight: float, grad_norm: float
    ) -> StepResult | None:
        """Wait for the one small all-reduce that commits a step. Return None if any rank's numbers are not finite."""
        # With a scaler an overflow is usual: the scaler leaves that step out and lowers its scale.
        is_finite = math.isfinite(grad_norm) or self.scaler.is_enabled()
        if self._commit is not None:
            commit, self._commit = self._commit, None
            counts = commit.result()
        else:
            broken = not (math.isfinite(loss_sum) and is_finite)
            counts = self.world.all_reduce(count_step(batch, flags, broken, self.sync.missing_flags()), _COMMIT)
        broken_on, leaving, regroup, cut_off, budget, ending, samples, digest, *without = counts.tolist()
        if broken_on or not is_finite:  # what was summed is the same on all ranks
            return None
        if samples != batch.samples:
            raise RuntimeError(f"the ranks used {samples} samples of a batch of {batch.samples}: they disagree")
        self.sync.drop_unused(without)
        return StepResult(loss_sum, weight, grad_norm, StepFlags(leaving, regroup, cut_off, budget, ending), digest)

    def take_whole(self) -> None:
        """Let the module hold the present weights: it always does where a rank has all of them."""

    def run_alone(self, data: Any, count: int) -> None:
        """Put a batch of ``count`` samples through the model and back, without other ranks and without a step. Weights,
        their gradients and running statistics stay as they are. The model is run as it is written, not compiled."""
        before = read_module_state(self._holders)
        try:
            self.module.train()
            loss = self._losses(self._plain_loss, count, data).sum()
            torch.autograd.grad(self.scaler.scale(loss), self.parameters, allow_unused=True)
        finally:
            put_module_state(self._holders, before)

    def release(self) -> None:
        """Leave the model as any other: without hooks and gradients."""
        self.sync.unwrap()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the loss scaler, where each rank holds all of it."""
        optimizer = {"state": self.scheduled.tensors(), **self.scheduled.options()}
        return {"optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned."""
        self.scheduled.load(state["optimizer"]["state"], state["optimizer"])
        if self.graphs is not None:
            self.graphs.clear()
        if state["scaler"]:  # which only training in fp16 has
            self.scaler.load_state_dict(state["scaler"])
