"""CUDA graphs of a step: work on tensors is recorded once for each shape of its inputs, and then replayed.

A step of a small model spends most of its time in Python, which launches one kernel after the other. A graph launches
them all at once. A step has two: a pass (forward, loss, backward into the flat gradients), replayed for each
micro-batch, and the update (clipping, optimizer). Between them gradients are summed over ranks and the step is
committed, on the host and outside any graph: a failed sum never meets a graph that holds its communicator, and weights
change only after the commit.

A replay repeats kernels and no Python. `find_obstacle` looks for what Python does in a model that would be lost; such a
model trains without graphs, and the log says why. **No GPU has run this module yet**: tests replay recordings on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainer.engine.out_of_memory import is_out_of_memory
from trainer.errors import ConfigError
from trainer.runtime.nested import leaves_of, map_leaves

EAGER_CALLS = 3
"""Calls with each shape before it is recorded: in the first ones, libraries choose kernels and allocate workspaces."""
MOST_SHAPES = 8
"""Shapes that are recorded, the first ones; calls with further ones run as usual."""
_PLAIN = (bool, int, float, str, bytes, type(None))


class Recorder(Protocol):
    """The interface of what records the work on a device."""

    def new_pool(self) -> Any:
        """Return a pool of memory for recordings, none of which needs what it left there when it runs again."""
        ...

    def record(self, work: Callable[[], object], pool: Any) -> Callable[[], object]:
        """Return a function that repeats what ``work`` submits to the device, on the same memory. Nothing of it is done
        now. Raise RuntimeError where it cannot be recorded."""
        ...

    def forbid_waiting(self) -> AbstractContextManager[None]:
        """Return a context in which waiting for the device raises RuntimeError."""
        ...


class CudaRecorder:
    """Records CUDA graphs on the stream that this thread uses, which must not be the default one: autograd remembers
    the stream of each parameter, and no other can be waited for in a recording."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        current = torch.cuda.current_stream(device)
        if current != torch.cuda.default_stream(device):
            return  # such as that of another step of this thread, which goes on with it
        stream = torch.cuda.Stream(device)
        stream.wait_stream(current)
        torch.cuda.set_stream(stream)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], object], pool: Any) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        # Within a caller's own autocast, weights that were cast before would not be cast by replays, and those that are
        # cast in the recording would be used after it.
        torch.clear_autocast_cache()
        try:
            # Other threads may go on with their own work on the GPU, such as the communication thread.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        finally:
            torch.clear_autocast_cache()
        return graph.replay

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class RecordingError(RuntimeError):
    """Work that runs as usual could not be recorded. Nothing of the call was done."""


Work = Callable[[Any], tuple[Tensor | None, Any]]
"""Returns a tensor, and what Python knows of the work, which each replay returns again."""


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: list[Tensor]
    """The memory that the recorded work reads its inputs from."""
    output: Tensor | None
    note: Any
    replay: Callable[[], object]


