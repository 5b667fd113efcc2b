"""The names of other frameworks for a training: what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fit_jobs import network, points
from torch import nn

import trainer
from trainer.adapters.torch_trainers import (
    HorovodTrainer,
    PyTorchDDPTrainer,
    check_sizes,
    name_of_compression,
    settings_of_optimizer,
)
from trainer.config import ConfigError
from trainer.fit import DistributedConfig
from trainer.rundir import RunDir
from trainer.runtime.launch import ORDER, with_order

FEW: dict[str, Any] = {"batch_size": 10, "epochs": 1, "threads_per_rank": 1, "verbose": False}


def hits(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).float()


def test_a_training_by_the_names_of_ddp(tmp_path: Path) -> None:
    model = network()
    face = PyTorchDDPTrainer(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), num_gpus=1,
        loss_fn=nn.CrossEntropyLoss(), metrics={"accuracy": hits}, gradient_clipping=0.5,
        checkpoint_dir=str(tmp_path / "run"),
        resume_from_checkpoint=True, find_unused_parameters=False, scaler_init_scale=2**16, **FEW,
    )  # fmt: skip
    history = face.fit(points(), points(40, 1), epochs=2)
    job = RunDir(str(tmp_path / "run")).read_job().training
    assert (job.strategy, job.epochs, job.clip_norm, job.batch_size_per_gpu) == ("ddp", 2, 0.5, 10)
    assert (job.schedule, job.warmup_steps) == ("constant", 0)
    assert {event["learning_rate"] for event in RunDir(str(tmp_path / "run")).events("step")} == {0.01}
    assert history.best_accuracy == history.result.test["accuracy"] is not None
    assert history.total_time == history.result.train_seconds > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scaler_growth_interval": 5}, "scaler_growth_interval is always 2000"),
        ({"communication_backend": "mpi"}, "gloo or nccl"),
        ({"deepspeed_config": {"flops_profiler": {}}}, "'flops_profiler' has no counterpart here"),
        ({"deepspeed_config": {"zero_optimization": {"stage": 0}}}, r"stage = 0 .*stage \(1, 2 or 3\)"),
        ({"deepspeed_config": {"zero_optimization": {"offload_param": {"device": "nvme"}}}}, "to the device 'cpu'"),
        ({"mlflow_tracking": True}, "MLFLOW_TRACKING_URI"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=message):
        PyTorchDDPTrainer(network(), **given)


def test_the_launcher_decides_the_number_of_ranks() -> None:
    check_sizes(None, None, None, 3)
    check_sizes(8, 2, 4, 8)
    check_sizes(None, 2, 4, 8)
    with pytest.raises(ConfigError, match=r"4 GPUs .* on 1 rank, .*--nodes 1 --procs-per-node 4.*--nproc-per-node 4"):
        check_sizes(4, None, None, 1)
    with pytest.raises(ConfigError, match=r"num_gpus = 8 is not num_nodes \* gpus_per_node = 2 \* 3"):
        check_sizes(8, 2, 3, 8)


def test_more_ranks_than_were_started_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="2 GPUs are requested"):
        PyTorchDDPTrainer(network(), num_gpus=2, **FEW).fit(points())
    overrides = ("training.epochs=2", "training.world_size=3")
    monkeypatch.setenv(ORDER, with_order({}, describe="/nowhere/job.json", overrides=overrides)[ORDER])
    with pytest.raises(ConfigError, match="2 GPUs are requested, but this script was started on 3 ranks"):
        PyTorchDDPTrainer(network(), num_gpus=2, **FEW).fit(points())


def test_optimizers_that_train_otherwise_are_refused() -> None:
    [weight] = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        PyTorchDDPTrainer(network(), optimizer=torch.optim.SGD([weight], lr=1.0))
    model = network()
    with pytest.raises(ConfigError, match="Adagrad keeps something already"):
        PyTorchDDPTrainer(model, optimizer=torch.optim.Adagrad(model.parameters()))
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *given: None)
    with pytest.raises(ConfigError, match="_optimizer_step_post_hooks, such as hooks"):
        PyTorchDDPTrainer(model, optimizer=hooked)
    plain = settings_of_optimizer(torch.optim.Adam([weight], lr=0.5))
    assert (plain["learning_rate"], plain["weight_decay"], plain["schedule"]) == (0.5, 0.0, "constant")
    assert plain["decay_norms_and_biases"], "as the optimizer that was given does"
    for odd in (
        torch.optim.Adam([weight], weight_decay=0.1), torch.optim.AdamW([weight], betas=(0.5, 0.9)),
        torch.optim.AdamW([{"params": [weight]}, {"params": [nn.Parameter(torch.zeros(1))]}]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"give AdamW with one parameter group|unusual"):
            settings_of_optimizer(odd)


def test_compression_by_name_or_by_class() -> None:
    class FP16Compressor: ...

    assert [name_of_compression(kind) for kind in ("none", "fp16", FP16Compressor)] == ["allreduce", "fp16", "fp16"]
    with pytest.raises(ConfigError, match="'bf16': choose 'fp16' or 'none'"):
        name_of_compression("bf16")


def test_without_horovod_the_face_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer.HorovodTrainer is HorovodTrainer
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed"):
        HorovodTrainer(network())


def test_settings_may_name_an_engine_as_their_backend() -> None:
    config = DistributedConfig(backend="horovod")  # type: ignore[arg-type]
    assert (config.strategy, config.backend) == ("horovod", "auto")
    assert DistributedConfig(backend="gloo").backend == "gloo"
    with pytest.raises(ValueError, match="backend"):
        DistributedConfig(backend="carrier-pigeon")  # type: ignore[arg-type]
