"""Precisions: what a device has, and that TF32 is for the passes of a step alone. A CPU has none, so tests let it pass
for one that has, and read torch's own settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from steps import step_of
from thread_worlds import ALONE
from torch import Tensor, nn

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.engine.loop_step import LoopParts, LoopStep
from trainer.engine.memory_need import may_move_to_cpu
from trainer.engine.precision import refuse_precision, tf32_products
from trainer.engine.steps import StepFlags
from trainer.model.optimizers import USUAL
from trainer.model.task import SupervisedTask
from trainer.performance.memory import ModelBytes, rank_bytes, zero_rank_bytes
from trainer.runtime.fault_injection import Faults
from trainer.tuning.search_space import TuningContext, groups

GPU, NOTHING = torch.device("cuda"), StepFlags()


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 1))


def batch(size: int) -> Batch:
    return Batch(size, (Samples(0, size, (torch.randn(size, 3, 2), torch.randn(size))),), digest=17)


def settings() -> tuple[str, str, str]:
    """Return torch's settings for matrix products of float32; the first is of the older interface."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "of the newer interface"
    newer = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return older, newer[0].fp32_precision, newer[1].fp32_precision


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for each in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
        each.fp32_precision = "none"


class Looking(nn.Module):
    """A model that notes torch's settings in its passes."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.fails, self.seen = model(), fails, list[tuple[str, str]]()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        self.seen.append(settings()[:2])
        outputs.register_hook(lambda _: self.seen.append(settings()[:2]))
        if self.fails:
            raise ArithmeticError("a pass that fails")
        return outputs


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_precision_of_gpus_is_refused_elsewhere_by_its_name(precision: str) -> None:
    refuse_precision(precision, GPU)
    with pytest.raises(ConfigError, match=f"training.precision = '{precision}' needs a GPU; use 'bf16' or 'fp32' on"):
        step_of(model(), precision=precision)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("by", ["nobody", "older", "newer"])
def test_both_passes_compute_in_tf32_and_torchs_settings_are_those_of_before(
    by: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.engine.step.refuse_precision", lambda *_: None)
    if by == "older":
        torch.set_float32_matmul_precision("medium")
    elif by == "newer":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    before = settings()
    looking = Looking(fails)
    step = step_of(looking, precision="tf32")
    if fails:
        with pytest.raises(ArithmeticError):
            step(batch(4), 0, 0.1, NOTHING)
    else:
        step(batch(4), 0, 0.1, NOTHING)
    assert looking.seen == [("high", "tf32")] * (1 if fails else 2)
    assert settings() == before


def test_no_other_precision_touches_torchs_settings() -> None:
    before = settings()[:2]
    for precision in ("fp32", "bf16"):
        looking = Looking()
        step_of(looking, precision=precision)(batch(4), 0, 0.1, NOTHING)
        assert looking.seen == [before, before]


def test_both_interfaces_of_torch_can_be_read_in_tf32() -> None:
    """`torch.compile` reads by the older one, which raises once the newer one was used to set TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    with tf32_products():
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32


def test_a_loop_of_the_callers_own_computes_in_tf32_within_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.engine.step.refuse_precision", lambda *_: None)
    before, looking = settings(), Looking()
    parts = LoopParts(optimizers=[torch.optim.SGD(looking.parameters(), lr=0.1)], schedulers=[None])
    config = DistributedTrainingConfig(world_size=1, precision="tf32")
    task = SupervisedTask(nn.MSELoss())
    step = LoopStep(looking, task, config, torch.device("cpu"), Faults({}, 0), USUAL, 0, parts=parts)
    step.adopt(ALONE)
    for number in (0, 1):
        step.begin(batch(4), number, NOTHING)
        [(inputs, _)] = step.micro_batches()
        step.backward(looking(inputs).squeeze(1))
        if number:
            step.discard(ArithmeticError())
        else:
            step.take_optimizer_step(step.optimizers[0])
            step.complete()
        step.note_versions()
        assert settings() == before
    assert looking.seen == [("high", "tf32")] * 4


def test_memory_is_that_of_float32() -> None:
    one = ModelBytes(parameters=100, trained=100, block=10, rest=0, sample=1000.0)
    assert rank_bytes(one, 1, 8, precision="tf32") == rank_bytes(one, 1, 8) != rank_bytes(one, 1, 8, precision="bf16")
    assert zero_rank_bytes(one, 1, 2, 8, "tf32") == zero_rank_bytes(one, 1, 2, 8)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    assert not may_move_to_cpu(error, DistributedTrainingConfig(precision="tf32"), False), "a CPU has no TF32"


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_search_tries_tf32_where_there_is_a_gpu(has_gpu: bool) -> None:
    facts = TuningContext(world_size=1, local_world_size=1, cores=2, ranks_per_host=1, has_gpu=has_gpu)
    [group] = [each for each in groups(facts) if each.name == "precision"]
    tried = [each["precision"] for each in group.options(DistributedTrainingConfig(), facts)]
    assert tried == (["tf32"] if has_gpu else []) + ["bf16", "fp16"]
    assert group.changes_numbers, "what is learned in TF32 is compared"
