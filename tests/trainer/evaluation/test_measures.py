"""Measures of a whole split, by the protocol of torchmetrics: each sample once, the same at any number of ranks."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from thread_worlds import ALONE, CPU, at_once, thread_worlds
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.accuracy import Accuracy
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.dataset_data import DatasetData
from trainer.engine.identity import MONITORED
from trainer.engine.state import Progress, read_progress, take_up
from trainer.engine.task_check import try_task
from trainer.evaluation import measures
from trainer.evaluation.evaluate import JudgeRequest, evaluation_mode
from trainer.evaluation.gate import chance_t, judge_by_measure
from trainer.evaluation.judge import TaskJudge, evaluate_task
from trainer.model.task import Measure, SupervisedTask
from trainer.rundir import RunDir

SAMPLES = 53


class Recall:
    """Of class 1; and the order in which samples came, which a mean would not know."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits, self.wanted, self.order = 0, 0, 0.0
        self.seen = 0

    def update(self, outputs: Tensor, target: Tensor) -> None:
        chosen = outputs.argmax(1)
        self.hits += int(((chosen == 1) & (target == 1)).sum())
        self.wanted += int((target == 1).sum())
        for value in outputs[:, 0].tolist():
            self.seen += 1
            self.order += value * self.seen

    def compute(self) -> Any:
        return {"rate": torch.tensor(self.hits / max(1, self.wanted)), "order": self.order, "samples": self.seen}


class Broken(Recall):
    def update(self, outputs: Tensor, target: Tensor) -> None:
        raise ZeroDivisionError("planted")


class Vector(Recall):
    def compute(self) -> Any:
        return torch.zeros(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0
        made = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=made)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(inputs)


def data() -> DatasetData:
    made = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(SAMPLES, 4, generator=made), torch.randint(3, (SAMPLES,), generator=made))
    return DatasetData(train=samples, valid=samples)


def request(world: World, model: nn.Module, **more: Any) -> JudgeRequest:
    return JudgeRequest(model=model, world=world, device=CPU, batch_size=5, **more)


def judged(world: World, measure: Measure) -> dict[str, float]:
    task = SupervisedTask(nn.CrossEntropyLoss(), {"recall": measure})
    return evaluate_task(task, data(), "valid", request(world, Net())).metrics


def on_ranks(ranks: int, measure: type[Recall]) -> list[dict[str, float]]:
    if ranks == 1:
        return [judged(ALONE, measure())]
    with thread_worlds(tuple(range(ranks))) as worlds:
        return at_once(lambda world: judged(world, measure()), worlds)


@pytest.mark.parametrize("ranks", [2, 3])
def test_figures_are_equal_to_the_bit_at_any_number_of_ranks(ranks: int) -> None:
    [alone] = on_ranks(1, Recall)
    assert alone["recall_samples"] == SAMPLES
    assert 0 < alone["recall_rate"] < 1
    assert on_ranks(ranks, Recall) == [alone] * ranks


@pytest.mark.parametrize(
    ("measure", "words"),
    [(Broken, r"'recall' could not be updated: ZeroDivisionError: planted"), (Vector, r"a Tensor of shape \(3,\)")],
)
def test_a_measure_that_fails_ends_the_evaluation_on_all_ranks(measure: type[Recall], words: str) -> None:
    def work(world: World) -> str:
        with pytest.raises(ConfigError, match=words):
            judged(world, measure())
        return "told"

    with thread_worlds((0, 1, 2)) as worlds:
        assert at_once(work, worlds) == ["told"] * 3


def skilled(world: World, knows: bool) -> dict[str, Any]:
    """The report of a model that knows the classes, or does not, on samples that are ordered by class."""
    made, model = torch.Generator().manual_seed(2), nn.Linear(3, 3, bias=False)
    target = torch.arange(60) // 20
    model.weight.data = torch.eye(3)
    inputs = nn.functional.one_hot(target, 3).float() if knows else torch.randn(60, 3, generator=made)
    inputs[::7] = torch.randn(len(inputs[::7]), 3, generator=made)
    samples = TensorDataset(inputs, target)
    task = SupervisedTask(nn.CrossEntropyLoss(), {"right": Accuracy()})
    judge = TaskJudge(task, DatasetData(train=samples, test=samples), "right", "max")
    return judge.report(request(world, model), RunDir("memory://chance"), lambda _: None)


@pytest.mark.parametrize(("knows", "passed"), [(True, True), (False, False)])
def test_the_gate_judges_a_measure_against_shuffled_targets(knows: bool, passed: bool) -> None:
    """At any number of ranks the same, though the samples of a batch are of one class."""
    alone = skilled(ALONE, knows)
    assert alone["gate"]["passed"] is passed, alone
    assert (alone["chance"]["value"] > 0.8) == knows
    assert 0.2 < alone["chance"]["shuffled"] < 0.45
    assert judge_by_measure(alone).passed is passed
    assert judge_by_measure({**alone, "split": "valid"}).reasons[0].startswith("there is no test split")
    assert not judge_by_measure({"model": {}}).passed
    least = {**alone["chance"], "mode": "min"}
    assert chance_t(least) == -chance_t(alone["chance"])
    with thread_worlds((0, 1)) as worlds:
        assert at_once(lambda world: skilled(world, knows), worlds) == [alone] * 2


def test_an_evaluation_that_was_interrupted_counts_no_sample_twice() -> None:
    task, left = SupervisedTask(nn.CrossEntropyLoss(), {"recall": Recall()}), [3]

    def stop() -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedError

    model = Net()
    with pytest.raises(InterruptedError):
        evaluate_task(task, data(), "valid", request(ALONE, model, before_batch=stop))
    again = evaluate_task(task, data(), "valid", request(ALONE, model))
    assert again.metrics["recall_samples"] == SAMPLES


