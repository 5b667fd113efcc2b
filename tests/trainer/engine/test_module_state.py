"""Buffers and extra state of any type and shape: given to all ranks, put back, saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_worlds import CPU, at_once, thread_worlds
from torch import Tensor, nn

from trainer.checkpoint.manager import CheckpointError
from trainer.comm.group import GroupError
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.engine.module_state import (
    digest_state_dict,
    put_module_state,
    read_module_state,
    refuse_extra_state,
    share_module_state,
)
from trainer.engine.state import TrainingState
from trainer.engine.step import TrainingStep
from trainer.model.task import SupervisedTask
from trainer.runtime.fault_injection import Faults


class Holder(nn.Module):
    """Everything that a module may hold."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("strided", torch.zeros(3, 4)[:, ::2])
        self.register_buffer("expanded", torch.zeros(2).expand(3, 2))
        self.register_buffer("transposed", torch.zeros(2, 3).t())
        for kind in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.float64):
            self.register_buffer(str(kind).rpartition(".")[2], torch.zeros(2).to(kind))
        self.register_buffer("conjugated", torch.zeros(2, dtype=torch.complex64).conj())
        self.register_buffer("sparse", torch.zeros(2, 2).to_sparse())
        self.register_buffer("rows", torch.zeros(2, 2).to_sparse_csr())
        self.register_buffer("quantized", quantized(0))
        self.register_buffer("cache", torch.zeros(rows, 2), persistent=False)
        self.register_buffer("table", torch.zeros(rows, 2))
        self.register_buffer("late", None)
        self.extra: dict[str, Any] = {"steps": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = dict(state)

    def train_a_bit(self, number: int) -> None:
        """What ranks see differs, and so does what they hold."""
        self.conjugated = torch.tensor([1j, number]).conj()
        self.sparse = torch.diag(torch.tensor([0.0, number + 1.0])).to_sparse()
        self.rows, self.quantized = torch.full((2, 2), number + 1.0).to_sparse_csr(), quantized(number + 1)
        for name, buffer in dict(self.named_buffers()).items():
            if name in ("conjugated", "sparse", "rows", "quantized"):
                continue
            if number < 2 or name not in ("strided", "expanded", "transposed"):  # else they lie as they were made
                setattr(self, name, torch.full(buffer.shape, number + 1).to(buffer.dtype))
        self.cache = torch.full((number + 3, 2), float(number))
        self.table = torch.full((number + 4, 2), float(number))
        self.late = torch.full((2,), float(number)) if number == 0 else None
        self.extra = {"steps": number + 7, "seen": torch.ones(number + 1)}


def quantized(number: float) -> Tensor:
    return torch.quantize_per_tensor(torch.full((2,), float(number)), 0.1, 0, torch.quint8)


def contents(module: nn.Module) -> dict[str, Any]:
    return {**module.state_dict(), **dict(module.named_buffers()), "late": getattr(module, "late", None)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return digest_state_dict(one) == digest_state_dict(other)


def test_all_ranks_hold_what_one_holds() -> None:
    holders = [Holder(), Holder(), Holder()]
    for number, holder in enumerate(holders):
        holder.layer.load_state_dict(holders[0].layer.state_dict())
        holder.train_a_bit(number)
    wanted = contents(holders[0])
    with thread_worlds((0, 0, 1)) as worlds:
        at_once(lambda world: share_module_state(holders[world.rank], world, source=0), worlds)
    assert all(same(contents(holder), wanted) for holder in holders)
    assert len(wanted) == 19
    assert holders[2].table.shape == (4, 2)


def test_a_step_that_is_not_done_leaves_no_trace() -> None:
    holder = Holder()
    modules = dict(holder.named_modules())
    before, kept = read_module_state(modules), contents(Holder())
    kept |= {name: value for name, value in contents(holder).items() if name.startswith("layer")}
    strided, lies = holder.transposed, holder.transposed.data_ptr()
    holder.transposed += 5
    for name, value in (("cache", torch.ones(9, 2)), ("late", torch.ones(2)), ("extra", {"steps": 4})):
        setattr(holder, name, value)
    put_module_state(modules, before)
    assert same(contents(holder), kept)
    assert holder.transposed is strided, "it is put back in its place, of which others may have views"
    assert holder.transposed.data_ptr() == lies


def state_of(module: nn.Module) -> TrainingState:
    config = DistributedTrainingConfig(world_size=1)
    return TrainingState(TrainingStep(module, SupervisedTask(nn.MSELoss()), config, CPU, Faults({}, 0)))


def test_what_has_grown_is_taken_from_a_checkpoint_and_what_was_made_otherwise_is_not(tmp_path: Path) -> None:
    grown, fresh, other = state_of(Holder()), state_of(Holder()), state_of(Holder(rows=3))
    assert isinstance(grown.module, Holder)
    grown.module.train_a_bit(1)
    grown.keep_best()
    torch.save(grown.capture(best_is_saved=False), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh.restore(saved)
    assert same(fresh.module.state_dict(), grown.module.state_dict())
    assert fresh.module.extra["steps"] == 8
    fresh.restore(state_of(Holder()).capture())
    assert fresh.module.table.shape == (2, 2), "and to one of before"
    grown.module.train_a_bit(0)
    fresh.restore(grown.capture())
    assert torch.equal(fresh.module.late, torch.zeros(2)), "also one that was not set when the model was made"
    fresh.restore(state_of(Holder()).capture())
    assert fresh.module.late is None
    grown.module.register_buffer("found", torch.ones(2))  # in a forward pass
    fresh.restore(grown.capture())
    assert torch.equal(fresh.module.found, torch.ones(2))
    grown.module.extra = {"path": Path("x")}
    with pytest.raises(ConfigError, match="has a PosixPath"):
        grown.capture()
    with pytest.raises(CheckpointError, match=r"table does not fit: \(5, 2\).* in the checkpoint, \(3, 2\)"):
        other.restore(saved)


def test_extra_state_that_no_checkpoint_can_keep_is_refused() -> None:
    holder = Holder()
    refuse_extra_state(holder, "ddp")
    with pytest.raises(ConfigError, match=r"extra state of the model \(Holder.* not kept by training.strategy"):
        refuse_extra_state(holder, "fsdp")
    holder.extra = {"path": Path("x")}
    with pytest.raises(ConfigError, match="has a PosixPath, and a checkpoint holds tensors and plain values only"):
        refuse_extra_state(holder, "ddp")


def test_what_no_group_can_exchange_is_a_mistake_and_no_failure_of_communication() -> None:
    def send(world: World) -> GroupError:
        assert world.group is not None
        odd: Tensor = torch.zeros(3, dtype=torch.int16)
        with pytest.raises(GroupError, match="Invalid scalar type") as failed:
            world.group.run("broadcast", lambda transport: transport.broadcast(odd, 0))
        return failed.value

    with thread_worlds() as worlds:
        for error in at_once(send, worlds):
            assert not error.communication
            assert isinstance(error.mistake, RuntimeError)
