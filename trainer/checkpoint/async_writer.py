"""The thread that writes checkpoints: in order, at the lowest priority, again after a failure, and never waited for;
and the copies of a state that it writes."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.runtime.nested import map_leaves
from trainer.runtime.retry import RetryPolicy

RETRIES = RetryPolicy(first_pause_seconds=0.5, max_attempts=5, log_level=logging.WARNING)
"""The policy for writing one checkpoint."""
SILENT_SECONDS = 30.0
"""A write that takes longer than that is reported: storage stalls."""
WRITER = "checkpoints"
"""Name of the thread."""
_log = logging.getLogger(__name__)


class Stage:
    """A set of CPU buffers for one copy of a state: the only part of a save that training waits for.

    Memory is asked for at the first copy only (new memory costs a page fault for every 4 KiB that is written to it) and
    when shapes change.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, state: Any) -> Any:
        """Return the state with every tensor replaced by its copy in this stage, and every plain value copied. The
        result of an earlier call is overwritten. Tensors that share their memory do so in the copy."""
        buffers, sources, copies = iter(self._buffers), [], []
        known: dict[tuple[Any, ...], Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
                return tensor.cpu().clone()  # no kind that the stock trainer has
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and place in known:
                return known[place]
            buffer = next(buffers, None)
            pinned = tensor.is_cuda  # which lets the device copy by itself, all tensors at once
            if (
                buffer is None
                or buffer.shape != tensor.shape
                or buffer.dtype != tensor.dtype
                or (pinned and not buffer.is_pinned())
            ):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            sources.append(tensor)
            copies.append(buffer)
            known[place] = buffer
            return buffer

        with torch.no_grad():
            result = map_leaves(lambda part: take(part) if isinstance(part, Tensor) else copy.deepcopy(part), state)
            for buffer, source in zip(copies, sources, strict=True):
                buffer.copy_(source, non_blocking=True)
            for device in {source.device for source in sources if source.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
        self._buffers = copies
        return result


@dataclass(slots=True, eq=False)
class Save:
    """A state that is to be written."""

    state: Any
    step: int
    generation: int
    is_best: bool
    stage: Stage
    authority: int
    """The generation on whose behalf it is made to count: its own, or a newer one that this process leads."""
    stall_seconds: float = 0.0
    """The seconds that `Writer.put` took."""
    began: float = 0.0
    attempt: int = 1
    told: bool = False


class Writer:
    """A thread that calls ``commit`` for each save that was put, and retries by `RETRIES` if it fails.

    ``commit`` returns fields to report. An error in ``final`` is not retried.
    """

    def __init__(
        self,
        commit: Callable[[Save], dict[str, Any]],
        report: Callable[..., None],
        final: tuple[type[Exception], ...] = (),
    ) -> None:
        self._commit, self._report, self._final = commit, report, final
        self._turn = threading.Condition()
        self._free = [Stage(), Stage()]  # one is written while one waits; empty until used
        self._busy: Save | None = None
        self._waiting: Save | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def put(self, state: Any, step: int, generation: int, is_best: bool, is_last: bool = False) -> bool:
        """Copy a state and queue it to be written; return False if there is no room. Call it from one thread only."""
        began = time.monotonic()
        with self._turn:
            self._tell_if_silent(began)
            if self._closing.is_set():
                return False
            if self._waiting is not None:
                # So a best one is either written or made needless by a better one: BEST ends at the best step.
                if not (is_best or (is_last and not self._waiting.is_best)):
                    return False
                self._free.append(self._waiting.stage)
                self._waiting = None
            stage = self._free.pop()
        try:
            save = Save(stage.copy(state), step, generation, is_best, stage, authority=generation)
        except BaseException:
            self._free.append(stage)
            raise
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=WRITER, daemon=True)
                self._thread.start()
            save.stall_seconds = time.monotonic() - began
            self._waiting = save
            self._turn.notify_all()
        return True

    @property
    def has_room(self) -> bool:
        """Whether `put` would take a state without giving up another."""
        with self._turn:
            return self._waiting is None and not self._closing.is_set()

    def promote(self, generation: int) -> None:
        """Make what was put so far count on behalf of this generation."""
        with self._turn:
            for save in (self._busy, self._waiting):
                if save is not None:
                    save.authority = max(save.authority, generation)

    def wait(self, seconds: float | None) -> bool:
        """Wait until every save is written or given up; return False if that takes longer than ``seconds``."""
        with self._turn:
            return self._turn.wait_for(lambda: self._busy is None and self._waiting is None, seconds)

    def close(self, seconds: float | None) -> None:
        """Wait, end the thread, and refuse further saves. A thread that is still busy stops at its next failure."""
        self.wait(seconds)
        with self._turn:
            self._closing.set()
            self._turn.notify_all()
        if self._thread is not None and self._busy is None:
            self._thread.join(seconds)

    def _work(self) -> None:
        _yield_to_training()
        while True:
            with self._turn:
                while self._waiting is None:
                    if self._closing.is_set():
                        return
                    self._turn.wait()
                save, self._waiting = self._waiting, None
                save.began = time.monotonic()
                self._busy = save
            self._carry_out(save)
            with self._turn:
                self._free.append(save.stage)
                self._busy = None
                self._turn.notify_all()

    def _carry_out(self, save: Save) -> None:
        def tell(error: BaseException, gives_up: bool) -> None:
            message = f"{type(error).__name__}: {error}"
            self._report("checkpoint_failed", step=save.step, attempt=save.attempt, message=message, gives_up=gives_up)

        def pause(seconds: float) -> None:
            self._closing.wait(seconds)
            save.attempt += 1

        what = f"the checkpoint of step {save.step} failed"
        try:
            done = RETRIES.call(
                what,
                lambda: self._commit(save),
                lambda error: not (isinstance(error, self._final) or self._closing.is_set()),
                on_retry=lambda error, seconds: tell(error, gives_up=False),
                pause=pause,
            )
        except Exception as error:  # of whatever kind: file systems have their own
            _log.warning("%s for good (attempt %d): %s", what, save.attempt, error)
            tell(error, gives_up=True)
            return
        seconds = time.monotonic() - save.began
        self._report(
            "checkpoint",
            step=save.step,
            seconds=seconds,
            stall_seconds=save.stall_seconds,
            is_best=save.is_best,
            **done,
        )

    def _tell_if_silent(self, now: float) -> None:
        save = self._busy
        if save is not None and not save.told and now - save.began > SILENT_SECONDS:
            save.told = True
            message = f"still being written after {now - save.began:.0f} s: storage is slow or stalls; training goes on"
            self._report("checkpoint_failed", step=save.step, attempt=save.attempt, message=message, gives_up=False)


def _yield_to_training() -> None:
    """Give this thread the lowest priority where that is possible: it then works when training leaves a core idle."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
