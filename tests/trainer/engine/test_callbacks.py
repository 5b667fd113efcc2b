"""Callbacks of a caller's own: when they are called, on which rank, and what of their state survives."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from trainer import Callback, Run, Trainer, TrainingFailedError
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.engine.callbacks import check_callbacks
from trainer.rundir import RunDir

FEW: dict[str, Any] = {
    "batch_size_per_gpu": 8, "epochs": 3, "threads_per_rank": 1, "log_frequency": 2, "checkpoint_frequency": 4,
}  # fmt: skip
STEPS = 3 * 32 // 8


def points(seed: int = 0) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(32, 4, generator=made), torch.randn(32, 1, generator=made))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


class Told(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads: set[str] = set()

    def _note(self, what: str, *more: Any) -> None:
        self.calls.append((what, *more))
        self.threads.add(threading.current_thread().name)

    def on_start(self, run: Run) -> None:
        self._note("start", run.step, run.total_steps)

    def on_world(self, run: Run) -> None:
        self._note("world", run.rank, run.world_size)

    def on_step(self, run: Run) -> None:
        self._note("step", run.step)
        run.log("weights/norm", next(run.model.parameters()).norm())
        run.log("step", run.step)

    def on_evaluation(self, run: Run) -> None:
        self._note("evaluation", run.step, run.is_best, sorted(run.metrics))
        run.log("seen", 7)

    def on_checkpoint(self, run: Run) -> None:
        self._note("checkpoint", run.checkpoint)

    def on_end(self, run: Run) -> None:
        self._note("end", run.step)
        run.log("last", 1.5)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    def run(*callbacks: Any, **settings: Any) -> Any:
        trainer = Trainer(
            network(), FEW | settings, loss=nn.MSELoss(), callbacks=callbacks, run_dir=tmp_path / "run", progress=False
        )
        return trainer.fit(points(), points(1))

    return run


def test_each_occasion_is_told_once_and_figures_reach_the_events(fit: Callable[..., Any]) -> None:
    told = Told()
    result = fit(told)
    calls = told.calls
    assert calls[:2] == [("start", 0, STEPS), ("world", 0, 1)]
    assert [item[1] for item in calls if item[0] == "step"] == list(range(1, STEPS + 1))
    judged = [item for item in calls if item[0] == "evaluation"]
    assert [item[1] for item in judged] == [4, 8, 12]
    assert judged[0][2:] == (True, ["loss"])
    assert calls.count(("end", STEPS)) == 1
    kept = {str(Path(item[1]).name) for item in calls if item[0] == "checkpoint"}
    assert kept >= {path.name for path in Path(result.run_dir, "checkpoints").glob("g*")}
    assert told.threads == {"MainThread"}
    events = RunDir(result.run_dir).events("figures")
    logged: dict[str, list[tuple[int, float]]] = {}
    for item in events:
        for name, value in item["figures"].items():
            logged.setdefault(name, []).append((item["step"], value))
    assert logged["step"] == [(step, float(step)) for step in range(2, STEPS + 1, 2)]
    assert logged["seen"] == [(4, 7.0), (8, 7.0), (12, 7.0)]
    assert logged["last"] == [(STEPS, 1.5)]
    tensorboard = list(Path(result.run_dir, "tensorboard").rglob("events*"))
    assert any(b"logged/weights/norm" in file.read_bytes() for file in tensorboard)


class Ema:
    """A moving average of the weights, kept in checkpoints."""

    def on_start(self, run: Run) -> None:
        self.averaged = AveragedModel(run.model, avg_fn=lambda kept, new, _: 0.9 * kept + 0.1 * new)

    def on_step(self, run: Run) -> None:
        self.averaged.update_parameters(run.model)

    def state_dict(self) -> dict[str, Any]:
        return self.averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaged.load_state_dict(state)


class StopsAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run) -> None:
        if run.step == self.step:
            raise KeyError("planted")


def test_the_state_of_a_callback_resumes_with_the_training(fit: Callable[..., Any], tmp_path: Path) -> None:
    whole = Ema()
    Trainer(
        network(), FEW, loss=nn.MSELoss(), callbacks=[whole], run_dir=tmp_path / "whole", progress=False
    ).fit(points(), points(1))  # fmt: skip
    broken, resumed = Ema(), Ema()
    with pytest.raises(TrainingFailedError, match="KeyError: 'planted'"):
        fit(broken, StopsAt(6))
    told = Told()
    fit(resumed, told)
    assert min(item[1] for item in told.calls if item[0] == "step") == 5, "it goes on from a checkpoint"
    torch.testing.assert_close(resumed.averaged.state_dict(), whole.averaged.state_dict(), rtol=0, atol=0)


class Odd(Callback):
    def on_batch(self, run: Run) -> None: ...


class Unplain(Ema):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        (Told, {}, r"Told is a class: give an object, such as Told\(\)"),
        (Odd(), {}, "Odd has on_batch, and is no callback: its methods are on_checkpoint, on_end"),
        (object(), {}, "object is no callback"),
        (Ema(), {"strategy": "fsdp"}, "Ema has a state, which training.strategy = 'fsdp'"),
    ],
)
def test_what_is_no_callback_is_refused_by_name(given: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_callbacks([given], DistributedTrainingConfig(**settings))


def test_a_state_that_no_checkpoint_could_keep_ends_the_training(fit: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"Unplain.state_dict\(\) has a lock"):
        fit(Unplain())
    broken = Unplain()
    broken.state_dict = lambda: {"seen": defaultdict(list)}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="has a defaultdict"):
        fit(broken)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("a" * 101, 1.0, "a name has letters"),
        ("x", torch.zeros(2), "was given a Tensor: give one number"),
        ("x", True, "was given a bool"),
    ],
)
def test_figures_that_are_none_are_refused_by_name(name: str, value: Any, words: str) -> None:
    session: Any = None
    with pytest.raises(ConfigError, match=words):
        Run(session).log(name, value)


def test_there_are_not_endlessly_many_names() -> None:
    run = Run(None)  # type: ignore[arg-type]
    for number in range(50):
        run.log(f"figure {number}", number)
    with pytest.raises(ConfigError, match="more than 50 names"):
        run.log("one more", 1)
