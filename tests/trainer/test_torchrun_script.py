"""A script of the user's own under torchrun: `examples/torchrun_script.py`, as its docstring says to start it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from worlds import Job, free_port

from trainer.config import ConfigError, parse_job
from trainer.run import DistributedTrainer

ROOT = Path(__file__).resolve()
while not (ROOT / "examples" / "torchrun_script.py").is_file():
    ROOT = ROOT.parent
SCRIPT = ROOT / "examples" / "torchrun_script.py"


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.long), ("--own-loop",)])
def test_two_ranks_learn_and_end_with_equal_weights(new_job: Callable[..., Job], more: tuple[str, ...]) -> None:
    job = new_job(world_size=2, batch_size_per_gpu=64, clip_norm=None)
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [torchrun, "--nproc-per-node", "2", *master, str(SCRIPT), "--config", str(job.write()), *more]
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    environment |= {**job.environment, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    weights = re.findall(r"rank \d: sha256 of the weights (\w{64})", run.stdout)
    assert len(weights) == 2, run.stdout
    assert weights[0] == weights[1]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+) over", run.stdout)]
    assert len(losses) == 2, run.stdout
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
