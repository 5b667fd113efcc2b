"""A trainer in a process of the user's own: `examples/torchrun_script.py`, as its docstring says to start it, the order
of its steps, and nothing left open where it cannot be made."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.waiting import until
from harness.worlds import Job, run_torchrun
from trainer.config import ConfigError, parse_job
from trainer.data.shards import DataShardManager
from trainer.engine.reports import RankReports
from trainer.run import DistributedTrainer
from trainer.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torchrun_script.py"


@pytest.mark.slow
def test_two_ranks_learn_and_end_with_equal_weights(new_job: Callable[..., Job]) -> None:
    job = new_job(world_size=2, batch_size_per_gpu=64, epochs=2)
    code, said = run_torchrun(job, [str(SCRIPT)], PYTHONPATH=str(ROOT))
    assert code == 0, said
    weights = re.findall(r"rank \d: sha256 of the weights (\w{64})", said)
    assert len(weights) == 2, said
    assert weights[0] == weights[1]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+) over", said)]
    assert len(losses) == 2, said
    assert losses[1] < losses[0]


def test_each_step_says_which_one_has_to_come_first(new_job: Callable[..., Job]) -> None:
    trainer = DistributedTrainer(parse_job(new_job().write().read_text()))
    with pytest.raises(RuntimeError, match=r"initialize_distributed\(\) first"):
        trainer.setup()
    with pytest.raises(RuntimeError, match=r"initialize_distributed\(\) first"):
        trainer.synchronize_metrics({"loss": 1.0})
    with pytest.raises(RuntimeError, match=r"setup\(\) first"):
        trainer.train()
    trainer.close()


def windows(job: Job) -> DataLoader[Any]:
    shards = DataShardManager(str(job.dataset))
    rows = torch.from_numpy(shards.end_rows("train", np.arange(200)))
    return DataLoader(TensorDataset(*shards.gather(rows)), batch_size=25, shuffle=True)


def begun(job: Job) -> DistributedTrainer:
    trainer = DistributedTrainer(parse_job(job.write().read_text()))
    trainer.initialize_distributed(world_size=1, rank=0)
    return trainer


def test_in_a_world_of_one_the_documents_order_works(new_job: Callable[..., Job]) -> None:
    """A caller's own model has what a job has: checkpoints, from which it goes on, and a report."""
    job = new_job(world_size=2, batch_size_per_gpu=25, epochs=3, checkpoint_frequency=4)
    loader, trainer = windows(job), begun(job)
    try:
        model = trainer.setup_data_parallel(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
        found = [trainer.train_epoch(loader, epoch) for epoch in range(2)]
        assert [each["samples"] for each in found] == [200, 200]
        assert found[1]["loss"] == pytest.approx(found[1]["loss_sum"] / 200)
        assert found[1]["loss"] != found[0]["loss"]
        assert trainer.synchronize_metrics({"seen": 2.0}) == {"seen": 2.0}
        done = trainer.steps_done
        until(lambda: trainer.session.checkpoints.committed_step() == done, lambda: done)
    finally:
        trainer.close()
    again = begun(job)
    try:
        model = again.setup_data_parallel(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
        assert again.train_epoch(loader, 2)["samples"] == 200, "the epochs before are done"
        assert again.steps_done == done * 3 // 2
        assert isinstance(model, nn.Sequential)
        assert RunDir(str(job.run_dir)).read_json("result.json")["status"] == "succeeded"  # type: ignore[index]
        with pytest.raises(ConfigError, match=r"epochs = 3: all of them are done"):
            again.train_epoch(loader, 3)
    finally:
        again.close()


def test_a_loader_of_another_batch_size_is_refused(new_job: Callable[..., Job]) -> None:
    job = new_job(batch_size_per_gpu=4)
    trainer = begun(job)
    try:
        trainer.setup_data_parallel(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
        with pytest.raises(ConfigError, match=r"batch_size=25, and training\.batch_size_per_gpu = 4"):
            trainer.train_epoch(windows(job))
    finally:
        trainer.close()


def test_a_participant_that_cannot_be_made_leaves_no_thread_behind(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = set(threading.enumerate())
    trainer = DistributedTrainer(parse_job(new_job(backend="nccl").write().read_text()))
    with pytest.raises(ConfigError, match="nccl"):
        trainer.initialize_distributed()
    with pytest.raises(RuntimeError, match=r"initialize_distributed\(\) first"):
        _ = trainer.participant
    until(lambda: not set(threading.enumerate()) - before, threading.enumerate)
    assert (trainer.launch, trainer.steps_done) == (None, 0)
    trainer.close()


def test_phases_before_the_first_world_are_kept_and_other_events_are_dropped(new_job: Callable[..., Job]) -> None:
    job = parse_job(new_job().write().read_text())
    reports = RankReports(job, RunDir(job.run_dir))
    reports.emit("error", message="nobody is there to report as", fatal=False)
    time.sleep(0.01)
    reports.end_phase("startup")
    assert reports.seconds["startup"] > 0
    reports.close(1.0)
    assert list(RunDir(job.run_dir).events()) == []
