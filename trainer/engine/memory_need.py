"""The memory that a pass of forward and backward takes, measured by size once all steps against running out are used
up, and the words on what would fit.

The steps themselves are `trainer.engine.out_of_memory`; `trainer.engine.joining` takes them, and loads this then.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import DistributedTrainingConfig
from trainer.data.loader import TrainingData
from trainer.engine.interruptions import GPUTooSmall, OutOfMemoryError
from trainer.engine.out_of_memory import is_out_of_memory
from trainer.engine.precision import tf32_products
from trainer.engine.session import Session
from trainer.engine.step import TrainingStep
from trainer.model.sizes import model_bytes
from trainer.performance.memory import ModelBytes, format_bytes, rank_bytes
from trainer.runtime.host_memory import allocatable_bytes, give_back_freed_memory, machine_bytes
from trainer.runtime.nested import leaves_of

SAFETY = 0.05
"""The share by which a pass may take more than was measured, as the memory of an allocator lies in pieces."""
WORTH = 0.9
"""The share of a pass's memory below which another precision is worth naming."""
_GPU_WORDS = ("CUDA", "CUBLAS", "CUDNN", "HIP")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """What passes of some sizes take beside what is held between steps, in bytes."""

    device: str
    """``cuda`` or ``cpu``."""
    total_bytes: int
    """Memory of the device, or what this process may have of the host's."""
    room_bytes: int
    """What was free for a pass."""
    wanted: int
    """Samples at once for which memory did not suffice."""
    measured: tuple[tuple[int, int], ...] = ()
    """(samples, bytes at the peak) of the passes that were possible, in ascending order."""
    failed: int | None = None
    """The smallest number of samples for which memory ran out while this was measured."""
    in_bf16: tuple[int, float] | None = None
    """Of a pass in bf16 with as many samples as the largest one that was measured: bytes, and its seconds ÷ those in
    the precision of the training. None: it was not measured."""

    state_bytes: int = 0
    """Of what is held: parameters, their gradients and moments, where each rank holds all of them."""
    gathered_bytes: int = 0
    """What a rank would gather at once of a model that ranks share."""
    ranks: int = 1
    """The ranks that train."""

    @property
    def sample_bytes(self) -> float | None:
        """Return the bytes that one more sample takes; None where fewer than two sizes could be measured."""
        if len(self.measured) < 2:
            return None
        (few, low), (many, high) = self.measured[-2:]
        return max(0.0, (high - low) / (many - few))

    def pass_bytes(self, samples: int) -> int | None:
        """Return the bytes of a pass of this many samples; at most these where one size alone was measured, and None
        where none was."""
        if not self.measured:
            return None
        known, taken = self.measured[-1]
        slope = self.sample_bytes
        if slope is None:
            return taken * max(1, math.ceil(samples / known))
        return round(taken + slope * (samples - known))

    def device_bytes(self, samples: int) -> int | None:
        """Return the memory that a device needs in all for passes of this many samples, `SAFETY` included."""
        taken = self.pass_bytes(samples)
        return None if taken is None else round((self.total_bytes - self.room_bytes + taken) * (1 + SAFETY))

    def shared_bytes(self, ranks: int) -> int | None:
        """Return the memory that each of these ranks needs for passes of the wanted size, if they share the model."""
        whole = self.device_bytes(self.wanted)
        if whole is None or not self.state_bytes:
            return None
        return round(whole - self.state_bytes * (1 - 1 / ranks) + self.gathered_bytes)

    @property
    def sharing_ranks(self) -> int | None:
        """Return the fewest ranks, at least those that train, on which the wanted size fits if they share the model;
        None where that does not help."""
        for ranks in (max(2, self.ranks), *(count for count in (4, 8, 16, 32, 64) if count > self.ranks)):
            needed = self.shared_bytes(ranks)
            if needed is not None and needed <= self.total_bytes:
                return ranks
        return None

    @property
    def fits(self) -> int:
        """Return the most samples at once that fit here, at most `wanted`; 0 where not even one was possible."""
        if not self.measured:
            return 0
        known, taken = self.measured[-1]
        most = known
        if self.sample_bytes:
            most = max(known, known + math.floor((self.room_bytes * (1 - SAFETY) - taken) / self.sample_bytes))
        return min(most, self.wanted, self.wanted if self.failed is None else self.failed - 1)

    def facts(self) -> dict[str, Any]:
        """Return the figures as they stand in ``result.json``."""
        return {
            "device": self.device,
            "total_bytes": self.total_bytes,
            "free_bytes": self.room_bytes,
            "wanted_samples": self.wanted,
            "fitting_samples": self.fits,
            "needed_bytes": self.device_bytes(self.wanted),
            "measured": [list(pair) for pair in self.measured],
        }