class GraphedCall:
    """One piece of work, called with data of several shapes. The first ``eager_calls`` with each shape run as usual,
    and later ones replay a recording of that shape. All recordings share memory, of which each replay leaves only its
    output, until that is copied: so a small last batch takes no more than a full one."""

    def __init__(self, recorder: Recorder, eager_calls: int = EAGER_CALLS) -> None:
        self._recorder, self._eager_calls = recorder, eager_calls
        self._pool: Any = None
        self._calls: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, _Recording] = {}

    def __call__(self, work: Work, data: Any = None, key: Hashable = None) -> tuple[Tensor | None, Any]:
        """Do ``work(data)`` and return its result, which later calls do not change. ``data``: tensors in any structure;
        ``key``: what else the work depends on. Raise `RecordingError`, and what the work raises."""
        shape = (key, shape_of(data))
        recording = self._recordings.get(shape)
        if recording is None:
            if shape not in self._calls and len(self._calls) >= MOST_SHAPES:
                return work(data)
            self._calls[shape] = self._calls.get(shape, 0) + 1
            if self._calls[shape] <= self._eager_calls:
                return work(data)
            recording = self._recordings[shape] = self._record(work, data)
        else:
            for mine, given in zip(recording.inputs, _tensors(data), strict=True):
                mine.copy_(given, non_blocking=True)
        recording.replay()
        return None if recording.output is None else recording.output.clone(), recording.note

    def clear(self) -> None:
        """Forget all recordings: something that they read or write is elsewhere now."""
        self._calls.clear()
        self._recordings.clear()
        self._pool = None  # torch takes none again whose recordings are all gone

    @property
    def count(self) -> int:
        """The number of shapes that are recorded."""
        return len(self._recordings)

    def _record(self, work: Work, data: Any) -> _Recording:
        own = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, data)
        found: list[tuple[Tensor | None, Any]] = []
        if self._pool is None:
            self._pool = self._recorder.new_pool()
        try:
            replay = self._recorder.record(lambda: found.append(work(own)), self._pool)
        except RuntimeError as error:
            # What ends a recording may fail in turn, and hide that memory ran out within it.
            for cause in (error, error.__context__):
                if cause is not None and is_out_of_memory(cause):
                    raise cause from None
            raise RecordingError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        return _Recording(list(_tensors(own)), *found[-1], replay)


def shape_of(data: Any) -> str:
    """Return what a recording with these inputs depends on: their structure, shapes and types of tensors, and all other
    values."""
    return repr(map_leaves(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf, data))


def _tensors(data: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(data) if isinstance(leaf, Tensor))


def find_obstacle(module: nn.Module, data: Any, run: Callable[[], object], recorder: Recorder) -> str:
    """Return why passes through a model cannot be replayed, "" where nothing was found. ``data``: a batch; ``run`` puts
    it through the model and back, and leaves no trace in weights and gradients."""
    if odd := [type(leaf).__name__ for leaf in leaves_of(data) if not isinstance(leaf, (Tensor, *_PLAIN))]:
        return f"its batches hold values of type {odd[0]}"
    for name, part in module.named_modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if any(hooks):
            return f"{_called(name, part)} has hooks, which a replay would not call"
        for own, parameter in part.named_parameters(recurse=False):
            if parameter._backward_hooks:
                return f"the parameter {own} of {_called(name, part)} has hooks, which a replay would not call"
    run()  # what a model makes in its first pass is no sign of more in each
    before = _python_state(module)
    try:
        with recorder.forbid_waiting():
            run()
    except RuntimeError as error:
        return f"a pass waits for the GPU, such as by .item() or a condition on a tensor ({str(error).splitlines()[0]})"
    after = _python_state(module)
    return next((f"a pass changes {what}" for what in before if before[what] != after.get(what)), "") or next(
        (f"a pass makes {what}" for what in after if what not in before), ""
    )


def _called(name: str, part: nn.Module) -> str:
    return f"the module {name} ({type(part).__name__})" if name else f"the model ({type(part).__name__})"


def _python_state(module: nn.Module) -> dict[str, Any]:
    """Return what a pass must leave as it is: Python's and NumPy's random numbers, and what modules hold beside tensors
    that are changed in place."""
    found: dict[str, Any] = {
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": [str(part) for part in np.random.get_state(legacy=True)],
    }
    for name, part in module.named_modules():
        where = f"{name}." if name else ""
        for own, value in [*vars(part).items(), *part.named_buffers(recurse=False)]:
            if isinstance(value, _PLAIN):
                found[where + own] = value
            elif isinstance(value, Tensor):
                found[where + own] = value.data_ptr()
            elif isinstance(value, list | tuple | dict | set) and not own.startswith("_"):
                found[where + own] = len(value)
    return found


