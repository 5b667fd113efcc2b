"""What happens when memory runs out: real allocations that fail, and what activation checkpointing really saves."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specs import window_spec
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.config import FactoryConfig
from trainer.engine.out_of_memory import MicroBatchLimit, is_out_of_memory, reduce_limit
from trainer.model.blocks import checkpoint_activations
from trainer.model.build import build_model
from trainer.model.stock import STOCK

WINDOW, FEATURES = 32, 8
SPEC = window_spec("abcdefgh", WINDOW)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On small tensors, threads of torch only wait for each other, and for whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def failure(action: Callable[[], Any]) -> BaseException:
    try:
        action()
    except Exception as error:
        return error
    pytest.fail("it did not fail")


def test_out_of_memory_is_told_from_other_errors() -> None:
    assert is_out_of_memory(failure(lambda: torch.empty(1 << 50)))  # torch's allocator on the CPU
    assert is_out_of_memory(failure(lambda: bytearray(1 << 60)))  # Python's
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    for other in (
        failure(lambda: torch.zeros(2) @ torch.zeros(3)),
        failure(lambda: torch.empty(-1)),
        failure(lambda: {}["memory"]),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("DefaultCPUAllocator"),
    ):
        assert not is_out_of_memory(other), other


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.booleans())
def test_the_way_down_ends_at_the_floor_with_activation_checkpointing(chunk: int, floor: int, twice: bool) -> None:
    fit = MicroBatchLimit(chunk, twice)
    while (less := reduce_limit(fit, floor)) is not None:
        now, before = (
            (less.max_samples, not less.activation_checkpointing),
            (fit.max_samples, not fit.activation_checkpointing),
        )
        assert now < before
        assert less.activation_checkpointing >= fit.activation_checkpointing
        assert less.max_samples in (fit.max_samples, max(fit.max_samples // 2, floor), floor)
        fit = less
    assert fit == MicroBatchLimit(min(chunk, floor), True)


class Residual(nn.Module):
    """A stem that is a short list of its own, then repeated blocks: it is the blocks that matter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(6)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x[:, -1])


class TwoTowers(nn.Module):
    """Nested lists, keyword arguments, a block that returns more than one tensor, and own parameters without layers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(FEATURES) * 1.1)

        def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
            y = torch.tanh(x @ self.weight) * scale
            return torch.exp(-(y * y)), y.mean()

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(self.Block() for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for tower in self.towers:
            for block in tower:  # type: ignore[attr-defined]
                x, mean = block(x, scale=0.9)
                total = total + mean
        return self.head(x[:, -1]) + total


class Convolutions(nn.Module):
    """Direct children that repeat, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Sequential(nn.Conv1d(width, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
            for width in (FEATURES, 16, 16)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x.transpose(1, 2)))).mean(-1))


def perceptron() -> nn.Module:
    hidden = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Flatten(), nn.Linear(WINDOW * FEATURES, 32), *hidden, nn.Linear(32, 3))


def stock(name: str) -> Callable[[], nn.Module]:
    args = {"transformer": {"layers": 4, "dropout": 0.1}}.get(name, {})
    outputs = 8 if name == "har_tcn" else 3
    return lambda: build_model(FactoryConfig(factory=name, args=args), SPEC, outputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: stock(name) for name in STOCK},
    "perceptron": perceptron,
    "residual": Residual,
    "two towers": TwoTowers,
    "convolutions": Convolutions,
}
WITHOUT_BLOCKS = ("har_tcn", "tcn", "lstm")
"""A list of single layers, and one layer: nothing that could be computed twice in parts."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():  # stock models start at zero, where many gradients vanish
        nn.init.normal_(parameter, std=0.2)
    return model


def windows(count: int = 16) -> Tensor:
    return torch.randn(count, WINDOW, FEATURES, generator=torch.Generator().manual_seed(1))


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers after two accumulated passes, and the next random number."""
    torch.manual_seed(2)
    outputs = [model(part) for part in x.split(len(x) // 2)]
    for output in outputs:
        output.square().sum().backward()
    buffers = [buffer.clone() for buffer in model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.any() for gradient in gradients)
    return [*outputs, *gradients, *buffers, torch.rand(1)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_dropout_and_running_statistics_stay_the_same(name: str) -> None:
    plain, twice = build(name), build(name)
    names = list(twice.state_dict())
    blocks = checkpoint_activations(twice)
    assert (blocks > 0) == (name not in WITHOUT_BLOCKS)
    assert checkpoint_activations(twice) == blocks  # again: no change
    for before, after in zip(steps(plain, windows()), steps(twice, windows()), strict=True):
        assert torch.equal(before, after)
    assert list(twice.state_dict()) == names


class Watch(TorchDispatchMode):
    """Bytes of tensors that are alive, at most: of all that torch makes while this is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage.nbytes():
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak(model: nn.Module, x: Tensor) -> int:
    with Watch() as watch:
        model(x).square().sum().backward()
    return watch.most


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    for known in (*model.parameters(), *model.buffers(), x):
        sizes.pop(known.untyped_storage().data_ptr(), None)
    del output
    return sum(sizes.values())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_BLOCKS])
def test_activation_checkpointing_lowers_what_is_kept_and_the_peak(name: str) -> None:
    """The peak counts what is computed for the second time too: a single block around all would keep little, and save
    nothing."""
    model, x = build(name), windows(256)
    kept_before, peak_before = kept(model, x), peak(model, x)
    checkpoint_activations(model)
    assert kept(model, x) < 0.6 * kept_before
    assert peak(model, x) < 0.85 * peak_before


def test_nothing_is_computed_twice_where_no_gradient_is_wanted() -> None:
    model = build("residual")
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator, index]
    counted = model.blocks[0][0]  # type: ignore[union-attr, index]
    counted.register_forward_hook(lambda *_: calls.append(2))
    checkpoint_activations(model)
    with torch.no_grad():
        model(windows())
    model.eval()
    model(windows()).sum().backward()
    assert calls == [2, 1, 2, 1]
    model.train()
    model(windows()).sum().backward()
    assert calls == [2, 1, 2, 1, 2, 1, 2]  # its inside once more, in the backward pass


def test_a_model_can_still_be_copied_and_pickled() -> None:
    for name in ("residual", "perceptron"):
        model = build(name)
        checkpoint_activations(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)  # a copy that looks into the original would see that
            before, after = steps(build(name), windows()), steps(other, windows())
            for expected, got in zip(before, after, strict=True):
                assert torch.equal(expected, got)
            with torch.no_grad():
                for parameter, fresh in zip(model.parameters(), build(name).parameters(), strict=True):
                    parameter.copy_(fresh)


def test_a_failure_the_second_time_leaves_running_statistics_alone() -> None:
    """Memory may run out there again."""
    model = build("convolutions")
    checkpoint_activations(model)
    output = model(windows())
    buffers = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    assert before, "the model has running statistics"

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    model.second[2].register_forward_pre_hook(fail)  # type: ignore[union-attr, operator, index]
    with pytest.raises(torch.OutOfMemoryError):
        output.sum().backward()
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, before[name])