def test_loss_metrics_and_measures_share_a_pass() -> None:
    def hits(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs.argmax(1) == target).float()

    model = Net()
    task = SupervisedTask(nn.CrossEntropyLoss(), {"accuracy": hits, "recall": Recall()})
    evaluate_task(task, data(), "valid", request(ALONE, model))
    assert model.calls == -(-SAMPLES // 5)


def test_a_loss_that_changes_its_inputs_changes_nothing_else() -> None:
    def mean(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs.mean(1)

    def greedy(outputs: Tensor, target: Tensor) -> Tensor:
        outputs.sub_(outputs.max(1, keepdim=True).values)
        return nn.functional.cross_entropy(outputs, target, reduction="none")

    figures = [
        evaluate_task(SupervisedTask(loss, {"mean": mean}), data(), "valid", request(ALONE, Net())).metrics["mean"]
        for loss in (greedy, nn.CrossEntropyLoss())
    ]
    assert figures[0] == figures[1]


def test_outputs_beyond_the_limit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "MOST_KEPT", 300)
    with pytest.raises(ConfigError, match=r"outputs of a split for measures.*method measured\(model, batch\)"):
        judged(ALONE, Recall())


class OwnTask:
    """Gives measures what they need of batches of its own structure."""

    def __init__(self) -> None:
        self.measures = {"recall": Recall()}

    def loss(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def measured(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]


def test_a_task_of_ones_own_says_what_is_measured() -> None:
    [expected] = on_ranks(1, Recall)
    assert evaluate_task(OwnTask(), data(), "valid", request(ALONE, Net())).metrics == expected


@pytest.mark.parametrize(
    ("settings", "metrics", "words"),
    [
        ({"monitor": "f1", "mode": "max"}, {"recall": Recall()}, "choose one of loss, recall_rate"),
        ({}, {"recall": Vector()}, "must give one number, or some by name"),
        ({}, {"recall": Broken()}, "could not be updated"),
        ({}, {"samples": Vector()}, "must give one number"),
        ({}, {"recall": Recall(), "recall_rate": lambda outputs, target: target}, "two metrics are named 'recall"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_training(
    settings: dict[str, Any], metrics: dict[str, Any], words: str
) -> None:
    task = SupervisedTask(nn.CrossEntropyLoss(), metrics)
    with pytest.raises(ConfigError, match=words):
        try_task(Net(), task, data(), DistributedTrainingConfig(batch_size_per_gpu=8, **settings))


def test_what_is_monitored_is_accepted_by_its_whole_name() -> None:
    task = SupervisedTask(nn.CrossEntropyLoss(), {"recall": Recall()})
    try_task(
        Net(), task, data(), DistributedTrainingConfig(batch_size_per_gpu=8, monitor="recall_rate", mode="max")
    )  # fmt: skip
    with pytest.raises(ConfigError, match="'max' would choose the weights with the greatest loss"):
        DistributedTrainingConfig(mode="max")


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_the_best_weights_and_patience_follow_the_monitored_figure(mode: str, best: int) -> None:
    progress = Progress()
    found = []
    for step, score in enumerate((0.5, 0.7, 0.3, float("nan"), 0.6), 1):
        progress.step = step
        found.append(progress.note_evaluation(loss=1.0 / step, score=score, mode=mode, patience=2))
    assert progress.best_step == best
    assert progress.best_loss == 1.0 / best, "the loss of those weights"
    assert found == [True, mode == "max", mode == "min", False, False]
    assert progress.early_stopped


def test_another_figure_begins_the_choice_anew() -> None:
    older = asdict(Progress(step=5, best_loss=0.5, best_step=5))
    del older["best_score"]
    assert read_progress(older).best_score == 0.5, "versions before chose by the loss"
    for monitored, kept in (("loss, min", 0.5), ("f1, max, 0123", None)):
        state = {"progress": dict(older), "best": {}}
        take_up(state, Progress(measure={MONITORED: monitored}))
        assert read_progress(state["progress"]).best_score == kept


class Merging(nn.Linear):
    """Merges its weights to evaluate, as adapters of low rank do, and takes that back to train."""

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.data += -1.0 if mode else 1.0
        return super().train(mode)


def test_an_evaluation_leaves_the_modes_of_modules_by_their_own_method() -> None:
    model = nn.Sequential(Merging(2, 2), nn.Sequential(nn.Dropout(), Merging(2, 2)))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        assert not torch.equal(model[0].weight, before["0.weight"])
    assert [module.training for module in model.modules()] == [True, True, False, False, False]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


@pytest.mark.parametrize("odd", [math.nan, ConfigError("of these targets it knows nothing")])
def test_a_measure_that_chance_tells_nothing_of_ends_no_training(odd: Any) -> None:
    """It is no number, or fails with other targets: the report has no such part, and the gate does not pass."""

    class Odd(Accuracy):
        computed = 0

        def compute(self) -> float:
            Odd.computed += 1
            if isinstance(odd, float):
                return odd
            if Odd.computed > 3:
                raise odd
            return super().compute()

    samples = TensorDataset(torch.randn(20, 4), torch.arange(20) % 3)
    judge = TaskJudge(
        SupervisedTask(nn.CrossEntropyLoss(), {"odd": Odd()}), DatasetData(train=samples, test=samples), "odd", "max"
    )
    report = judge.report(request(ALONE, Net()), RunDir("memory://odd"), lambda _: None)
    assert "chance" not in report
    assert not judge_by_measure(report).passed