class _Evaluated:
    """The forward passes of a model that evaluates. Those of full batches, which the first one is, are replayed."""

    def __init__(self, module: nn.Module, recorder: Recorder, refuse: Callable[[str], object]) -> None:
        """``refuse`` is called with the reason why they cannot be replayed."""
        self._module, self._recorder, self._tell_refused = module, recorder, refuse
        self._usual: Callable[..., Any] = module.forward
        self._call = GraphedCall(recorder, eager_calls=0)
        self._full, self._eager_calls, self._is_refused = "", 0, False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        shape = shape_of(inputs)
        self._full = self._full or shape
        is_plain = not (named or self._module.training or torch.is_grad_enabled())
        is_cast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        if self._is_refused or shape != self._full or is_cast or not is_plain:
            return self._usual(*inputs, **named)
        if self._eager_calls < EAGER_CALLS:
            self._eager_calls += 1
            outputs = self._usual(*inputs)
            if not isinstance(outputs, Tensor):
                self._refuse("its outputs are no single tensor")
            return outputs
        try:
            if not self._call.count:
                self._refuse(find_obstacle(self._module, inputs, partial(self._usual, *inputs), self._recorder))
            if not self._is_refused:
                return self._call(lambda given: (self._usual(*given), None), inputs)[0]
        except (RecordingError, torch.OutOfMemoryError) as error:
            self._refuse(str(error).splitlines()[0])
        return self._usual(*inputs)

    def _refuse(self, why: str) -> None:
        self._is_refused = bool(why)
        if why:
            self._tell_refused(why)


class StepGraphs:
    """The two graphs of a step, on one model and its optimizer. They are used once `examine` has found no obstacle; so
    is a third one, of the forward pass, while the model evaluates."""

    def __init__(self, recorder: Recorder, tell: Callable[[str], object], is_required: bool) -> None:
        """``tell`` is called once with the reason why a model trains without graphs; with ``is_required`` that is a
        `ConfigError`."""
        self._tell, self._is_required = tell, is_required
        self._recorder = recorder
        self.is_used: bool | None = None
        """Whether passes are replayed; None until that is known."""
        self._passes, self._updates = GraphedCall(recorder), GraphedCall(recorder)
        self._may_evaluate = True

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[None]:
        """Replay the passes of a model that evaluates full batches, until the block ends. Weights may not move in it,
        nor does it leave recordings, which are memory, behind."""
        if not self.is_used or not self._may_evaluate:
            yield
            return
        before = vars(module).get("forward")
        module.forward = _Evaluated(module, self._recorder, self._refuse_evaluation)
        try:
            yield
        finally:
            del module.forward
            if before is not None:
                module.forward = before

    def _refuse_evaluation(self, why: str) -> None:
        self._may_evaluate = False
        self._tell(f"evaluations run without CUDA graphs: {why}")

    def examine(self, module: nn.Module, data: Any, run: Callable[[], object]) -> None:
        """Find out whether this model's passes can be replayed; see `find_obstacle`."""
        if self.is_used is None:
            self.refuse(find_obstacle(module, data, run, self._recorder))

    def refuse(self, why: str) -> None:
        """Train without graphs from now on, for this reason; with none, use them. Raise `ConfigError` where they
        are required."""
        self.is_used = not why
        if not why:
            return
        self.clear()
        if self._is_required:
            raise ConfigError(
                f"training.cuda_graphs = 'on', and the step cannot be recorded: {why}. Change the model, or set "
                "training.cuda_graphs = 'auto', which then trains without graphs"
            )
        self._tell(f"the step runs without CUDA graphs: {why}")

    def do_pass(self, work: Work, data: Any, key: Hashable) -> tuple[Tensor | None, Any]:
        """Do one pass, see `GraphedCall`."""
        return self._do(self._passes, work, data, key)

    def do_update(self, work: Work, key: Hashable) -> None:
        """Do the update, see `GraphedCall`."""
        self._do(self._updates, work, None, key)

    @property
    def recordings(self) -> tuple[int, int]:
        """How many shapes of passes are recorded, and of updates."""
        return self._passes.count, self._updates.count

    def clear(self) -> None:
        """Forget all recordings, since weights, gradients or moments are elsewhere now."""
        self._passes.clear()
        self._updates.clear()

    def _do(self, call: GraphedCall, work: Work, data: Any, key: Hashable) -> tuple[Tensor | None, Any]:
        if self.is_used:
            try:
                return call(work, data, key)
            except RecordingError as error:
                self.refuse(str(error))
        return work(data)
