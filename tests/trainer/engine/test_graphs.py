"""The step in two recordings, replayed by a stand-in on a CPU: see `replays`."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replays import Replays
from steps import Squared
from thread_worlds import ALONE, CPU, at_once, thread_worlds
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.data.dataset_data import DatasetData
from trainer.engine.graphs import (
    EAGER_CALLS,
    MOST_SHAPES,
    CudaRecorder,
    GraphedCall,
    StepGraphs,
    find_obstacle,
    shape_of,
)
from trainer.engine.module_state import digest_state_dict
from trainer.engine.out_of_memory import MicroBatchLimit
from trainer.engine.step import TrainingStep
from trainer.engine.steps import NonFiniteError, StepFlags
from trainer.evaluation.evaluate import JudgeRequest
from trainer.evaluation.judge import TaskJudge
from trainer.fit import Trainer
from trainer.model.task import SupervisedTask
from trainer.rundir import RunDir
from trainer.runtime.fault_injection import Faults

NOTHING = StepFlags()
STEPS = EAGER_CALLS + 4


class Recorded(TrainingStep):
    """A step that is recorded by a stand-in."""

    recorder: Replays

    def _make_graphs(self) -> StepGraphs:
        self.recorder, self.said = Replays(), list[str]()
        return StepGraphs(self.recorder, self.said.append, self.config.cuda_graphs == "on")


def net(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
    )


def step_of(kind: type[TrainingStep], module: nn.Module, world: World = ALONE, **settings: Any) -> TrainingStep:
    config = DistributedTrainingConfig(**{"clip_norm": None, "cuda_graphs": "auto", **settings})
    made = kind(module.train(), SupervisedTask(Squared()), config, CPU, Faults({}, 0))
    made.adopt(world)
    return made


def batch(number: int, *sizes: int, ranks: int = 1) -> Batch:
    made = torch.Generator().manual_seed(number)
    parts = tuple(
        Samples(place, size, (torch.randn(size, 3, 2, generator=made), torch.randn(size, generator=made)))
        for place, size in enumerate(sizes)
    )
    return Batch(ranks * sum(sizes), parts, digest=number)


def rate(step: int) -> float:
    return 2.0 ** -(4 + step % 3)  # exact in float32, in which a recording has it


def train(step: TrainingStep, steps: int = STEPS, first: int = 0, sizes: tuple[int, ...] = (8, 8)) -> list[float]:
    return [
        step(batch(number, *sizes), number, rate(number), NOTHING).loss_sum for number in range(first, first + steps)
    ]


def digest(step: TrainingStep) -> str:
    return digest_state_dict(step.module.state_dict())


def counts(step: TrainingStep) -> tuple[int, int]:
    assert step.graphs is not None
    return step.graphs.recordings


def test_replayed_steps_have_the_bits_of_those_that_run_as_usual() -> None:
    usual, recorded = step_of(TrainingStep, net()), step_of(Recorded, net())
    assert train(usual) == train(recorded)
    assert digest(usual) == digest(recorded)
    assert counts(recorded) == (1, 1)
    # Two micro-batches to a step, of which the first three are not recorded; one update to a step.
    assert recorded.recorder.replayed == 2 * STEPS - EAGER_CALLS + STEPS - EAGER_CALLS
    assert recorded.said == []


def test_clipping_in_a_recording_is_that_of_the_host_to_rounding() -> None:
    usual, recorded = (step_of(kind, net(), clip_norm=0.05) for kind in (TrainingStep, Recorded))
    assert train(usual) == pytest.approx(train(recorded), rel=1e-5)
    unclipped = step_of(TrainingStep, net())
    assert train(unclipped) != pytest.approx(train(usual), rel=1e-3)


def test_each_shape_is_recorded_by_itself_and_too_many_are_not() -> None:
    usual, recorded = step_of(TrainingStep, net()), step_of(Recorded, net())
    for size in range(4, 6 + MOST_SHAPES):
        assert train(usual, sizes=(size,)) == pytest.approx(train(recorded, sizes=(size,)), rel=1e-5)
    assert counts(recorded) == (MOST_SHAPES, 1)


def test_recordings_of_all_shapes_share_memory_and_the_next_ones_have_their_own() -> None:
    """Replays in any order, each of which overwrites what the others have left."""
    usual, recorded = step_of(TrainingStep, net()), step_of(Recorded, net())
    for _ in range(EAGER_CALLS + 1):
        for sizes in ((4,), (8,), (8, 4), (6,)):
            assert train(usual, 1, sizes=sizes) == train(recorded, 1, sizes=sizes)
    assert counts(recorded) == (3, 1)
    pools = [id(pool) for pool, _ in recorded.recorder.made]
    assert len(pools) == 4
    assert len(set(pools)) == 2, "of the passes and of the update"
    recorded.adopt(ALONE)
    train(recorded)
    assert not {id(pool) for pool, _ in recorded.recorder.made[4:]} & set(pools)


def test_a_step_that_is_not_committed_leaves_the_weights_and_the_next_one_goes_on() -> None:
    usual, recorded = step_of(TrainingStep, net()), step_of(Recorded, net())
    train(usual), train(recorded)
    before = [each.clone() for each in recorded.parameters]
    bad = batch(99, 8, 8)
    bad.micro_batches[1].data[0][0, 0, 0] = torch.nan
    for step in (usual, recorded):
        with pytest.raises(NonFiniteError, match="a sample of the training split has nan"):
            step(bad, 99, 0.05, NOTHING)
    assert all(map(torch.equal, recorded.parameters, before))
    assert train(usual, 2, STEPS) == train(recorded, 2, STEPS)


class HalfUsed(nn.Module):
    """A model with a parameter that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs.flatten(1))


