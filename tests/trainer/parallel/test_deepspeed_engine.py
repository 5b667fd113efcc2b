"""What DeepSpeed is told of a training, without DeepSpeed."""

from __future__ import annotations

from typing import Any

from trainer.config import DistributedTrainingConfig
from trainer.parallel.deepspeed_engine import zero_config


def told(**settings: Any) -> dict[str, Any]:
    config = DistributedTrainingConfig(strategy="deepspeed", batch_size_per_gpu=4, **settings)
    return zero_config(config, ranks=3, trained=1000)


def test_batches_are_ours_and_never_accumulated_by_deepspeed() -> None:
    config = told(gradient_accumulation_steps=5)
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (4, 12)
    assert config["gradient_accumulation_steps"] == 1


def test_stage_offload_and_clipping_are_the_settings() -> None:
    own = {"stage", "reduce_bucket_size"}
    assert told()["zero_optimization"].keys() == own
    assert told(zero_stage=2, cpu_offload=True)["zero_optimization"].keys() == own | {"offload_optimizer"}
    assert [told(zero_stage=stage)["zero_optimization"]["stage"] for stage in (1, 2, 3)] == [1, 2, 3]
    assert told(zero_stage=3, cpu_offload=True)["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert (told(clip_norm=0.5)["gradient_clipping"], told(clip_norm=None)["gradient_clipping"]) == (0.5, 0.0)


def test_no_bucket_of_gradients_is_larger_than_the_model() -> None:
    """DeepSpeed's own default would be 2 GB for the smallest one."""
    assert told()["zero_optimization"]["reduce_bucket_size"] == 1000
