"""The stock model on windows of a small market, given as objects: by DDP, in processes of its own, and by adapters."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trainer import DistributedConfig, Trainer
from trainer.config import FactoryConfig, TrackingConfig
from trainer.model.build import build_loss, build_model
from trainer.rundir import RunDir
from trainer.runtime.packages import is_installed

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from market import Market

from harness.worlds import FORKS, free_port

MARKET = Market(tickers=4, days=400)
QUIET = TrackingConfig(tensorboard=False)
RANKS = 2
SETTINGS: dict[str, Any] = {
    "world_size": RANKS,
    "gradient_accumulation_steps": 2,
    "batch_size_per_gpu": 16,
    "epochs": 3,
    "log_frequency": 1,
    "checkpoint_frequency": 4,
    "clip_norm": 0.5,
    "threads_per_rank": 1,
    "warmup_steps": 3,
}
"""Some dozens of steps, with accumulation, clipping, decay, warm-up and the cosine."""
FIGURES = ("train", "valid", "test")


def needs(package: str, missing: str) -> pytest.MarkDecorator:
    """Skips where a package is missing."""
    return pytest.mark.skipif(not is_installed(package), reason=f"{missing} is not installed")


def windows(split: str) -> TensorDataset:
    return TensorDataset(*MARKET.gather(MARKET.rows[split]))


def stock_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return build_model(FactoryConfig(factory="tcn", args={"dropout": dropout}), MARKET.spec, 3)


def stock_loss() -> nn.Module:
    return build_loss(FactoryConfig(factory="student_t"), MARKET.spec)


class DiesOnce(Dataset[tuple[Tensor, Tensor]]):
    """The training windows; the process of one rank that reads so many of them is killed, once."""

    def __init__(self, rank: int, after: int, mark: Path) -> None:
        self.windows, self.rank, self.after, self.mark, self.read = windows("train"), rank, after, mark, 0

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if os.environ.get("RANK") == str(self.rank) and self.read > self.after and not self.mark.exists():
            self.mark.write_text("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.windows[position]


def train_by_ddp(run_dir: Path, dropout: float = 0.1, **settings: Any) -> Path:
    """Train on two ranks, and return the run directory."""
    port = free_port()
    ranks = [
        FORKS.Process(target=_be_rank, args=(rank, port, str(run_dir), dropout, settings)) for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    return run_dir


def _be_rank(rank: int, port: int, run_dir: str, dropout: float, settings: Mapping[str, Any]) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    config = DistributedConfig(**{**SETTINGS, **settings})
    trainer = Trainer(stock_model(dropout), config, loss=stock_loss(), run_dir=run_dir, tracking=QUIET)
    trainer.fit(*(windows(split) for split in FIGURES))


def losses(run_dir: Path | str) -> dict[int, float]:
    """The loss of each step; of one that was done again, the latest."""
    return {event["step"]: event["loss"] for event in RunDir(str(run_dir)).events("step")}


def valid_losses(run_dir: Path | str) -> dict[int, float]:
    found = RunDir(str(run_dir)).events("evaluation")
    return {event["step"]: event["loss"] for event in found if event["split"] == "valid"}


def largest_difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    assert mine.keys() == theirs.keys()
    assert len(mine) > 1
    return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in mine)
