"""Which settings go with which strategy, and which names stand for one."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.strategies import require_package, settings_of_backend


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "ddp", "cpu_offload": True}, "needs sharded parameters"),
        ({"strategy": "fsdp", "compile": "default"}, "compile = 'off'"),
        ({"strategy": "horovod", "communication": "topk"}, "'allreduce', or to 'fp16'"),
        ({"strategy": "horovod", "communication": "auto"}, "'allreduce', or to 'fp16'"),
        ({"strategy": "horovod", "gather_precision": "bf16"}, "needs sharded parameters"),
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


def test_a_missing_package_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("ddp")
    for finder in (lambda _: None, _not_found):
        monkeypatch.setattr("importlib.util.find_spec", finder)
        with pytest.raises(ConfigError, match=r"'horovod', which is not installed: build .*; or set .* 'ddp'"):
            require_package("horovod")


def _not_found(name: str) -> None:
    raise ModuleNotFoundError(name)
