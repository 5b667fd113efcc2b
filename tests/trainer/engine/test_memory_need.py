"""Memory that does not suffice after all steps: what is measured, what is said, and the way to the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import step_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.checkpoint.manager import LATEST
from trainer.config import DistributedTrainingConfig
from trainer.data.dataset_data import DatasetData
from trainer.engine.memory_need import (
    MemoryNeed,
    explain_need,
    is_gpu_out_of_memory,
    may_move_to_cpu,
    measure_memory,
)
from trainer.engine.out_of_memory import MicroBatchLimit, limit_evaluation
from trainer.evaluation.evaluate import EVAL_BATCH
from trainer.exit_codes import DONE, FAILED

MIB = 1 << 20
NewJob = Callable[..., Any]


def need(**fields: Any) -> MemoryNeed:
    given = {"device": "cuda", "total_bytes": 16384 * MIB, "room_bytes": 1000 * MIB, "wanted": 8}
    return MemoryNeed(**{**given, **fields})  # type: ignore[arg-type]


def test_what_fits_follows_from_the_sizes_that_were_measured() -> None:
    found = need(measured=((1, 300 * MIB), (2, 500 * MIB)), failed=4)
    assert found.sample_bytes == 200 * MIB
    assert found.pass_bytes(8) == 1700 * MIB
    assert found.fits == 3  # 4 did not fit, although the line allows 4
    assert found.device_bytes(8) == round((16384 - 1000 + 1700) * MIB * 1.05)
    assert need(measured=((1, 300 * MIB), (2, 480 * MIB))).fits == 4  # 840 MiB of 950; 5 would take 1,020
    assert need(measured=((1, 100 * MIB), (2, 110 * MIB))).fits == 8, "not more than was wanted"
    assert need().fits == 0
    assert need().device_bytes(8) is None
    assert need(measured=((1, 300 * MIB),), failed=2).pass_bytes(8) == 2400 * MIB, "at most this"


def test_the_ways_out_are_named_with_their_settings_and_figures() -> None:
    told = explain_need(need(measured=((1, 300 * MIB), (2, 500 * MIB)), failed=4), DistributedTrainingConfig())
    assert "a pass takes 300 MiB with 1 sample at once and 500 MiB with 2 samples at once" in told
    assert "the GPU has 1e+03 MiB free" in told or "the GPU has 1000 MiB free" in told
    assert "training.micro_batch_floor = 3, as at most 3 of 8 samples fit at once" in told
    assert "bf16" not in told, "nobody has measured it"
    assert 'training.backend = "gloo"' in told
    assert "a GPU with 17.5 GiB for 8 samples at once, instead of 16 GiB" in told
    none = explain_need(need(), DistributedTrainingConfig(precision="bf16"))
    assert "not even one sample fits" in none
    assert "bf16" not in none
    assert "more than 16 GiB" in none
    host = explain_need(need(device="cpu", measured=((1, MIB), (2, 2 * MIB))), DistributedTrainingConfig())
    assert "start the job again" in host, "all of it would have fitted"
    assert "backend" not in host
    assert "DTRAIN_PROCESSES_PER_NODE" in host


def test_bf16_is_named_where_it_was_measured_to_take_less_with_its_time() -> None:
    measured = ((1, 300 * MIB), (2, 500 * MIB))
    told = explain_need(need(measured=measured, in_bf16=(300 * MIB, 1.73)), DistributedTrainingConfig())
    words = (
        'training.precision = "bf16", in which a pass with 2 at once takes 300 MiB instead of 500 MiB, and 1.7 times'
    )
    assert words in told
    same = explain_need(need(measured=measured, in_bf16=(480 * MIB, 0.5)), DistributedTrainingConfig())
    assert "bf16" not in same


class Wide(nn.Module):
    """A model whose activations are most of what a pass takes, and count how it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.kinds = nn.Linear(2, 512), nn.Linear(512, 1), list[torch.dtype]()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.kinds.append(hidden.dtype)
        return self.last(hidden.tanh().tanh())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pass_in_bf16_is_measured_beside_the_largest_that_is_possible(precision: str) -> None:
    module, rows = Wide(), torch.randn(64, 2)
    step = step_of(module, precision=precision, batch_size_per_gpu=64)
    found = measure_memory(step, DatasetData(TensorDataset(rows, rows[:, 0])), 64)
    sizes = [size for size, _ in found.measured]
    assert sizes == [1, 2, 4, 8, 16, 32, 64]
    if precision == "bf16":
        assert found.in_bf16 is None
        assert module.kinds == [torch.bfloat16] * len(sizes)
        return
    assert found.in_bf16 is not None
    taken, times = found.in_bf16
    assert 0.3 < taken / found.measured[-1][1] < 0.8
    assert times > 0
    assert module.kinds == [*[torch.float32] * len(sizes), torch.bfloat16, torch.bfloat16, torch.float32]


