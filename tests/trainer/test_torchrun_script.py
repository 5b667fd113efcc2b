"""A trainer in a process of the user's own: `examples/torchrun_script.py`, as its docstring says to start it, the order
of its steps, and nothing left open where it cannot be made."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.waiting import until
from harness.worlds import Job, run_torchrun
from trainer.config import ConfigError, parse_job
from trainer.engine.reports import RankReports
from trainer.run import DistributedTrainer
from trainer.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torchrun_script.py"


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.long), ("--own-loop",)])
def test_two_ranks_learn_and_end_with_equal_weights(new_job: Callable[..., Job], more: tuple[str, ...]) -> None:
    job = new_job(world_size=2, batch_size_per_gpu=64, clip_norm=None)
    code, said = run_torchrun(job, [str(SCRIPT)], *more, PYTHONPATH=str(ROOT))
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


def test_in_a_world_of_one_the_documents_order_works(new_job: Callable[..., Job]) -> None:
    trainer = DistributedTrainer(parse_job(new_job(batch_size_per_gpu=4).write().read_text()))
    trainer.initialize_distributed(world_size=1, rank=0)
    try:
        model = trainer.setup_data_parallel(torch.nn.Linear(5, 3))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        found = trainer.train_epoch([(torch.ones(4, 5), torch.zeros(4)), (torch.zeros(2, 5), torch.ones(2))])
        assert found["samples"] == 6
        assert found["loss"] == pytest.approx(found["loss_sum"] / 6)
        assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert trainer.synchronize_metrics({"seen": 2.0}) == {"seen": 2.0}
    finally:
        trainer.close()


def test_a_model_of_ones_own_is_refused_where_it_would_have_to_regroup(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_LAUNCH", "1")
    trainer = DistributedTrainer(parse_job(new_job().write().read_text()))
    trainer.initialize_distributed()
    try:
        with pytest.raises(ConfigError, match=r"training\.regroup = false"):
            trainer.setup_data_parallel(torch.nn.Linear(1, 1))
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
