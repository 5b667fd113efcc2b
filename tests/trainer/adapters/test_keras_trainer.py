"""What `TensorFlowDistributedTrainer` takes and refuses before TensorFlow is imported."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trainer import DistributedConfig, TensorFlowDistributedTrainer
from trainer.adapters.keras_trainer import as_dataset, variables_of_tf_config
from trainer.comm.launcher_env import rank_facts
from trainer.config import ConfigError

CONFIG = DistributedConfig(world_size=1)


def never() -> Any:
    raise AssertionError("no model is made before settings and data are checked")


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16"}, {"compile": "default"}, {"strategy": "fsdp"}, {"activation_checkpointing": True}],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(settings: dict[str, Any]) -> None:
    [name] = settings
    with pytest.raises(ConfigError, match=rf"training\.{name} = .* is not for TensorFlow: .*leave the setting at"):
        TensorFlowDistributedTrainer(never, DistributedConfig(world_size=1, **settings))


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
        TensorFlowDistributedTrainer(never).fit(Pipeline())  # type: ignore[arg-type]


def tf_config(kind: str = "worker", index: int = 0, **cluster: list[str]) -> dict[str, str]:
    cluster = cluster or {"worker": ["a:1", "b:2"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_workers_are_ranks_in_their_order() -> None:
    facts = rank_facts(variables_of_tf_config(tf_config(index=2, worker=["a:1", "b:2", "a:3"])), CONFIG)
    assert (facts.rank, facts.world_size, facts.master_addr, facts.master_port) == (2, 3, "a", 1)
    assert (facts.local_rank, facts.local_world_size, facts.node_rank) == (1, 2, 0)
    chief = variables_of_tf_config(tf_config("chief", 0, chief=["[::1]:7"], worker=["b:1"]))
    assert (chief["RANK"], chief["WORLD_SIZE"], chief["MASTER_ADDR"]) == ("0", "2", "::1")
    assert variables_of_tf_config(tf_config("worker", 0, chief=["c:0"], worker=["a:1"]))["RANK"] == "1"


def test_a_launchers_variables_win() -> None:
    assert variables_of_tf_config({**tf_config(index=1), "RANK": "0", "WORLD_SIZE": "2"}) == {}
    assert variables_of_tf_config({}) == {}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not valid"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG is not valid"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG is not valid"),
        (tf_config(worker=["a:1"], ps=["b:2"]), "type 'ps'"),
        (tf_config("evaluator", 0), "type 'evaluator'"),
        (tf_config(index=2), "2 workers and says that this one is number 2"),
        (tf_config(worker=["a", "b"]), "write HOST:PORT"),
    ],
)
def test_what_is_no_cluster_of_workers_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variables_of_tf_config(variables)