def test_it_is_said_on_how_many_ranks_a_shared_model_would_fit() -> None:
    fields: dict[str, Any] = {"measured": ((1, 300 * MIB), (2, 500 * MIB)), "failed": 4, "gathered_bytes": 10 * MIB}
    found = need(**fields, state_bytes=12000 * MIB, ranks=4)
    assert found.device_bytes(8) == round(17084 * MIB * 1.05)
    assert found.shared_bytes(4) == round(17084 * MIB * 1.05) - 9000 * MIB + 10 * MIB
    assert found.sharing_ranks == 4
    told = explain_need(found, DistributedTrainingConfig())
    assert 'training.strategy = "fsdp": on 4 ranks that share the model it takes 8.74 GiB each' in told
    assert need(**fields, state_bytes=1800 * MIB, ranks=2).sharing_ranks == 8, "2 and 4 do not save enough"
    assert need(**fields, state_bytes=100 * MIB).sharing_ranks is None
    assert "fsdp" not in explain_need(found, DistributedTrainingConfig(strategy="fsdp"))


def test_the_cpu_is_taken_only_where_the_plan_leaves_the_device_open() -> None:
    real = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    auto = DistributedTrainingConfig()
    assert is_gpu_out_of_memory(real)
    assert may_move_to_cpu(real, auto, False)
    assert not may_move_to_cpu(real, auto, True), "the peers of a fixed world cannot go on without it"
    assert not may_move_to_cpu(real, DistributedTrainingConfig(backend="nccl"), False)
    assert not may_move_to_cpu(real, DistributedTrainingConfig(precision="fp16"), False)
    assert not may_move_to_cpu(MemoryError(), auto, False)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (MicroBatchLimit(32, False), EVAL_BATCH),  # memory has not run out
        (MicroBatchLimit(16, False), 16),
        (MicroBatchLimit(32, True), 32),  # at the floor already
    ],
)
def test_an_evaluation_takes_no_more_at_once_than_training_once_memory_ran_out(
    limit: MicroBatchLimit, expected: int
) -> None:
    assert limit_evaluation(limit, 32, EVAL_BATCH) == expected


@pytest.mark.slow
def test_under_a_real_limit_the_job_says_what_fits(new_job: NewJob) -> None:
    """32 samples at once take 1,280 MiB; there are 500, more or less what the process has freed since it started and
    what its threads reserve."""
    room, sample = 500, 40
    job = new_job(max_steps=4, world_size=1, micro_batch_floor=32)
    job.sections["model"] = {"factory": "user_parts:Hungry", "args": {"room_mb": room}}
    job.environment["DTRAIN_FACTORY_MODULES"] = "user_parts"
    assert job.start().wait() == [FAILED], job.log()
    result = job.result()
    memory, error = result["memory"], result["error"]
    assert result["status"] == "failed"
    assert "out of memory at step 1 with 32 samples at once" in error
    assert [size for size, _ in memory["measured"]][:3] == [1, 2, 4]
    per_sample = (memory["measured"][2][1] - memory["measured"][1][1]) / 2
    assert per_sample == pytest.approx(sample * MIB, rel=0.3)
    fits = memory["fitting_samples"]
    assert 4 <= fits < 32
    assert f"training.micro_batch_floor = {fits}" in error
    assert fits >= max(size for size, _ in memory["measured"])


def test_a_gpu_that_is_too_small_is_left_for_the_cpu(new_job: NewJob) -> None:
    job = new_job(max_steps=4, micro_batch_floor=16)
    job.environment["DTRAIN_FAULTS"] = json.dumps(
        [{"kind": "gpu_oom", "at": "forward", "step": 2, "node": 0}] * 3  # fewer samples, checkpointing, no way left
    )
    assert job.run_here() == DONE
    told = [(item["samples"], item.get("device")) for item in job.events("out_of_memory")]
    assert told == [(16, None), (16, None), (32, "cpu")]
    assert [item["step"] for item in job.events("resume")] == [2], "nothing that was done is done again"
    assert (job.result()["status"], job.result()["steps"], job.result()["device"]) == ("succeeded", 4, "cpu")


@pytest.mark.parametrize(("kind", "settings"), [("oom", {}), ("gpu_oom", {"backend": "gloo"})])
def test_where_there_is_no_way_left_the_job_says_so_and_keeps_what_was_done(
    new_job: NewJob, kind: str, settings: dict[str, Any]
) -> None:
    """On a CPU, or where the device may not be chosen freely."""
    job = new_job(max_steps=4, micro_batch_floor=16, **settings)
    job.environment["DTRAIN_FAULTS"] = json.dumps([{"kind": kind, "at": "forward", "step": 2, "node": 0}] * 3)
    assert job.run_here() == FAILED
    assert [item["samples"] for item in job.events("out_of_memory")] == [16, 16]
    assert "out of memory at step 3 with 16 samples at once and activation checkpointing" in job.result()["error"]
    assert "measured: a pass takes" in job.result()["error"]
    assert (job.rundir.read_json(LATEST) or {})["step"] == 2