def test_a_parameter_without_a_gradient_is_left_alone_in_replays_too() -> None:
    usual, recorded = (step_of(kind, HalfUsed(), weight_decay=0.1) for kind in (TrainingStep, Recorded))
    before = recorded.module.unused.weight.clone()
    assert train(usual) == train(recorded)
    assert digest(usual) == digest(recorded)
    assert torch.equal(recorded.module.unused.weight, before)
    assert counts(recorded) == (1, 1)


def test_a_saved_state_goes_on_with_and_without_recordings() -> None:
    usual, recorded = step_of(TrainingStep, net()), step_of(Recorded, net())
    train(usual), train(recorded)
    states = [copy.deepcopy(step.state_dict()) for step in (usual, recorded)]
    assert {group["lr"] for state in states for group in state["optimizer"]["param_groups"]} == {rate(STEPS - 1)}
    crossed = [step_of(Recorded, net()), step_of(TrainingStep, net())]
    for step, before, state in zip(crossed, (usual, recorded), states, strict=True):
        step.module.load_state_dict(before.module.state_dict())
        step.load_state_dict(state)
    ends = [train(step, first=STEPS) for step in (usual, recorded, *crossed)]
    assert ends[0] == ends[1] == ends[2] == ends[3]


def test_recordings_are_made_anew_where_the_state_is_elsewhere() -> None:
    recorded = step_of(Recorded, net())
    train(recorded)
    recorded.load_state_dict(recorded.state_dict())
    assert counts(recorded) == (0, 0)
    train(recorded)
    recorded.adopt(ALONE)
    assert counts(recorded) == (0, 0)


