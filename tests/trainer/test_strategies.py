"""Which settings go with which strategy, and which names stand for one."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.strategies import require_package, settings_of_backend, settings_of_deepspeed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "ddp", "cpu_offload": True}, "needs sharded parameters"),
        ({"strategy": "ddp", "gather_precision": "bf16"}, "training.strategy to fsdp or hsdp"),
        ({"strategy": "fsdp", "compile": "default"}, "compile = 'off'"),
        ({"strategy": "fsdp", "precision": "fp16"}, "'bf16'"),
        ({"strategy": "hsdp", "communication": "topk"}, "'allreduce'"),
        ({"strategy": "horovod", "communication": "topk"}, "'allreduce', or to 'fp16'"),
        ({"strategy": "horovod", "gather_precision": "bf16"}, "needs sharded parameters"),
        ({"strategy": "horovod", "cpu_offload": True}, "fsdp or hsdp, or to deepspeed"),
        ({"strategy": "horovod", "zero_stage": 2}, "zero_stage = 2 is DeepSpeed's"),
        ({"strategy": "deepspeed", "compile": "default"}, "compile = 'off'"),
        ({"strategy": "deepspeed", "communication": "fp16"}, "set it to 'allreduce'"),
        ({"strategy": "deepspeed", "precision": "fp16"}, "set it to 'bf16'"),
        ({"strategy": "deepspeed", "gather_precision": "bf16"}, "needs sharded parameters"),
        ({"strategy": "deepspeed", "encryption": "required"}, "unencrypted"),
        ({"strategy": "horovod", "encryption": "required"}, "unencrypted, and training.encryption = 'required'"),
        ({"strategy": "horovod", "tls": {"certificate": "a", "key": "b", "ca": "c"}}, "training.tls is set"),
    ],
)
def test_pairs_that_make_no_sense_are_refused_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedTrainingConfig(**settings)


def test_pairs_that_do_are_taken() -> None:
    for settings in ({"communication": "fp16"}, {"precision": "bf16"}, {"compile": "default"}, {"precision": "fp16"}):
        assert not DistributedTrainingConfig(strategy="horovod", **settings).is_sharded  # type: ignore[arg-type]
    assert DistributedTrainingConfig(strategy="hsdp", precision="bf16").is_sharded


def test_a_backend_is_an_engine_or_what_ranks_communicate_by() -> None:
    assert settings_of_backend("horovod") == {"strategy": "horovod"}
    assert settings_of_backend("pytorch-ddp") == {"strategy": "ddp"}
    assert settings_of_backend("nccl") == {"backend": "nccl"}
    with pytest.raises(ConfigError, match="no backend 'mpi': choose one of pytorch-ddp"):
        settings_of_backend("mpi")
    with pytest.raises(ConfigError, match=r"'ray' is not a strategy of this loop: train with trainer\.RayTrainer"):
        settings_of_backend("ray")


def test_deepspeeds_own_configuration_becomes_settings() -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    given = {"zero_optimization": offload, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    found = settings_of_deepspeed(given | {"train_micro_batch_size_per_gpu": 4})
    config = DistributedTrainingConfig(**found)
    assert (config.strategy, config.zero_stage, config.cpu_offload, config.precision) == ("deepspeed", 3, True, "bf16")
    assert (config.clip_norm, config.batch_size_per_gpu) == (0.5, 4)


def test_a_missing_package_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("ddp")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for package, remedy in (("horovod", "it is built"), ("deepspeed", "pip install")):
        with pytest.raises(ConfigError, match=f"'{package}', which is not installed: {remedy}.*; or set .* 'ddp'"):
            require_package(package)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_an_older_torch_is_refused_by_name_where_rows_are_divided(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_package("ddp")
    monkeypatch.setattr("trainer.strategies.installed_version", lambda package: (2, 12))
    require_package("ddp")
    with pytest.raises(ConfigError, match=rf"'{strategy}' needs torch 2.13 or later.*2.12 is installed.*'ddp'"):
        require_package(strategy)
