"""`trainer.Trainer` in one process: what it takes, what it refuses by name, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import sys
import threading
import uuid
from collections import UserDict, namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fit_jobs
import numpy as np
import psutil
import pytest
import torch
from fit_jobs import CLASSES, SETTINGS, Broken, LengthTask, Shaken, Texts, collate, network, points
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from trainer import (
    DistributedConfig,
    FitResult,
    PyTorchDDPTrainer,
    RayTrainer,
    TensorFlowDistributedTrainer,
    Trainer,
    TrainingFailedError,
)
from trainer.config import ConfigError
from trainer.data.batches import move_to
from trainer.data.coverage import find_coverage_errors
from trainer.data.dataset_data import DatasetData, _Order, _Read
from trainer.data.torch_loader import ReadOptions, WorkerPool
from trainer.observability.progress_line import ProgressLine, format_progress_line
from trainer.printable import format_duration

ROOT = Path(__file__).parents[2]
Run = Callable[..., FitResult]
SMALL = {**SETTINGS, "world_size": 1, "gradient_accumulation_steps": 2, "epochs": 1}


@pytest.fixture
def strays() -> Callable[[], set[psutil.Process]]:
    """Returns the processes that this one has started since the test began, and that still run."""
    before = set(psutil.Process().children(recursive=True))  # of other tests, as a fork server
    return lambda: set(psutil.Process().children(recursive=True)) - before


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Trains on the points in this process."""

    def train(
        model: nn.Module | None = None, data: Any = None, valid: Any = None, name: str = "run", **options: Any
    ) -> FitResult:
        known = {field.name for field in dataclasses.fields(DistributedConfig)}
        config = DistributedConfig(**{**SMALL, **{key: options.pop(key) for key in [*options] if key in known}})
        trainer = Trainer(
            model or network(), config, **{"run_dir": tmp_path / name, "tracking": fit_jobs.QUIET, **options}
        )
        return trainer.fit(points() if data is None else data, valid)

    return train


def result_of(found: FitResult) -> dict[str, Any]:
    return json.loads(Path(found.run_dir, "result.json").read_text())


def events_of(found: FitResult) -> list[dict[str, Any]]:
    events = [json.loads(line) for path in Path(found.run_dir, "events").iterdir() for line in path.open()]
    return sorted(events, key=lambda event: event["time"])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(points())


class Unsized(Dataset[Tensor]):
    def __getitem__(self, position: int) -> Tensor:
        return torch.zeros(1)


class Buckets(BatchSampler):
    pass


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.ones(150), 150)


REFUSED: list[tuple[Any, str]] = [
    (lambda: Stream(), "Stream is iterable"),
    (lambda: DataLoader(Stream(), batch_size=4), "reads Stream, an iterable dataset"),
    (lambda: Unsized(), "needs __getitem__ and __len__"),
    (lambda: TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "has no samples"),
    (lambda: DataLoader(points(), sampler=weighted()), "WeightedRandomSampler"),
    (lambda: DataLoader(points(), sampler=RandomSampler(points(), replacement=True)), "replacement"),
    (lambda: DataLoader(points(), sampler=RandomSampler(points(), num_samples=9)), "draws 9 samples"),
    (lambda: DataLoader(points(), batch_size=None), "batch_sampler of its own"),
    (lambda: DataLoader(points(), batch_sampler=Buckets(SequentialSampler(points()), 4, False)), "its own (Buckets)"),
]


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_data_that_cannot_be_dealt_are_refused_by_name(run: Run, data: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        run(data=data())


def mean_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, target)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.scale * nn.functional.cross_entropy(outputs, target, reduction="none")