@pytest.mark.parametrize("first_bytes", [1 << 20, 64])
def test_ranks_that_replay_sum_and_commit_as_others_do(first_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.parallel.buckets.FIRST_BYTES", first_bytes)  # one bucket, or several

    def work(kind: type[TrainingStep], world: World) -> tuple[list[float], str, tuple[int, int]]:
        step = step_of(kind, nets[world.rank], world, world_size=2)
        losses = [
            step(batch(10 * number + world.rank, 8, 8, ranks=2), number, 0.05, NOTHING).loss_sum
            for number in range(STEPS)
        ]
        return losses, digest_state_dict(dict(step.module.named_parameters())), counts(step) if step.graphs else (0, 0)

    found = []
    for kind in (TrainingStep, Recorded):
        with thread_worlds() as worlds:
            nets = [net(dropout=0.0) for _ in worlds]  # not by threads, which share random numbers
            found.append(at_once(lambda world, kind=kind: work(kind, world), worlds))
    usual, recorded = found
    assert [each[:2] for each in usual] == [each[:2] for each in recorded]
    assert usual[0][1] == usual[1][1]
    # Where buckets are summed while the pass computes, only the update is recorded.
    assert recorded[0][2] == ((1, 1) if first_bytes > 64 else (0, 1))


class Reads(nn.Module):
    """A model that does in its pass what a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs.flatten(1))
        self.extra(outputs)
        return outputs

    def extra(self, outputs: Tensor) -> None:
        raise NotImplementedError


class Item(Reads):
    def extra(self, outputs: Tensor) -> None:
        outputs.sum().item()


class Condition(Reads):
    def extra(self, outputs: Tensor) -> None:
        assert outputs.sum() < 1e9


class Counter(Reads):
    passes = 0

    def extra(self, outputs: Tensor) -> None:
        self.passes += 1


class Keeps(Reads):
    last: Tensor | None = None

    def extra(self, outputs: Tensor) -> None:
        self.last = outputs.detach()


class Renews(Reads):
    def extra(self, outputs: Tensor) -> None:
        self.seen = self.seen + 1


class Collects(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[Tensor] = []

    def extra(self, outputs: Tensor) -> None:
        self.all.append(outputs.detach())


class Draws(Reads):
    def extra(self, outputs: Tensor) -> None:
        random.random()


class DrawsByNumpy(Reads):
    def extra(self, outputs: Tensor) -> None:
        np.random.rand()


class InPlace(Reads):
    def extra(self, outputs: Tensor) -> None:
        with torch.no_grad():
            self.seen.add_(1)


def hooked() -> nn.Module:
    module = net()
    module[1].register_forward_hook(lambda *_: None)
    return module


def hooked_parameter() -> nn.Module:
    module = net()
    module[1].weight.register_hook(lambda gradient: gradient)
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Item, "a pass waits for the GPU, such as by .item"),
        (Condition, "a pass waits for the GPU"),
        (Counter, "a pass changes passes"),
        (Keeps, "a pass changes last"),
        (Renews, "a pass changes seen"),
        (Collects, "a pass changes all"),
        (Draws, "a pass changes Python's random numbers"),
        (DrawsByNumpy, "a pass changes NumPy's random numbers"),
        (hooked_parameter, r"the parameter weight of the module 1 \(Linear\) has hooks"),
        (hooked, r"the module 1 \(Linear\) has hooks, which a replay would not call"),
    ],
)
def test_what_a_replay_would_lose_is_found_and_told_once(make: Any, why: str) -> None:
    recorded, usual = step_of(Recorded, make()), step_of(TrainingStep, make())
    recorded.module.load_state_dict(usual.module.state_dict())
    assert train(recorded) == train(usual)
    [said] = recorded.said
    assert re.match(f"the step runs without CUDA graphs: {why}", said)
    assert counts(recorded) == (0, 0)
    with pytest.raises(ConfigError, match=f"cuda_graphs = 'on', and the step cannot be recorded: {why}"):
        train(step_of(Recorded, make(), cuda_graphs="on"), 1)


def test_a_buffer_that_is_changed_in_place_is_no_obstacle() -> None:
    usual, recorded = step_of(TrainingStep, InPlace()), step_of(Recorded, InPlace())
    recorded.module.load_state_dict(usual.module.state_dict())
    assert train(usual) == train(recorded)
    assert counts(recorded) == (1, 1)
    assert usual.module.seen.item() == recorded.module.seen.item() == 2 * STEPS


def test_batches_of_other_things_than_tensors_are_an_obstacle_and_plain_values_are_part_of_the_shape() -> None:
    module = net()
    assert "values of type object" in find_obstacle(module, [torch.zeros(2), object()], lambda: None, Replays())
    assert shape_of({"a": torch.zeros(2), "b": 3}) != shape_of({"a": torch.zeros(2), "b": 4})
    assert shape_of({"a": torch.zeros(2)}) != shape_of({"b": torch.zeros(2)})
    assert shape_of([torch.zeros(2), [torch.zeros(2)]]) != shape_of([[torch.zeros(2)], torch.zeros(2)])


def test_a_recording_that_fails_is_told_and_the_step_runs_as_usual() -> None:
    usual, recorded = step_of(TrainingStep, net()), step_of(Recorded, net())
    recorded.recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    assert train(usual) == train(recorded)
    assert digest(usual) == digest(recorded)
    assert recorded.said == [
        "the step runs without CUDA graphs: RuntimeError: operation not permitted when stream is capturing"
    ]


def test_memory_that_runs_out_in_a_recording_is_answered_as_anywhere() -> None:
    recorded = step_of(Recorded, net())
    recorded.recorder.fails = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.OutOfMemoryError):
        train(recorded)


def test_memory_that_runs_out_is_seen_behind_the_error_of_ending_the_recording() -> None:
    recorded = step_of(Recorded, net(), cuda_graphs="on")
    recorded.recorder.fails = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    recorded.recorder.fails.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.OutOfMemoryError):
        train(recorded)


def test_steps_of_one_thread_are_recorded_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd remembers the stream of a step's first passes: a second recorder must not lead the first elsewhere."""
    default, made, now = object(), [], [object()]
    now[0] = default

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.after = None
            made.append(self)

        def wait_stream(self, other: object) -> None:
            self.after = other

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[0])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: default)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    CudaRecorder(torch.device("cuda", 0)), CudaRecorder(torch.device("cuda", 0))
    [stream] = made
    assert now == [stream]
    assert stream.after is default


