"""What `TensorFlowDistributedTrainer` refuses by name before TensorFlow is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import DistributedConfig, TensorFlowDistributedTrainer
from trainer.config import ConfigError, TLSConfig
from trainer.fit import RUN_DIR
from trainer.tensorflow.face import as_dataset, explain_settings


def never() -> Any:
    raise AssertionError("no model is made before settings and data are checked")


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"compile": "default"},
        {"communication": "topk"},
        {"strategy": "fsdp"},
        {"activation_checkpointing": True},
        {"max_node_seconds": 60.0},
        {"profile_steps": 5},
        {"start_from": "/models/a"},
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(settings: dict[str, Any]) -> None:
    [name] = settings
    with pytest.raises(ConfigError, match=rf"training\.{name} = .* is not for TensorFlow: .*leave the setting at"):
        TensorFlowDistributedTrainer(never, DistributedConfig(world_size=1, **settings))


def test_encryption_between_hosts_is_refused_where_it_is_asked_for() -> None:
    asked = DistributedConfig(world_size=1, encryption="required")
    certificates = DistributedConfig(world_size=1, tls=TLSConfig(certificate="a", key="b", ca="c"))
    assert explain_settings(asked) == ""
    assert "training.encryption" in explain_settings(asked, is_one_host=False)
    assert "training.tls" in explain_settings(certificates, is_one_host=False)
    assert explain_settings(DistributedConfig(world_size=1), is_one_host=False) == ""


def test_pairs_of_arrays_are_datasets() -> None:
    pairs = as_dataset((np.arange(6.0).reshape(3, 2), np.arange(3)), "train")
    inputs, target = pairs[1]
    assert (inputs.tolist(), int(target)) == ([2.0, 3.0], 1)
    with pytest.raises(ConfigError, match="valid: 3 inputs and 2 targets"):
        as_dataset((np.zeros(3), np.zeros(2)), "valid")


def test_data_without_positions_are_refused() -> None:
    class Pipeline:
        __module__ = "tensorflow.python.data.ops"

    with pytest.raises(ConfigError, match="train is a Pipeline: its samples have no positions"):
        as_dataset(Pipeline(), "train")  # type: ignore[arg-type]


def test_several_ranks_need_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="run_dir"):
        TensorFlowDistributedTrainer(never).fit((np.zeros((4, 2)), np.zeros(4)))


def test_a_cluster_of_ours_is_refused_with_the_launcher_to_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    with pytest.raises(ConfigError, match="dtrain launch --engine tensorflow"):
        TensorFlowDistributedTrainer(never).fit((np.zeros((4, 2)), np.zeros(4)))