def explain_end(session: Session, error: Exception, is_world_fixed: bool) -> Exception:
    """Save what is done, and return the error that ends this process: `GPUTooSmall` where the training may go on on the
    CPU; else `OutOfMemoryError`, with what passes of several sizes take, as measured now, and what would fit."""
    step, now, config = session.progress.step, session.step.limit, session.config
    what = f"out of memory at step {step + 1} with {now.max_samples} samples at once"
    what += " and activation checkpointing" if now.activation_checkpointing else ""
    if session.world.rank == 0 and step > 0:
        with suppress(Exception):  # memory is short: then the last checkpoint stays the last
            session.save_at_end(agreed=False)
    if may_move_to_cpu(error, config, is_world_fixed):
        return GPUTooSmall(f'{what}: it may continue on the CPU (training.backend = "gloo")')
    if session.step.divides_parameters:  # one rank cannot make a pass by itself
        model = model_bytes(session.step.module, moments=session.step.scheduled.recipe.moments)
        told = explain_sharded(config, session.world.world_size, max(2, session.step.sharing), model)
        return OutOfMemoryError(f"{what} ({str(error).splitlines()[0]}); {told}", {})
    need = measure_memory(session.step, session.problem.data, now.max_samples)
    _log.info("what a pass takes: %s", need)
    together = ""
    if not session.step.can_regroup and session.world.world_size > 1:
        together = (
            "; with DeepSpeed its ranks cannot agree on smaller parts of a micro-batch: lower "
            "training.batch_size_per_gpu"
        )
    elif is_world_fixed:
        together = (
            "; its ranks cannot agree on smaller parts of a micro-batch, since their world is fixed: start them with "
            "`dtrain train`"
        )
    return OutOfMemoryError(
        f"{what} ({(str(error) or type(error).__name__).splitlines()[0]}){together}; {explain_need(need, config)}",
        need.facts(),
    )


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Return whether it is a GPU's memory that ran out, by the words of torch's own errors."""
    return is_out_of_memory(error) and any(words in str(error) for words in _GPU_WORDS)


def may_move_to_cpu(error: BaseException, config: DistributedTrainingConfig, is_world_fixed: bool) -> bool:
    """Return whether the training goes on on the CPU after the last step against running out of memory: it was a GPU's
    memory, ``backend`` leaves the choice of the device open, the precision exists on a CPU, and this process may leave
    its peers. Pure."""
    is_free = config.backend == "auto" and config.precision not in ("fp16", "tf32") and not is_world_fixed
    return is_free and is_gpu_out_of_memory(error)


def measure_memory(step: TrainingStep, data: TrainingData, wanted: int) -> MemoryNeed:
    """Return what passes of 1, 2, 4 … samples take, up to ``wanted`` of them or until memory runs out. The gradients of
    the model are useless afterwards; its weights and running statistics stay."""
    device = step.device
    _free(device)
    total, room = _memory_of(device)
    measured: list[tuple[int, int]] = []
    failed = in_bf16 = None

    def pass_of(samples: int) -> Callable[[], None]:
        positions = np.arange(min(samples, data.count("train")))
        return partial(step.run_alone, data.read("train", positions, device), len(positions))

    for samples in sorted({1 << power for power in range(wanted.bit_length()) if 1 << power <= wanted} | {wanted}):
        try:
            taken = _peak_of(pass_of(samples), device)
        except Exception as error:
            if is_out_of_memory(error):
                failed = samples
                break
            # Such as of a normalisation over a batch of one. The error to report is the one before.
            _log.info("a pass of %d samples could not be measured: %s", samples, error)
            continue
        finally:
            _free(device)
        measured.append((samples, taken))
    if measured and step.config.precision in ("fp32", "tf32"):
        run = pass_of(measured[-1][0])
        in_bf16 = _compare_bf16(tf32_products()(run) if step.config.precision == "tf32" else run, device)
    model = model_bytes(step.module, moments=step.scheduled.recipe.moments)
    room = max([room, *(taken for _, taken in measured)])  # what is freed may lie in pieces that the limit counts
    return MemoryNeed(
        device=device.type,
        total_bytes=max(total, room),
        room_bytes=room,
        wanted=wanted,
        measured=tuple(measured),
        failed=failed,
        in_bf16=in_bf16,
        state_bytes=rank_bytes(model, 1).held,
        gathered_bytes=model.gathered(),
        ranks=step.world.world_size,
    )


def explain_need(need: MemoryNeed, config: DistributedTrainingConfig) -> str:
    """Return what was measured, and the settings with which the training would fit, as sentences. Pure."""
    where = "GPU" if need.device == "cuda" else "host"
    if not need.measured:
        told = f"not even one sample fits into the {format_bytes(need.room_bytes)} that the {where} has free"
    else:
        parts = [
            f"{format_bytes(taken)} with {samples} sample{'s' if samples > 1 else ''} at once"
            for samples, taken in (need.measured[-2:])
        ]
        told = f"a pass takes {' and '.join(parts)}, and the {where} has {format_bytes(need.room_bytes)} free"
    ways = _ways(need, config, where)
    return f"measured: {told}. What would fit: {'; '.join(ways)}"


def explain_sharded(config: DistributedTrainingConfig, ranks: int, sharing: int, model: ModelBytes) -> str:
    """Return what each of ``ranks`` needs of a model of which ``sharing`` ranks hold one copy, and what would fit where
    memory has run out: a pass of it cannot be measured by one rank alone. Pure."""

    def told(count: int) -> str:
        need = rank_bytes(model, count, gather_precision=config.gather_precision)
        return f"{format_bytes(need.held)} and {format_bytes(need.gathered)} gathered"

    where = "on each node" if config.strategy == "hsdp" else "in one copy of the model"
    ways = [f"more ranks than {sharing} {where} (on {2 * sharing}: {told(2 * sharing)})"]
    if config.strategy == "hsdp" and ranks > sharing:
        ways.append(f'training.strategy = "fsdp", with which all {ranks} ranks share one copy ({told(ranks)})')
    if config.gather_precision == "fp32":
        ways.append('training.gather_precision = "bf16"')
    if not config.activation_checkpointing:
        ways.append("training.activation_checkpointing = true from the first step on")
    ways.append("a lower training.batch_size_per_gpu")
    return f"each rank holds {told(sharing)} at once, beside its activations. What would need less: {'; '.join(ways)}"


def _ways(need: MemoryNeed, config: DistributedTrainingConfig, where: str) -> list[str]:
    ways = []
    if need.fits >= need.wanted:
        ways.append("the same settings, if another program held the memory meanwhile: start the job again")
    elif need.fits:
        setting = (
            "training.micro_batch_floor" if need.fits < config.micro_batch_floor else "training.batch_size_per_gpu"
        )
        ways.append(f"{setting} = {need.fits}, as at most {need.fits} of {need.wanted} samples fit at once")
    if not config.is_sharded and need.fits < need.wanted and (ranks := need.sharing_ranks) is not None:
        each = format_bytes(need.shared_bytes(ranks) or 0)
        ways.append(f'training.strategy = "fsdp": on {ranks} ranks that share the model it takes {each} each')
    if need.in_bf16 is not None and need.in_bf16[0] < WORTH * need.measured[-1][1]:
        (samples, usual), (taken, times) = need.measured[-1], need.in_bf16
        ways.append(
            f'training.precision = "bf16", in which a pass with {samples} at once takes {format_bytes(taken)} instead '
            f"of {format_bytes(usual)}, and {times:.2g} times the time"
        )
    all_bytes = need.device_bytes(need.wanted)
    if all_bytes is not None and need.fits < need.wanted:
        kind = "a GPU" if need.device == "cuda" else "nodes"
        ways.append(
            f"{kind} with {format_bytes(all_bytes)} for {need.wanted} samples at once, "
            f"instead of {format_bytes(need.total_bytes)}"
        )
    elif all_bytes is None:
        ways.append(f"a {where} with more than {format_bytes(need.total_bytes)}")
    if need.device == "cuda":
        ways.append(f'the CPU (training.backend = "gloo"), whose host has {format_bytes(machine_bytes())}')
    else:
        ways.append("fewer ranks on each host (--procs-per-node, DTRAIN_PROCESSES_PER_NODE), which share its memory")
    ways.append("a smaller model")
    return ways


def _compare_bf16(run: Callable[[], None], device: torch.device) -> tuple[int, float] | None:
    """Return the bytes of a pass in bf16, and its seconds ÷ those without; None where it fails."""

    def in_bf16() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            run()

    try:
        taken = _peak_of(in_bf16, device)
        return taken, _seconds_of(in_bf16, device) / _seconds_of(run, device)
    except Exception as error:
        _log.info("a pass in bf16 could not be measured: %s", error)
        return None
    finally:
        _free(device)


def _seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Return how long this takes, once it has run before."""
    began = time.monotonic()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - began


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()


def _memory_of(device: torch.device) -> tuple[int, int]:
    """Return (all, free) bytes for this process."""
    if device.type != "cuda":
        room, total = allocatable_bytes()
        return total, room
    free, total = torch.cuda.mem_get_info(device)
    limit = round(torch.cuda.get_per_process_memory_fraction(device) * total)
    held = torch.cuda.memory_reserved(device)
    return min(total, limit), max(0, min(free, limit - held)) + held - torch.cuda.memory_allocated(device)


def _peak_of(run: Callable[[], None], device: torch.device) -> int:
    """Return the bytes that were held at once while this ran, beside those before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveStorages() as live:
        run()
    return live.most


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of all tensors that live at once on the CPU, whose allocator counts none: of those made while
    it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {part.untyped_storage()._cdata for part in leaves_of((args, kwargs)) if isinstance(part, torch.Tensor)}
        for part in leaves_of(result):
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                if storage._cdata not in self._known | given and storage.nbytes():
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