def test_computing_activations_twice_ends_recordings() -> None:
    recorded = step_of(Recorded, net())
    train(recorded)
    recorded.apply_limit(MicroBatchLimit(8, True))
    assert recorded.said == [
        "the step runs without CUDA graphs: activations are computed twice, which sets random numbers within a pass"
    ]
    train(recorded, first=STEPS)
    assert counts(recorded) == (0, 0)


def test_results_of_a_call_are_not_overwritten_by_the_next() -> None:
    call = GraphedCall(Replays())
    found = [call(lambda given: (given * 2, None), torch.tensor(float(number)))[0] for number in range(STEPS)]
    assert [float(each) for each in found if each is not None] == [2.0 * number for number in range(STEPS)]


@pytest.mark.parametrize(
    "settings", [{"strategy": "fsdp"}, {"activation_checkpointing": True}, {"compile": "reduce-overhead"}], ids=str
)
def test_settings_that_exclude_recordings_are_refused_where_those_are_required(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cuda_graphs = 'on' needs training"):
        DistributedTrainingConfig(cuda_graphs="on", **settings)
    assert DistributedTrainingConfig(cuda_graphs="auto", **settings).cuda_graphs == "auto"


def test_a_machine_without_a_gpu_refuses_graphs_that_are_required_and_trains_otherwise() -> None:
    with pytest.raises(ConfigError, match="cuda_graphs = 'on' needs a GPU; use 'auto'"):
        step_of(TrainingStep, net(), cuda_graphs="on")
    assert step_of(TrainingStep, net()).graphs is None


def graphs_in_use() -> tuple[StepGraphs, Replays, list[str]]:
    recorder, said = Replays(), list[str]()
    graphs = StepGraphs(recorder, said.append, False)
    graphs.refuse("")
    return graphs, recorder, said


def judged(model: nn.Module, graphs: StepGraphs | None) -> Any:
    """The judgement on seven full batches and a smaller one."""
    made = torch.Generator().manual_seed(3)
    split = TensorDataset(torch.randn(7 * 8 + 5, 3, 2, generator=made), torch.randn(7 * 8 + 5, generator=made))
    more = {} if graphs is None else {"replaying": graphs.evaluating}
    request = JudgeRequest(model=model, world=ALONE, device=CPU, batch_size=8, **more)
    return TaskJudge(SupervisedTask(Squared()), DatasetData(split, valid=split)).validate(request)


def test_an_evaluation_replays_its_full_batches_and_leaves_the_model_as_it_was() -> None:
    graphs, recorder, said = graphs_in_use()
    module = net().train()
    for number in range(1, 3):
        assert judged(module, graphs) == judged(module, None)
        assert recorder.replayed == number * (7 - EAGER_CALLS)
        assert module.training
        assert "forward" not in vars(module)
        with torch.no_grad():
            module[1].weight.mul_(2)  # as an update does
    assert said == []
    assert graphs.recordings == (0, 0)


def test_replays_of_an_evaluation_see_weights_that_change_in_place_and_no_pass_with_gradients_is_replayed() -> None:
    graphs, recorder, _ = graphs_in_use()
    module, inputs = net().eval(), torch.randn(4, 3, 2)
    with graphs.evaluating(module), torch.no_grad():
        for _ in range(EAGER_CALLS + 2):
            module[1].weight.mul_(1.5)
            assert torch.equal(module(inputs), twin_of(module)(inputs))
        assert recorder.replayed == 2
        with torch.enable_grad():
            module(inputs).sum().backward()
        module.train()
        module(inputs)
    assert recorder.replayed == 2
    assert module[1].weight.grad is not None


def twin_of(module: nn.Module) -> nn.Module:
    """The same model, whose passes run as usual."""
    usual = net().eval()
    usual.load_state_dict(module.state_dict())
    return usual


class Both(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs + 1, inputs + 2


@pytest.mark.parametrize(("make", "why"), [(Item, "a pass waits for the GPU"), (Counter, "a pass changes passes")])
def test_an_evaluation_that_a_replay_would_change_runs_as_usual_and_says_so_once(make: Any, why: str) -> None:
    graphs, recorder, said = graphs_in_use()
    module = make()
    for _ in range(2):
        assert judged(module, graphs) == judged(module, None)
    assert recorder.replayed == 0
    [told] = said
    assert told.startswith(f"evaluations run without CUDA graphs: {why}")


def test_outputs_that_are_no_tensor_are_not_replayed() -> None:
    graphs, recorder, said = graphs_in_use()
    module = Both().eval()
    with graphs.evaluating(module), torch.no_grad():
        for _ in range(EAGER_CALLS + 2):
            assert isinstance(module(torch.randn(4, 3, 2)), tuple)
    assert (recorder.replayed, said) == (0, ["evaluations run without CUDA graphs: its outputs are no single tensor"])


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_evaluation_whose_recording_fails_goes_on_as_usual(error: Exception) -> None:
    graphs, recorder, said = graphs_in_use()
    recorder.fails = error
    module = net()
    assert judged(module, graphs) == judged(module, None)
    assert len(said) == 1
    assert str(error) in said[0]


def test_steps_that_are_not_recorded_leave_evaluations_alone() -> None:
    graphs, recorder, _ = graphs_in_use()
    graphs.refuse("it has hooks")
    judged(net(), graphs)
    assert recorder.replayed == 0


def test_a_training_evaluates_by_replays_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[Replays] = []

    def make_graphs(step: TrainingStep) -> StepGraphs | None:
        recorders.append(Replays())
        return StepGraphs(recorders[-1], print, False)

    made = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(80, 3, 2, generator=made), torch.randn(80, 1, generator=made))
    found = []
    for name in ("usual", "recorded"):
        if name == "recorded":
            monkeypatch.setattr(TrainingStep, "_make_graphs", make_graphs)
        settings = DistributedTrainingConfig(
            world_size=1,
            batch_size_per_gpu=8,
            epochs=2,
            clip_norm=None,
            warmup_steps=0,
            schedule="constant",
            learning_rate=2.0**-9,  # exact in float32, in which a recording has it
        )
        trainer = Trainer(net(0.0), settings, loss=nn.MSELoss(), run_dir=tmp_path / name, progress=False)
        result = trainer.fit(data, valid=data)
        events = list(RunDir(str(tmp_path / name)).events())
        losses = [item["loss"] for item in events if item["kind"] == "evaluation"]
        found.append((losses, dict(result.test), digest_state_dict(result.model.state_dict())))
    assert found[0] == found[1]
    assert len(found[0][0]) == 2
    [recorder] = recorders
    steps, batches = 10, 10
    assert recorder.replayed == (2 * steps - EAGER_CALLS) + (steps - EAGER_CALLS) + 3 * (batches - EAGER_CALLS)
