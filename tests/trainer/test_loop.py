"""`Loop` in one process: equal to `fit` where it does the same, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_jobs import QUIET, points
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ChainedScheduler, StepLR

from trainer import Callback, Loop, Run, Trainer
from trainer.config import ConfigError
from trainer.fit import TrainingFailedError
from trainer.loop import LoopLeftError
from trainer.rundir import RunDir
from trainer.runtime.launch import ORDER, with_order

CONFIG: dict[str, Any] = {
    "epochs": 2, "batch_size_per_gpu": 10, "gradient_accumulation_steps": 2, "threads_per_rank": 1,
}  # fmt: skip


def network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8) if norm else nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def losses(model: nn.Module, part: Any) -> Tensor:
    return cross_entropy(model(part[0]), part[1], reduction="none")


def new_loop(run_dir: Path, **given: Any) -> Loop:
    return Loop({**CONFIG, **given.pop("config", {})}, run_dir=run_dir, tracking=QUIET, progress=False, **given)


def train(loop: Loop, model: nn.Module, optimizer: Any, before_step: Callable[[Any], Any] = lambda _: None) -> None:
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
            before_step(batch)
            optimizer.step()


def test_it_equals_fit_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, a schedule, clipping, accumulation, and weights that are chosen by a validation split."""
    model = network()
    optimizer = adam(model)
    loop = new_loop(tmp_path / "loop")
    model, scheduler, optimizer = loop.setup(model, StepLR(optimizer, 3, 0.5), optimizer)
    for batch in loop.batches(points(), points(40, 1), score=lambda part: losses(model, part)):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
            norm = loop.clip_gradients(optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            loop.log("norm before", norm)
        assert batch.committed
    fitted = Trainer(
        network(), CONFIG, loss=nn.CrossEntropyLoss(), optimizer=adam, lr_scheduler=lambda made: StepLR(made, 3, 0.5),
        run_dir=tmp_path / "fit", tracking=QUIET, progress=False,
    ).fit(points(), points(40, 1))  # fmt: skip
    found = loop.result
    assert found is not None
    assert (found.steps, found.best_valid_loss) == (fitted.steps, fitted.best_valid_loss)
    for mine, theirs in zip(found.model.state_dict().values(), fitted.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = (list(RunDir(str(tmp_path / name)).events("step")) for name in ("loop", "fit"))
    assert [item["loss"] for item in mine] == [item["loss"] for item in theirs]
    assert list(RunDir(str(tmp_path / "loop")).events("figures"))[-1]["figures"].keys() == {"norm before"}


def test_stop_ends_it_well_after_the_batch(tmp_path: Path) -> None:
    model = network()
    loop = new_loop(tmp_path / "run")
    model, optimizer = loop.setup(model, adam(model))
    train(loop, model, optimizer, lambda batch: loop.stop() if batch.step == 2 else None)
    assert loop.result is not None
    assert loop.result.steps == 3
    assert RunDir(str(tmp_path / "run")).read_json("result.json")["early_stopped"] is True  # type: ignore[index]


@pytest.mark.parametrize("how", ["break", "error"])
def test_a_loop_that_is_left_has_failed_and_can_be_resumed(tmp_path: Path, how: str) -> None:
    def loop_until(last: int, callbacks: Any = ()) -> Loop:
        model = network()
        loop = new_loop(tmp_path / "run", config={"checkpoint_frequency": 1}, callbacks=callbacks)
        model, optimizer = loop.setup(model, adam(model))
        for batch in loop.batches(points()):
            with batch:
                for part in batch:
                    loop.backward(losses(model, part))
                optimizer.step()
                if batch.step == last and how == "error":
                    raise KeyError("of the caller's own")
            if batch.step == last:
                break
        return loop

    if how == "error":
        with pytest.raises(KeyError, match="of the caller's own"):
            loop_until(3)
    else:
        assert loop_until(3).result is None
    result: Any = RunDir(str(tmp_path / "run")).read_json("result.json")
    said = "KeyError" if how == "error" else "loop.stop() ends a training well"
    assert (result["status"], said in result["error"]) == ("failed", True), result
    counted = Counting()
    resumed = loop_until(99, [counted]).result
    assert resumed is not None
    assert counted.steps[0] in (1, 2, 3, 4, 5), "after the last checkpoint that was written, in the background"
    assert counted.steps == list(range(counted.steps[0], resumed.steps + 1))


class Counting(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, run: Run) -> None:
        self.steps.append(run.step)


def test_what_is_discarded_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the second step: running statistics are as before, and the step is done again in parts."""
    monkeypatch.setenv("DTRAIN_FAULTS", json.dumps([{"kind": "oom", "at": "backward", "step": 1, "node": 0}]))
    model = network(norm=True)
    loop = new_loop(tmp_path / "run")
    model, optimizer = loop.setup(model, adam(model))
    norm, seen = model[1], []
    for batch in loop.batches(points()):
        with batch:
            seen.append((batch.step, int(norm.num_batches_tracked)))
            for part in batch:
                loop.backward(losses(model, part))
            optimizer.step()
    assert seen[:4] == [(0, 0), (1, 2), (1, 2), (2, 6)]
    assert loop.result is not None
    assert loop.result.samples_seen == 2 * len(points())


def test_bf16_and_a_mean_are_taken(tmp_path: Path) -> None:
    model = network()
    loop = new_loop(tmp_path / "run", config={"precision": "bf16"})
    model, optimizer = loop.setup(model, adam(model))
    kinds = set()
    for batch in loop.batches(points()):
        with batch:
            for inputs, target in batch:
                with loop.autocast():
                    outputs = model(inputs)
                kinds.add(outputs.dtype)
                loop.backward(cross_entropy(outputs.float(), target))
            optimizer.step()
    assert kinds == {torch.bfloat16}


def test_a_mean_is_that_of_its_micro_batch(tmp_path: Path) -> None:
    """Micro-batches of unequal sizes: the mean of each counts as its samples do."""
    weights = []
    for name, mean in (("each", False), ("mean", True)):
        model = network()[0]
        loop = new_loop(tmp_path / name, config={"gradient_accumulation_steps": 4, "batch_size_per_gpu": 9})
        model, optimizer = loop.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in loop.batches(points()):
            with batch:
                for inputs, _ in batch:
                    each = model(inputs).square().sum(1)
                    loop.backward(each.mean() if mean else each)
                optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.allclose(*weights, atol=1e-6)


def test_a_described_loop_ends_untrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `dtrain train --script` asks for it, before it plans and asks for nodes."""
    monkeypatch.setenv(ORDER, with_order({}, describe=str(tmp_path / "described.json"))[ORDER])
    model = network()
    loop = new_loop(tmp_path / "run")
    model, optimizer = loop.setup(model, adam(model))
    with pytest.raises(SystemExit) as ended:
        train(loop, model, optimizer)
    assert ended.value.code == 0
    described = json.loads((tmp_path / "described.json").read_text())
    assert described["samples"]["train"] == len(points())


def made(tmp_path: Path, **given: Any) -> tuple[Loop, nn.Module, Any]:
    model = network()
    loop = new_loop(tmp_path / "run", **given)
    return loop, *loop.setup(model, adam(model))


def without_a_block(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for _ in loop.batches(points()):
        pass


def without_a_step(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    train(loop, model, type("None", (), {"step": lambda _: None})())


def two_steps(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
                optimizer.step()


def too_few_losses(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(losses(model, part)[:-1])


def outside(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            pass
        loop.backward(torch.zeros(10))


def an_evaluation_without_score(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    next(loop.batches(points(), points(40, 1)))


def more_gradients_after_clipping(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
                loop.clip_gradients(optimizer, 1.0)


def a_schedule_outside(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    scheduler = loop.setup(StepLR(optimizer.optimizer, 3))
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
            optimizer.step()
        scheduler.step()


def a_closure(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            optimizer.step(lambda: 0.0)


def a_group_too_late(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def a_state_too_late(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for _ in loop.batches(points()):
        loop.register(order=torch.utils.data.RandomSampler(range(3)))


def a_clip_after_the_step(loop: Loop, model: nn.Module, optimizer: Any) -> None:
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
            optimizer.step()
            loop.clip_gradients(optimizer, 1.0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("where", ["outside", "before"])
def test_an_own_parameter_changes_only_after_the_step(tmp_path: Path, where: str, several: bool) -> None:
    """As the clipped weights of a critic do: what is changed before, a discarded step would change twice."""
    loop, model, optimizer = made(tmp_path, several_steps=several)

    def change() -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)

    def go() -> None:
        for batch in loop.batches(points()):
            with batch:
                for part in batch:
                    loop.backward(losses(model, part))
                if where == "before" and batch.step == 2:
                    change()
                optimizer.step()
                change()
            if where == "outside" and batch.step == 2:
                change()

    with pytest.raises(ConfigError, match=r"0.weight was changed (outside|before).*on_step of a callback"):
        go()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (a_group_too_late, "add_param_group after loop.batches"),
        (a_state_too_late, "call loop.register before loop.batches"),
        (a_clip_after_the_step, "clip before"),
        (without_a_block, "`with batch:`"),
        (without_a_step, "no optimizer has used the gradients"),
        (two_steps, "after the optimizer's step of this batch"),
        (too_few_losses, "loop.backward gave shape (9,)"),
        (outside, "belongs into the block"),
        (an_evaluation_without_score, "needs score=…"),
        (more_gradients_after_clipping, "between loop.clip_gradients and optimizer.step"),
        (a_schedule_outside, "a scheduler moved on outside"),
        (a_closure, "takes no closure"),
    ],
)
def test_what_a_loop_does_wrong_is_refused_by_name(
    tmp_path: Path, body: Callable[[Loop, nn.Module, Any], None], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        body(*made(tmp_path))
    assert said in str(refused.value)


@pytest.mark.parametrize("where", ["outside", "before"])
def test_a_parameter_without_an_optimizer_changes_only_with_the_step(tmp_path: Path, where: str) -> None:
    """A discarded step could not take it back. Within the block after the step it may change."""
    model, frozen = network(), network().requires_grad_(False)
    loop = new_loop(tmp_path / where)
    model, frozen, optimizer = loop.setup(model, frozen, adam(model))

    def change() -> None:
        with torch.no_grad():
            frozen[0].weight.mul_(0.9)

    def go() -> None:
        for batch in loop.batches(points()):
            with batch:
                for part in batch:
                    loop.backward(losses(model, part))
                if where == "before" and batch.step == 2:
                    change()
                optimizer.step()
                change()
            if where == "outside" and batch.step == 2:
                change()

    with pytest.raises(ConfigError, match=r"sequential2.0.weight was changed (outside|before).*on_step of a callback"):
        go()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "fsdp"}, "is for Trainer.fit"),
        ({"precision": "fp16"}, "needs a scaled loss"),
        ({"learning_rate": 0.5}, "training.learning_rate has no effect in a Loop"),
        ({"clip_norm": None}, "training.clip_norm has no effect"),
        ({"compile": "default"}, "training.compile has no effect"),
        ({"early_stopping_patience": 2}, "needs a validation split"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    loop, model, optimizer = made(tmp_path, config=settings)
    with pytest.raises(ConfigError, match=said):
        train(loop, model, optimizer)


def begin(loop: Loop, parts: Any) -> None:
    loop.setup(*parts)
    loop.batches(points())


def test_what_is_set_up_must_belong_together(tmp_path: Path) -> None:
    model, other = network(), network()
    optimizer = adam(model)
    for parts, said in (
        ((model, adam(other)), "parameters of no module"),
        ((model, optimizer, adam(model)), "the same parameters"),
        ((model, optimizer, StepLR(adam(other), 1)), "an optimizer that was not given"),
        ((model, optimizer, StepLR(optimizer, 1), StepLR(optimizer, 2)), "two schedulers"),
        ((model, 3), "given a int"),
        ((model,), r"call loop.setup\(model, optimizer\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            begin(new_loop(tmp_path / "run"), parts)
    with pytest.raises(ConfigError, match="needs state_dict"):
        new_loop(tmp_path / "run").register(counter=object())
    with pytest.raises(ConfigError, match="give a Linear to loop"):
        new_loop(tmp_path / "run").register(head=nn.Linear(1, 1))


def test_memory_that_runs_out_after_the_commit_makes_no_update_twice(tmp_path: Path) -> None:
    model, updates = network(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    loop = new_loop(tmp_path / "run")
    model, wrapped = loop.setup(model, optimizer)

    def go() -> None:
        for batch in loop.batches(points()):
            with batch:
                for part in batch:
                    loop.backward(losses(model, part))
                wrapped.step()
                if batch.step == 2:
                    raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TrainingFailedError, match=r"memory ran out after optimizer\.step"):
        go()
    assert len(updates) == 3


def test_a_loop_whose_failure_was_caught_does_not_end_as_if_well(tmp_path: Path) -> None:
    loop, *_ = made(tmp_path)

    def go() -> None:
        for batch in loop.batches(points()):
            with suppress(KeyError), batch:
                raise KeyError("a bad sample")

    with pytest.raises(LoopLeftError, match="cannot go on: KeyError: 'a bad sample'"):
        go()


def test_chained_schedules_move_on(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    both = ChainedScheduler([StepLR(optimizer, 3, 0.5), StepLR(optimizer, 2, 0.1)], optimizer=optimizer)
    loop = new_loop(tmp_path / "run", config={"epochs": 1})
    model, wrapped, both = loop.setup(model, optimizer, both)
    for batch in loop.batches(points(80)):
        with batch:
            for part in batch:
                loop.backward(losses(model, part))
            wrapped.step()
            both.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1 * 0.1)


def test_clipping_twice_is_clipping_once(tmp_path: Path) -> None:
    loop, model, optimizer = made(tmp_path)
    for batch in loop.batches(points()):
        with batch:
            for part in batch:
                loop.backward(100 * losses(model, part))
            assert loop.clip_gradients(optimizer, 0.5) > 0.5
            assert loop.clip_gradients(optimizer, 0.5) == pytest.approx(0.5, rel=1e-4)
            found = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
            assert found.item() == pytest.approx(0.5, rel=1e-4)
            optimizer.step()


def test_a_batch_may_be_left_without_a_step(tmp_path: Path) -> None:
    """As reinforcement learning does until there is enough to learn from; each step is reported and timed."""
    loop, model, optimizer = made(tmp_path, config={"log_frequency": 1})
    for batch in loop.batches(points()):
        with batch:
            if batch.step < 3:
                continue
            for part in batch:
                loop.backward(losses(model, part))
            optimizer.step()
    assert loop.result is not None
    assert loop.result.samples_seen == 2 * len(points())


def test_sparse_gradients_are_summed_and_clipped(tmp_path: Path) -> None:
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(4, 3, sparse=sparse)
        loop = new_loop(tmp_path / str(sparse))
        model, optimizer = loop.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in loop.batches(points()):
            with batch:
                for _, target in batch:
                    loop.backward(cross_entropy(model(target), target, reduction="none"))
                loop.clip_gradients(optimizer, 0.1)
                optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
