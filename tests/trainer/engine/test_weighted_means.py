"""The loss of a global batch is one mean, as torch takes it over the whole batch: at any number of ranks, in any
micro-batches, in training and in evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from steps import step_of
from thread_worlds import ALONE, CPU, at_once, thread_worlds
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.comm.world import World
from trainer.data.batches import Batch, Samples
from trainer.data.dataset_data import DatasetData
from trainer.engine.steps import StepFlags
from trainer.evaluation.evaluate import JudgeRequest
from trainer.evaluation.judge import evaluate_task
from trainer.losses import LastDimCrossEntropyLoss
from trainer.model.task import SupervisedTask

SAMPLES, PLACES, CLASSES = 23, 5, 4
WEIGHTS = torch.tensor([1.0, 10.0, 0.1, 3.0])
IGNORED = -100


class Places(nn.Module):
    """Logits for one class per sample, or for one at each of its places."""

    def __init__(self, places: bool, is_last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.places, self.is_last = nn.Linear(3, CLASSES), places, is_last

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        return outputs if not self.places or self.is_last else outputs.transpose(1, 2)


class LogPlaces(Places):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).log_softmax(1)


def data(places: bool, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    shape = (SAMPLES, PLACES) if places else (SAMPLES,)
    inputs = torch.randn(*shape, 3, generator=made)
    target = torch.randint(0, CLASSES, shape, generator=made)
    return inputs, torch.where(torch.rand(shape, generator=made) < ignored, IGNORED, target)


def probabilities() -> tuple[Tensor, Tensor]:
    inputs, _ = data(False)
    return inputs, torch.softmax(torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(2)), 1)


class Tokens:
    """A task of one's own, whose padding counts for nothing."""

    def loss(self, model: Callable[[Any], Tensor], batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        return batch[1] != IGNORED


Case = tuple[nn.Module, Any, tuple[Tensor, Tensor]]
SMOOTH = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2, ignore_index=2)
CASES: dict[str, Case] = {
    "weights of classes": (LogPlaces(False), nn.NLLLoss(weight=WEIGHTS), data(False)),
    "samples without a label": (Places(False), nn.CrossEntropyLoss(), data(False, 0.6)),
    "padding": (Places(True), nn.CrossEntropyLoss(), data(True, 0.5)),
    "all at once": (Places(True), SMOOTH, data(True)),
    "classes last": (Places(True, is_last=True), LastDimCrossEntropyLoss(weight=WEIGHTS), data(True, 0.3)),
    "probabilities of classes": (Places(False), nn.CrossEntropyLoss(weight=WEIGHTS), probabilities()),
    "not reduced": (Places(True), nn.CrossEntropyLoss(reduction="none"), data(True, 0.5)),
    "a task of one's own": (Places(True), Tokens(), data(True, 0.5)),
    "a mean per sample": (LogPlaces(False), nn.KLDivLoss(reduction="batchmean"), probabilities()),
}


def by_torch(model: nn.Module, loss: Any, batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    """The mean that torch takes by itself, of the usual loss where ``loss`` takes none; and its gradient."""
    model = copy.deepcopy(model)
    takes_mean = getattr(loss, "reduction", "none") != "none"
    value = (loss if takes_mean else nn.CrossEntropyLoss())(model(batch[0]), batch[1])
    value.backward()
    return value.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


def task_of(given: Any) -> Any:
    return given if isinstance(given, Tokens) else SupervisedTask(given)


def cut(batch: tuple[Tensor, Tensor], sizes: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(sizes) for part in batch), strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [[[9, 1, 13]], [[9, 1], [13]], [[1, 1, 1], [12, 2], [6]]])
def test_ranks_and_micro_batches_have_the_mean_of_the_whole_batch(name: str, sizes: list[list[int]]) -> None:
    model, loss, whole = CASES[name]
    expected, gradient = by_torch(model, loss, whole)
    parts = iter(cut(whole, [size for rank in sizes for size in rank]))
    batches = [
        Batch(SAMPLES, tuple(Samples(place, size, next(parts)) for place, size in enumerate(rank)), 0) for rank in sizes
    ]

    def work(world: World) -> tuple[float, float, float, Tensor]:
        settings = {"world_size": len(sizes), "gradient_accumulation_steps": 3, "clip_norm": None}
        step = step_of(copy.deepcopy(model), world, loss, **settings)
        result = step(batches[world.rank], 0, 0.0, StepFlags())
        gradient = torch.cat([parameter.grad.flatten() for parameter in step.parameters])  # type: ignore[union-attr]
        return result.loss_sum, result.weight, result.grad_norm, gradient

    if len(sizes) == 1:
        found = [work(ALONE)]
    else:
        with thread_worlds([0] * len(sizes)) as worlds:
            found = at_once(work, worlds)
    total, weight = (sum(rank[place] for rank in found) for place in (0, 1))
    assert total / weight == pytest.approx(expected, rel=1e-6)
    for *_, norm, own in found:
        assert norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        torch.testing.assert_close(own, gradient, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at_once_", [3, 23])
def test_an_evaluation_has_it_too(name: str, at_once_: int) -> None:
    model, loss, whole = CASES[name]
    request = JudgeRequest(model=model, world=ALONE, device=CPU, batch_size=at_once_)
    found = evaluate_task(task_of(loss), DatasetData(TensorDataset(*whole)), "train", request)
    assert found.loss == pytest.approx(by_torch(model, loss, whole)[0], rel=1e-6)


def test_a_batch_in_which_nothing_counts_has_no_gradient() -> None:
    model = Places(False)
    inputs, target = data(False, ignored=1.0)
    assert (target == IGNORED).all()
    step = step_of(model, loss=nn.CrossEntropyLoss(), weight_decay=0.0)
    before = copy.deepcopy(model.state_dict())
    result = step(Batch(SAMPLES, (Samples(0, SAMPLES, (inputs, target)),), 0), 0, 0.1, StepFlags())
    assert (result.loss_sum, result.weight, result.grad_norm) == (0.0, 0.0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Precise(nn.Module):
    """Outputs of a type of its own."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.shift, self.kind = nn.Parameter(torch.zeros(())), kind

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.kind) + self.shift


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (torch.float64, lambda outputs, target: outputs - target),
        (torch.complex128, lambda outputs, target: (outputs - 1j).abs()),
    ],
)
def test_outputs_keep_their_digits_and_their_imaginary_part(
    kind: torch.dtype, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    inputs = torch.tensor([1 + 2**-40, 2 + 2**-40, 3.0], dtype=torch.float64)
    target = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    model = Precise(kind)
    request = JudgeRequest(model=model, world=ALONE, device=CPU, batch_size=2)
    found = evaluate_task(SupervisedTask(loss), DatasetData(TensorDataset(inputs, target)), "train", request)
    expected = loss(inputs.to(kind), target).mean().item()
    assert math.isclose(found.loss, expected, rel_tol=1e-12)
    assert expected > 0
    assert np.float32(1 + 2**-40) == 1, "which float32 would lose"
