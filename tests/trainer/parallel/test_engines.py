"""Horovod: a process where it did not start leaves, since it never would again. DeepSpeed: what it is told."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from trainer.comm.group import CompletedCollective, GroupError
from trainer.comm.horovod import horovod_variables
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.engine.deepspeed_step import zero_config
from trainer.errors import NoGenerationError
from trainer.parallel import horovod_synchronizer
from trainer.parallel.horovod_synchronizer import form_horovod


class StartingHorovod(types.ModuleType):
    """As far as `form_horovod` uses it: it starts, or its start fails."""

    def __init__(self, works: bool) -> None:
        super().__init__("horovod.torch")
        self.works, self.calls = works, list[str]()

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def init(self) -> None:
        self.calls.append("init")
        if not self.works:
            raise RuntimeError("Horovod initialization failed")


class AloneGroup:
    """A group of the second of two ranks, whose actions run at once."""

    rank, size, error = 1, 2, None

    def run(self, what: str, action: Any, bytes_: int = 0) -> Any:
        try:
            return action(self)
        except Exception as error:
            raise GroupError(str(error)) from error

    def all_reduce(self, what: str, tensor: torch.Tensor) -> CompletedCollective:
        return CompletedCollective(tensor)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [[False, 0, "127.0.0.1", 7000], value]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("DTRAIN_HOST", "127.0.0.1")
    for name in ("_OURS", "_SPOILT"):
        monkeypatch.setattr(horovod_synchronizer, name, False)
    for name in (*horovod_variables(1, [0, 0], ("", 0), ""), "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        monkeypatch.setenv(name, "")  # what is set meanwhile is undone
    return World(RankFacts(rank=1, world_size=2), torch.device("cpu"), "gloo", group=AloneGroup())  # type: ignore[arg-type]


@pytest.mark.parametrize("works", [True, False])
def test_a_process_whose_horovod_did_not_start_leaves(
    world: World, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's own flag of a failed start is never reset."""
    horovod = StartingHorovod(works)
    package = types.ModuleType("horovod")
    package.torch = horovod  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    if works:
        form_horovod(world, 5)
    else:
        with pytest.raises(
            NoGenerationError, match="cannot do so again in this process: Horovod initialization failed"
        ):
            form_horovod(world, 5)
    assert horovod.calls == ["shutdown", "init"]


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
