"""Streams of other libraries, as `examples/streams.py` has them: each sample once, and resumed in the middle."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.strategy_jobs import needs
from trainer import DistributedConfig, FitResult, Stream, Trainer
from trainer.config import TrackingConfig
from trainer.data.coverage import find_coverage_errors
from trainer.data.stream import try_stream
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow
SAMPLES, SHARDS = 150, 6
SETTINGS: dict[str, Any] = {
    "world_size": 1, "gradient_accumulation_steps": 3, "batch_size_per_gpu": 4, "checkpoint_frequency": 4, "epochs": 2,
    "log_frequency": 1, "threads_per_rank": 1,
}  # fmt: skip


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("streams")


def rows() -> dict[str, list[Any]]:
    chance = np.random.default_rng(0)
    return {"x": chance.normal(size=(SAMPLES, 2)).astype(np.float32).tolist(), "y": list(range(SAMPLES))}


def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
    given = [(each["x"], each["y"]) if isinstance(each, dict) else each for each in samples]
    return torch.tensor([list(x) for x, _ in given]), torch.tensor([int(y) % 3 for _, y in given])


def fit(stream: Stream, run_dir: Path, max_steps: int = 200, **settings: Any) -> FitResult:
    torch.manual_seed(0)
    stream.collate_fn = collate
    config = DistributedConfig(**{**SETTINGS, "max_steps": max_steps, **settings})
    trainer = Trainer(
        nn.Linear(2, 3), config, loss=nn.CrossEntropyLoss(), run_dir=run_dir, tracking=TrackingConfig(tensorboard=False)
    )  # fmt: skip
    return trainer.fit(stream)


def resumes(make: Callable[[], Stream], folder: Path, keeps_states: bool) -> None:
    """Each sample is used once in each of two passes, also where the training is interrupted and goes on."""
    assert try_stream(make()).keeps_states is keeps_states
    whole = fit(make(), folder / "whole")
    assert whole.samples_seen == 2 * SAMPLES
    for steps in (6, 11, 200):
        parts = fit(make(), folder / "parts", schedule="constant", warmup_steps=0, max_steps=steps)
    assert parts.steps == whole.steps
    whole = fit(make(), folder / "constant", schedule="constant", warmup_steps=0)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name
    result = RunDir(str(folder / "parts")).read_json("result.json")
    assert find_coverage_errors(result["consumed"], 1000, 2) == []


@needs("datasets")
@pytest.mark.parametrize("buffer", [0, 4, 40])
def test_hugging_face(streams: Any, tmp_path: Path, buffer: int) -> None:
    """With a shuffle buffer, too, which is in no state: then it is read forward, where its state would lose samples."""
    import datasets

    def make() -> Stream:
        found = datasets.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=SHARDS)
        return streams.hugging_face(found.shuffle(seed=3, buffer_size=buffer) if buffer else found)

    resumes(make, tmp_path, keeps_states=True)


@needs("grain")
def test_grain(streams: Any, tmp_path: Path) -> None:
    import grain

    table = rows()
    source = list(zip(table["x"], table["y"], strict=True))
    resumes(lambda: streams.grain(grain.MapDataset.source(source), SHARDS), tmp_path, keeps_states=False)


@needs("torchdata")
def test_torchdata(streams: Any, tmp_path: Path) -> None:
    table = rows()
    for shard in range(SHARDS):
        np.savez(tmp_path / f"{shard}.npz", x=table["x"][shard::SHARDS], y=table["y"][shard::SHARDS])
    paths = [str(tmp_path / f"{shard}.npz") for shard in range(SHARDS)]

    class File:
        """What is read of a file; torchdata goes on in it by reading forward."""

        def __init__(self, path: str) -> None:
            self.path = path

        def __iter__(self) -> Iterator[Any]:
            with np.load(self.path) as found:
                yield from zip(found["x"].tolist(), found["y"].tolist(), strict=True)

    resumes(lambda: streams.torchdata(paths, File), tmp_path, keeps_states=True)