class Hiding(nn.Module):
    """Has layers of which PyTorch does not know."""

    def __init__(self, deep: bool = False, is_large: bool = False) -> None:
        super().__init__()
        self.known, self.is_large = nn.Linear(2, CLASSES), is_large
        layer = nn.Linear(2, 2, bias=False)
        self.layers: list[Any] = [[layer]] if deep else [layer]

    def forward(self, inputs: Tensor) -> Tensor:
        [layer] = self.layers
        return self.known((layer[0] if isinstance(layer, list) else layer)(inputs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Hiding:
        if self.is_large:
            raise MemoryError
        found = Hiding(deep=isinstance(self.layers[0], list))
        memo[id(self)] = found
        return found


class Focal(nn.Module):
    """Takes a mean of its own."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction, self.weight = reduction, torch.tensor([1.0, 5.0, 0.2])

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, target, self.weight, reduction="none")
        return losses.sum() / self.weight[target].sum() if self.reduction == "mean" else losses


class Taught(nn.Module):
    """Learns from a teacher, which is frozen in no way but this."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(), [network()]

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            hint = self.teacher[0](inputs)
        return self.student(inputs) + hint


class RootError(nn.MSELoss):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (super().forward(outputs, target.view_as(outputs)) + 1e-6).sqrt()


class Flattening(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return super().forward(outputs.flatten(1), target.flatten())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))


class Opaque(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, CLASSES)

    def get_extra_state(self) -> object:
        return Path("a")


class Gathering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            torch.distributed.barrier()
        return super().forward(inputs)


POINTS = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
COLUMN: dict[str, Any] = {"model": nn.Linear(2, 1), "data": TensorDataset(POINTS, POINTS[:, 0])}
BOTH = TensorDataset(POINTS, POINTS[:, :1])
SCALE = torch.ones(1, requires_grad=True)
NORM = nn.Sequential(nn.BatchNorm1d(2), network())
TOKENS: dict[str, Any] = {"data": TensorDataset(*[torch.zeros(20, 4, dtype=torch.int64)] * 2)}


def squared(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target) ** 2


def warned(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, target, reduction="none")


def flat(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs[:, 0] - target) ** 2


def pinball(outputs: Tensor, target: Tensor) -> Tensor:
    below, quantiles = target - outputs, torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(quantiles * below, (quantiles - 1) * below)


class Ragged(Dataset[Tensor]):
    """Rows of one number, two and three."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, position: int) -> Tensor:
        return torch.ones(position % 3 + 1)


class RaggedTask:
    """Gives a loss for each number: as many as samples, by chance."""

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        return (model(batch[..., None])[..., 0] - 1) ** 2


class ColumnTask:
    def loss(self, model: Any, batch: Any) -> Tensor:
        return squared(model(batch[0]), batch[1])


USELESS: list[tuple[dict[str, Any], str]] = [
    ({"loss": mean_loss}, "the loss gave shape (), torch.float32 for a batch of 3 samples"),
    ({"loss": lambda outputs, target: torch.zeros(len(target), dtype=torch.cfloat)}, "give one real number per sample"),
    ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='sum'"),
    ({"loss": Learned()}, "Learned has parameters of its own"),
    ({"model": nn.Identity()}, "Identity has no parameter that needs a gradient"),
    ({"model": nn.parallel.DataParallel(nn.Linear(2, 3))}, "give the module itself"),
    ({"data": TensorDataset(torch.zeros(20, 2), torch.zeros(20, 4))}, "there is no usual loss for outputs of (3, 3)"),
    ({"data": TensorDataset(torch.zeros(20, 2))}, "not pairs (inputs, target)"),
    ({"metrics": {"loss": mean_loss}}, "a metric is named 'loss'"),
    ({"metrics": {"accuracy": mean_loss}}, "the metric 'accuracy' gave shape ()"),
    ({"early_stopping_patience": 2}, "training.early_stopping_patience needs a validation split"),
    ({"task": LengthTask(), "loss": mean_loss}, "either loss or task"),
    ({"task": nn.CrossEntropyLoss()}, "task is a CrossEntropyLoss, which has no method loss(model, batch)"),
    ({"task": LengthTask(), "metrics": {"one": mean_loss}}, "as the method metrics"),
    ({"valid": DataLoader(points(), collate_fn=collate)}, "the first samples of the valid split cannot be evaluated"),
    ({"valid": {0: 1}}, "the first samples of the valid split cannot be evaluated"),
    ({"model": [network(), network()]}, "the model is a list, and must be one torch.nn.Module: put several of them"),
    ({"model": Hiding()}, "a parameter in layers, a list of modules, which needs a gradient, is not a parameter of"),
    ({"model": Hiding(deep=True)}, "a tensor of shape (2, 2) that the loss depends on, which needs a gradient"),
    ({"model": Hiding(is_large=True)}, "a parameter in layers, a list of modules, which needs a gradient, is not"),
    ({"loss": lambda outputs, target: flat(outputs, target) * SCALE}, "a tensor of shape (1,) that the loss depends"),
    ({"loss": lambda outputs, target: flat(outputs.detach(), target)}, "the loss depends on no parameter of the model"),
    ({"loss": Focal()}, "Focal with reduction='mean' is "),
    ({**COLUMN, "loss": RootError()}, "RootError with reduction='mean' is "),
    ({"model": nn.Sequential(network(), nn.SyncBatchNorm(CLASSES))}, "1 is a SyncBatchNorm, which would not"),
    ({"model": Complex()}, "spectrum is complex, and parameters that are trained are real numbers"),
    ({"model": Opaque()}, "the extra state of the model (get_extra_state) has a PosixPath, and a checkpoint holds"),
    ({"loss": nn.MSELoss(), **COLUMN}, "the loss compares outputs and targets of different shapes: Using a target"),
    ({"loss": nn.PoissonNLLLoss(), **COLUMN}, "PoissonNLLLoss compares outputs of shape (3, 1) and targets of shape"),
    ({"loss": squared, **COLUMN}, "the loss of outputs of shape (3, 1) and targets of shape (3,) compares every"),
    ({"loss": lambda outputs, target: squared(outputs, target).mean(1), **COLUMN}, "(3,) compares every sample with"),
    ({"loss": squared, **COLUMN, "data": BOTH, "valid": COLUMN["data"]}, "compares every sample with every"),
    ({"loss": warned, **COLUMN}, "the loss compares outputs and targets of different shapes: Using a target size"),
    ({"task": ColumnTask(), **COLUMN}, "the loss of 3 samples has the shape (3, 3): every sample is compared with"),
    ({"loss": flat, "metrics": {"off": squared}, **COLUMN}, "the metric 'off' of outputs of shape (3, 1) and targets"),
    ({"model": Gathering()}, "calls torch.distributed, which has no group here"),
    ({"model": NORM, "batch_size_per_gpu": 1}, "batch_size_per_gpu = 1 leaves one sample per micro-batch, but"),
    ({"model": NORM, "gradient_accumulation_steps": 100}, "100 micro-batches leaves one sample per micro-batch, but"),
    ({"model": nn.Embedding(4, 4), **TOKENS}, "the classes may be the second dimension, as torch has it, or the last"),
    ({"gradient_accumulation_steps": 200}, "150 training samples cannot feed 200 micro-batches"),
]


@pytest.mark.parametrize(("given", "words"), USELESS)
def test_what_cannot_be_trained_is_refused_by_name(run: Run, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        run(**given)


def shrinking(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, target: flat(outputs, target) + sum(each.square().sum() for each in model.parameters())


ACCEPTED: dict[str, Callable[[], dict[str, Any]]] = {
    "a loss of its own shape": lambda: {**COLUMN, "loss": RootError(reduction="none")},
    "quantiles of one target": lambda: {"model": nn.Linear(2, 3), "data": BOTH, "loss": pinball},
    "rows of as many numbers as samples": lambda: {
        "model": nn.Linear(1, 1), "task": RaggedTask(),
        "data": DataLoader(Ragged(), batch_size=3, collate_fn=partial(nn.utils.rnn.pad_sequence, batch_first=True)),
    },
    "a teacher without gradients": lambda: {"model": Taught()},
    "a loss that knows the model": lambda: {"model": (model := network()), "loss": shrinking(model)},
    "a subclass of a loss of classes": lambda: {"loss": Flattening(ignore_index=1, weight=torch.tensor([1.0, 5, 2]))},
    "a loss that is not reduced": lambda: {"loss": Focal("none")},
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_only_looks_wrong_is_trained(run: Run, name: str) -> None:
    given = ACCEPTED[name]()
    assert run(**given).steps
    assert all(each.grad is None for each in network().parameters())


def test_sparse_gradients_are_made_dense_on_one_rank_too(run: Run) -> None:
    def trained(sparse: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, CLASSES, sparse=sparse), nn.Flatten(), nn.Linear(2 * CLASSES, CLASSES))
        data = TensorDataset(torch.arange(60).view(30, 2) % 9, torch.arange(30) % CLASSES)
        return run(model=model, data=data, epochs=2, name=f"sparse-{sparse}").model.state_dict()

    torch.testing.assert_close(trained(True), trained(False))


def test_settings_may_be_mappings_and_a_misspelt_one_is_refused_by_name(run: Run) -> None:
    assert Trainer(network(), {"epochs": 1}).config == DistributedConfig(epochs=1)
    assert run(tracking={"tensorboard": False}).steps
    misspelt: list[tuple[Callable[[], object], str]] = [
        (lambda: Trainer(network(), {"epohcs": 1}), "training.epohcs is not a setting: did you mean epochs?"),
        (lambda: run(tracking={"tensorbord": 0}), "tracking.tensorbord is not a setting: did you mean tensorboard?"),
        (lambda: PyTorchDDPTrainer(network(), lerning_rate=1), "did you mean learning_rate?"),
        (lambda: RayTrainer(network(), {"epohcs": 1}), "epohcs is not a setting: did you mean epochs?"),
        (lambda: TensorFlowDistributedTrainer(network, {"epohcs": 1}), "training.epohcs is not a setting"),
    ]
    for make, words in misspelt:
        with pytest.raises(ConfigError, match=re.escape(words)):
            make()
    with pytest.raises(ConfigError, match="config is the class DistributedConfig"):
        Trainer(network(), DistributedConfig)  # type: ignore[arg-type]


def test_rows_of_tensors_are_what_torch_collates() -> None:
    data = points()
    order = _Order("train", 0, np.array([7, 3, 149, 3]))
    ways = [ReadOptions(), ReadOptions(collate_fn=lambda samples: default_collate(samples))]
    quick, slow = (_Read({"train": data}, {"train": way})[order] for way in ways)
    assert [torch.equal(*pair) for pair in zip(quick, slow, strict=True)] == [True, True]


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    values: Tensor
    names: list[str]


class Moving:
    def __init__(self, place: str = "cpu") -> None:
        self.place = place

    def to(self, device: torch.device) -> Moving:
        return Moving(device.type)


def test_batches_of_any_structure_are_moved() -> None:
    column = torch.arange(6.0).reshape(3, 2)
    batch = {
        "pair": Pair(column, [column, column]),
        "texts": ["a", "b", "c"],
        "record": Record(column, ["x", "y", "z"]),
        "user": UserDict(kept=column),
        "array": np.arange(3),
        "plain": 7,
        "ragged": [torch.zeros(1), torch.zeros(5), torch.zeros(2)],
    }
    moved = move_to({"own": Moving(), **batch}, torch.device("meta"))
    assert moved["own"].place == "meta"
    assert moved["record"].values.is_meta
    assert type(moved["pair"]) is Pair
    assert isinstance(moved["user"], UserDict)
    assert moved["texts"] == ["a", "b", "c"]


def test_a_task_with_nested_batches_goes_on_in_smaller_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out, such a batch is divided: the task itself asserts that texts and numbers stay together."""
    whole = run(nn.Linear(1, 1), DataLoader(Texts(), batch_size=40, collate_fn=collate), Texts(), "whole",
                task=LengthTask(), epochs=2)  # fmt: skip
    assert set(whole.test) == {"loss", "samples", "absolute"}
    torch.manual_seed(0)
    monkeypatch.setenv("DTRAIN_FAULTS", json.dumps([{"kind": "oom", "at": "forward", "step": 1, "node": 0}]))
    run(nn.Linear(1, 1), DataLoader(Texts(), batch_size=40, collate_fn=collate), Texts(), "parts",
        task=LengthTask(), epochs=2)  # fmt: skip
    events = "".join(path.read_text() for path in Path(whole.run_dir).with_name("parts").glob("events/*"))
    assert '"out_of_memory"' in events


def test_the_model_is_the_callers_again_and_can_be_trained_once_more(run: Run) -> None:
    model = network(norm=True)
    first = run(model, valid=points(40, 1), epochs=3)
    assert first.model is model
    saved = torch.load(Path(first.run_dir, "model", "weights.pt"), weights_only=True)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert len({item.untyped_storage().data_ptr() for item in model.parameters()}) == len([*model.parameters()])
    model(torch.ones(4, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = run(model, valid=points(40, 1), name="again", epochs=1)
    assert again.best_valid_loss is not None
    assert first.best_valid_loss is not None
    assert again.best_valid_loss < first.best_valid_loss + 0.1, "it went on from the weights that it had"


def test_folders_of_trainings_without_one_differ(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [run(run_dir=None, progress=True, max_steps=2).run_dir for _ in range(2)]
    assert len(set(found)) == 2
    shown = capsys.readouterr().err
    assert "step 2/2 · epoch 1 · ETA 0 s to the last step · loss" in shown
    assert "Traceback" not in shown


def test_a_training_goes_on_with_another_batch_from_the_sample_where_it_was(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of an epoch, too; each sample is used once in each."""
    run(valid=points(40, 1), epochs=4, batch_size_per_gpu=10, max_steps=11)  # 60 of 150 in the second
    caplog.clear()
    found = run(valid=points(40, 1), epochs=4, batch_size_per_gpu=16)
    assert (found.samples_seen, found.steps) == (600, 11 + 3 + 2 * 5)
    assert result_of(found)["epochs"] == 4
    assert find_coverage_errors(result_of(found)["consumed"], 150, whole_epochs=4) == []
    steps = [event["step"] for event in events_of(found) if event["kind"] == "evaluation"]
    assert steps == [8, 11, 14, 19, 24], "at the end of each epoch, and where max_steps had ended it"
    assert "going on from step 11: training.batch_size_per_gpu = 16 (10 before); training.max_steps" in caplog.text
    resumed = [event for event in events_of(found) if event["kind"] == "resume"]
    assert "training.batch_size_per_gpu = 16 (10 before)" in resumed[-1]["changes"]


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"model": nn.Sequential(nn.Linear(2, CLASSES))}, "model.structure.0 = 'Linear(in_features=2"),
    ({"model": nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, CLASSES))}, "'ReLU(inplace=False)' ('Tanh()'"),
    ({"loss": nn.MultiMarginLoss()}, "loss.args.class = 'MultiMarginLoss' ('CrossEntropyLoss' before)"),
    ({"loss": nn.CrossEntropyLoss(label_smoothing=0.3)}, "loss.arguments.label_smoothing = 0.3 (0.0 before)"),
    ({"data": points(seed=5)}, "dataset = 'tensordataset-"),
    ({"seed": 4}, "training.seed = 4 (0 before)"),
]


def test_a_resumed_training_is_of_the_same_model_loss_and_data(run: Run) -> None:
    done = run(epochs=1)
    assert run(epochs=1).steps == done.steps, "it was over, and says so again"
    further = run(epochs=2)
    assert further.steps == 2 * done.steps
    job = Path(done.run_dir, "job.json").read_text()
    for other, words in OTHERS:
        with pytest.raises(ConfigError, match=f"belongs to another training .*{re.escape(words)}"):
            run(**other, epochs=3)
    assert Path(done.run_dir, "job.json").read_text() == job, "what was refused has left nothing"


class Powers:
    """A loss of one's own: the error to some power."""

    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target).abs() ** self.power


def test_the_best_score_begins_anew_where_what_it_measures_has_changed(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def go(power: float, epochs: int, valid: Any = None) -> FitResult:
        data = points(40, 1) if valid is None else valid
        return run(valid=data, loss=Powers(power), epochs=epochs, learning_rate=1e-9)

    first, again = go(1.0, 1), go(1.0, 2)
    assert "begins anew" not in caplog.text
    assert again.best_valid_loss == pytest.approx(first.best_valid_loss, rel=1e-4)
    other = go(3.0, 3)
    assert "the loss changed: the best score begins anew" in caplog.text
    assert other.best_valid_loss == pytest.approx(other.test["loss"]), "which is higher than that of before"
    go(3.0, 4, valid=points(30, 2))
    assert "the validation samples changed: the best score begins anew" in caplog.text


def test_a_metric_that_is_no_number_is_told_and_not_written(run: Run) -> None:
    odd = {"odd": lambda outputs, target: torch.full(target.shape, torch.nan), "fine": lambda outputs, target: target}
    found = run(valid=points(40, 1), metrics=odd)
    assert found.test["odd"] is None
    assert found.test["fine"] == pytest.approx(points(40, 1).tensors[1].double().mean().item())
    notes = json.loads(Path(found.run_dir, "evaluation.json").read_text())["notes"]
    assert any("not a finite number on the valid split: odd" in note for note in notes)


def test_a_split_of_which_nothing_counts_is_refused_by_name(run: Run) -> None:
    ignored = TensorDataset(*points(20).tensors[:1], torch.full((20,), -100))
    with pytest.raises(ConfigError, match="loss on the valid split is nan after step 8: none of its samples count"):
        run(valid=ignored)


@pytest.mark.parametrize(("value", "words"), [(1e38, ": lower training"), (math.nan, "")])
def test_numbers_that_are_missing_on_purpose_are_not_blamed(run: Run, value: float, words: str) -> None:
    """Missing targets have no part in the loss; the sample that makes it infinite is another."""
    inputs, target = points(20).tensors[0], torch.full((20,), math.nan)
    target[::2], inputs[10] = 1.0, value

    def masked(outputs: Tensor, target: Tensor) -> Tensor:
        known = target.isfinite()
        return torch.where(known, flat(outputs, target.where(known, 0)), 0.0) * 1e38

    with pytest.raises(TrainingFailedError, match=f"not finite at step .*{words}") as failed:
        run(nn.Linear(2, 1), TensorDataset(inputs, target), loss=masked, batch_size_per_gpu=10)
    assert ("sample 10 of the training split has nan in its inputs" in str(failed.value)) == math.isnan(value)
    assert "its target" not in str(failed.value)


@pytest.mark.slow
def test_an_error_in_a_worker_comes_with_its_place_and_leaves_no_worker(
    run: Run, strays: Callable[[], set[psutil.Process]]
) -> None:
    with pytest.raises(TrainingFailedError, match="KeyError in DataLoader worker process 0") as failed:
        run(data=DataLoader(Broken(), batch_size=10, num_workers=1))
    assert "in __getitem__" in str(failed.value)
    assert "no picture 77" in str(failed.value)
    assert failed.value.code == 1
    assert not strays()


@pytest.mark.slow
def test_workers_start_before_the_threads_of_a_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = set(threading.enumerate()), list[set[threading.Thread]]()
    start = WorkerPool.start

    def watched(pool: WorkerPool) -> None:
        seen.append(set(threading.enumerate()) - before)
        start(pool)

    monkeypatch.setattr(WorkerPool, "start", watched)
    loader = DataLoader(Shaken(), batch_size=10, num_workers=1)
    found = run(data=loader, valid=DataLoader(Shaken(), num_workers=1), epochs=2, gradient_accumulation_steps=1)
    assert found.samples_seen == 300
    assert seen == [set(), set()], "those of both splits, once"


class Growing(Shaken):
    def __len__(self) -> int:
        self.asked = getattr(self, "asked", 0) + 1
        return 150 if self.asked < 4 else 151


def test_data_that_change_their_length_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="had 150 samples when training began and has 151 now"):
        run(data=Growing(), epochs=5)


@pytest.mark.slow
def test_a_training_that_is_interrupted_goes_on_from_its_checkpoint(
    run: Run, strays: Callable[[], set[psutil.Process]]
) -> None:
    calls: list[int] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 12:
            signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(outputs, target, reduction="none")

    data = DataLoader(Shaken(), batch_size=10, num_workers=1)
    with pytest.raises(KeyboardInterrupt, match="continues from the last checkpoint"):
        run(data=data, loss=loss)
    assert not strays()
    ended = run(data=data, loss=loss)
    assert result_of(ended)["weights_sha256"] == result_of(run(data=data, loss=loss, name="whole"))["weights_sha256"]


def test_settings_of_precision_and_evaluation_are_taken(run: Run) -> None:
    found = run(valid=points(40, 1), precision="bf16", eval_frequency=2, max_steps=5, early_stopping_patience=9)
    assert [event["step"] for event in events_of(found) if event["kind"] == "evaluation"] == [2, 4, 5]
    assert found.best_valid_loss is not None


def test_a_run_directory_may_be_remote(run: Run) -> None:
    found = run(run_dir=f"memory://{uuid.uuid4().hex}/run", valid=points(40, 1))
    assert found.run_dir.startswith("memory://")
    assert found.samples_seen == 150


def test_data_are_named_by_content_and_reading_them_leaves_random_states() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    names = {DatasetData(data).dataset_id for data in (points(), points(seed=1), Shaken(), Shaken(), points(149))}
    assert len(names) == 4
    assert DatasetData(TensorDataset(torch.zeros(3, dtype=torch.bfloat16))).dataset_id
    DatasetData(Shaken()).read("train", np.arange(3), torch.device("cpu"))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


@pytest.mark.slow
def test_the_script_of_the_documentation_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "own-model-and-data.md").read_text()
    [script] = re.findall(r"```python\n(import torch\n.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(script, names)  # what its reader would paste into a notebook
    assert names["result"].test["accuracy"] > 0.8
    assert Path(names["result"].run_dir, "result.json").is_file()


def test_a_notebook_shows_progress_by_itself(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a kernel, whose standard error is no terminal and looks like a failure."""
    monkeypatch.chdir(tmp_path)
    assert run(run_dir=None, max_steps=2).rank == 0
    capsys.readouterr()
    run(run_dir=None, max_steps=2)
    assert "step 2/2" not in "".join(capsys.readouterr())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    run(run_dir=None, max_steps=2)
    assert "step 2/2" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported, no notebook
    run(run_dir=None, max_steps=2)
    assert "step 2/2" not in "".join(capsys.readouterr())


def test_the_line_of_progress() -> None:
    step = {"step": 30, "epoch": 1, "loss": 0.51234, "samples_per_second": 12345.6, "step_seconds": 0.5}
    shown = format_progress_line({**step, "eta_seconds": 35.0}, 0.25)
    told = "step 30/100 · epoch 2 · ETA 35 s to the last step · loss 0.5123 · valid 0.2500 · 12,346 samples/s"
    assert shown == told, "in the words and the order of `dtrain status --follow`"
    assert "ETA" not in format_progress_line({**step, "eta_seconds": float("inf"), "step_seconds": 0.0}, None)
    assert [format_duration(seconds) for seconds in (0, 61, 3661)] == ["0 s", "1 min 01 s", "1 h 01 min"]
    ProgressLine().close()
