"""Optimizers and schedulers of a caller's own: the same training at any number of ranks and after every change of the
world, and what is refused by name."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from thread_worlds import ALONE, CPU, at_once, thread_worlds
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from trainer.checkpoint.files import assemble
from trainer.checkpoint.manager import CheckpointError
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig, parse_job
from trainer.data.batches import Batch, Samples
from trainer.engine.problem import refuse_differences
from trainer.engine.state import Entry, TrainingState
from trainer.engine.steps import StepFlags
from trainer.engine.workload import kinds_of
from trainer.model.optimizer_check import try_optimizer
from trainer.model.optimizers import USUAL, OptimizerRecipe, ScheduledOptimizer, recipe_for
from trainer.model.task import SupervisedTask
from trainer.runtime.fault_injection import Faults

STEPS, PARTS, SIZE = 6, 6, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        made = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=made) / 3

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def data_of(step: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(step)
    return [(torch.randn(SIZE, 6, generator=made), torch.randn(SIZE, 1, generator=made)) for _ in range(PARTS)]


def batch_of(step: int, world: World) -> Batch:
    parts = [Samples(number, SIZE, data) for number, data in enumerate(data_of(step))]
    return Batch(SIZE * PARTS, tuple(parts[world.rank :: world.world_size]), digest=0)


def two_groups(model: Net) -> Optimizer:
    return SGD(
        [
            {"params": model.head.parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": model.body.parameters()},
        ],
        lr=0.05,
        momentum=0.9,
        nesterov=True,
    )


def sequence(optimizer: Optimizer, total_steps: int) -> Any:
    first, then = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, total_steps - 2)
    return SequentialLR(optimizer, [first, then], [2])


RECIPES = {
    "groups, one cycle": OptimizerRecipe(two_groups, partial(OneCycleLR, max_lr=[0.2, 0.1])),
    "scalars, milestones": OptimizerRecipe(
        lambda model: NAdam(model.parameters(), lr=0.01), partial(MultiStepLR, milestones=[2, 4])
    ),
    "state from the start": OptimizerRecipe(lambda model: Adagrad(model.parameters(), lr=0.1), sequence),
    "nothing to keep": OptimizerRecipe(
        lambda model: SGD(model.parameters(), lr=0.05), lambda optimizer: lambda step: 0.9**step
    ),
    "of the settings": USUAL,
}


class Training:
    """A step and a state of a strategy, in worlds one after the other."""

    def __init__(self, recipe: OptimizerRecipe, strategy: str, world: World = ALONE) -> None:
        self.config = DistributedTrainingConfig(strategy=strategy)  # type: ignore[arg-type]
        make_step, make_state = kinds_of(strategy)
        task = SupervisedTask(nn.MSELoss(reduction="none"))
        self.step = make_step(Net(), task, self.config, CPU, Faults({}, 0), recipe, STEPS)
        self.state: TrainingState = make_state(self.step)
        self.enter(world, Entry())

    def enter(self, world: World, entry: Entry) -> None:
        self.world = world
        self.state.enter(world, entry, lambda _: None)
        self.step.adopt(world)

    def train(self, steps: range) -> Training:
        for step in steps:
            batch = batch_of(step, self.world)
            self.step(batch, step, 0.002 * (step + 1), StepFlags())
            self.state.progress.commit(0, batch.samples, 0)
        return self

    def weights(self) -> dict[str, Tensor]:
        with self.state.whole(self.world):
            return {name: value.detach().clone() for name, value in self.step.module.named_parameters()}


def plain(recipe: OptimizerRecipe) -> dict[str, Tensor]:
    """What a loop of a few lines, with torch's own parts, makes of the model."""
    model = Net()
    assert recipe.optimizer is not None
    assert recipe.lr_scheduler is not None
    optimizer = recipe.optimizer(model)
    made: Any = recipe.lr_scheduler
    try:
        made = made(optimizer, total_steps=STEPS)
    except TypeError:
        made = made(optimizer)
    if not hasattr(made, "step"):
        made = torch.optim.lr_scheduler.LambdaLR(optimizer, made)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, target = (torch.cat(parts) for parts in zip(*data_of(step), strict=True))
        nn.functional.mse_loss(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        made.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def on_ranks(ranks: int, work: Callable[[World], Any]) -> list[Any]:
    if ranks == 1:
        return [work(ALONE)]
    with thread_worlds(tuple(range(ranks))) as worlds:
        return at_once(work, worlds)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name] is not USUAL])
def test_any_number_of_ranks_trains_as_a_plain_loop_does(name: str, ranks: int, strategy: str) -> None:
    recipe = RECIPES[name]
    expected = plain(recipe)
    for found in on_ranks(ranks, lambda world: Training(recipe, strategy, world).train(range(STEPS)).weights()):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def saved(training: Training) -> Any:
    """The contents of a checkpoint, as a file has them."""
    file = io.BytesIO()
    torch.save(training.state.capture(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_goes_on_with_another_strategy_and_number_of_ranks(name: str) -> None:
    recipe = RECIPES[name]
    expected = Training(recipe, "ddp").train(range(STEPS)).weights()

    def begin(world: World) -> Any:
        return saved(Training(recipe, "fsdp", world).train(range(3)))

    state = assemble(on_ranks(2, begin))

    def go_on(strategy: str, world: World) -> dict[str, Tensor]:
        training = Training(recipe, strategy, world)
        training.state.restore(state)
        training.step.adopt(world)
        return training.train(range(3, STEPS)).weights()

    for strategy, ranks in (("ddp", 1), ("fsdp", 3)):
        for found in on_ranks(ranks, partial(go_on, strategy)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
@pytest.mark.parametrize("name", RECIPES)
def test_who_joins_gets_the_state_of_optimizer_and_scheduler(name: str, strategy: str) -> None:
    recipe = RECIPES[name]
    expected = Training(recipe, "ddp").train(range(STEPS)).weights()
    alone = Training(recipe, strategy).train(range(3))

    def join(world: World) -> dict[str, Tensor]:
        training = alone if world.rank == 1 else Training(recipe, strategy)
        training.enter(world, Entry(has_state=True, is_fresh=world.rank != 1, source=1, takers=[0, 2]))
        return training.train(range(3, STEPS)).weights()

    for found in on_ranks(3, join):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_step_that_is_discarded_does_not_move_the_schedule() -> None:
    training = Training(RECIPES["scalars, milestones"], "ddp")
    training.train(range(2))
    before = training.step.scheduled.options()
    training.step.faults = Faults({"DTRAIN_FAULTS": '[{"kind": "raise", "at": "backward", "node": 0, "step": 2}]'}, 0)
    with pytest.raises(Exception, match="injected"):
        training.train(range(2, 3))
    assert training.step.scheduled.options() == before
    training.train(range(2, 3))
    assert training.step.scheduled.rate == pytest.approx(0.001)


def test_rates_of_ones_own_follow_the_schedule_of_the_settings() -> None:
    config = DistributedTrainingConfig()
    made = ScheduledOptimizer(Net(), OptimizerRecipe(two_groups), config, STEPS)
    made.set_rate(config.learning_rate / 2)
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.01, 0.025]
    assert made.rate == 0.01


def test_a_schedule_that_follows_evaluations_is_told_of_them() -> None:
    recipe = OptimizerRecipe(two_groups, partial(ReduceLROnPlateau, patience=0, factor=0.5))
    training = Training(recipe, "ddp").train(range(2))
    for loss in (1.0, 2.0):
        training.step.scheduled.note_evaluation(loss)
    training.train(range(2, 3))
    assert training.step.scheduled.rate == 0.01
    other = Training(recipe, "ddp")
    other.state.restore(saved(training))
    assert other.train(range(3, 4)).step.scheduled.rate == 0.01, "the state of the schedule is a part of a checkpoint"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_who_has_missed_an_evaluation_gets_what_a_schedule_learned_of_it(strategy: str) -> None:
    recipe = OptimizerRecipe(two_groups, partial(ReduceLROnPlateau, patience=0, factor=0.5))

    def work(world: World) -> float:
        training = Training(recipe, strategy, world).train(range(2))
        if world.rank == 1:  # before rank 0 is told, a node is lost
            for loss in (1.0, 2.0):
                training.step.scheduled.note_evaluation(loss)
            training.state.progress.evaluated_step = 2
        training.enter(world, Entry(has_state=True, is_fresh=False, source=1))
        training.train(range(2, 3))
        return training.step.scheduled.rate

    assert on_ranks(2, work) == [0.01, 0.01]


def test_ranks_with_other_optimizers_are_told_apart() -> None:
    def digest(recipe: OptimizerRecipe) -> str:
        return ScheduledOptimizer(Net(), recipe, DistributedTrainingConfig(), STEPS).digest

    made = [digest(recipe) for recipe in RECIPES.values()]
    assert made == [digest(recipe) for recipe in RECIPES.values()]
    other = OptimizerRecipe(lambda model: SGD(model.parameters(), lr=0.06), RECIPES["nothing to keep"].lr_scheduler)
    assert len({*made, digest(other)}) == len(RECIPES) + 1
    same = ("d", 9, "f", made[0])
    refuse_differences([same, same])
    with pytest.raises(ConfigError, match="rank 1 has another optimizer or scheduler than rank 0"):
        refuse_differences([same, ("d", 9, "f", made[1])])


def test_what_an_optimizer_keeps_stays_of_its_type() -> None:
    net, other = Net().to(torch.bfloat16), Net().to(torch.bfloat16)
    config = DistributedTrainingConfig()
    one, two = (ScheduledOptimizer(each, USUAL, config, STEPS) for each in (net, other))
    kept = {
        place: {"step": torch.tensor(1.0), "exp_avg": torch.full(tuple(each.shape), 1 / 3), "exp_avg_sq": each.detach()}
        for place, each in enumerate(net.parameters())
    }
    one.load(kept, None)
    two.load(one.tensors(), one.options())
    assert all(state["exp_avg"].dtype is torch.float32 for state in two.tensors().values())
    assert float(two.tensors()[0]["exp_avg"][0, 0]) == torch.tensor(1 / 3).item()


def test_norms_and_biases_do_not_decay_by_default() -> None:
    model = Net()
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def decayed(**settings: Any) -> dict[str, float]:
        made = ScheduledOptimizer(model, USUAL, DistributedTrainingConfig(weight_decay=0.3, **settings), STEPS)
        groups = made.optimizer.param_groups
        return {names[id(each)]: group["weight_decay"] for group in groups for each in group["params"]}

    assert {name for name, decay in decayed().items() if decay} == {"body.0.weight", "head.weight"}
    assert set(decayed(decay_norms_and_biases=True).values()) == {0.3}


def test_the_usual_optimizer_is_torchs_adamw_to_the_last_bit() -> None:
    """Also where it goes on from torch's state, and torch from its."""
    config = DistributedTrainingConfig(learning_rate=0.1, weight_decay=0.3, decay_norms_and_biases=True)

    def stepped(module: nn.Module, optimizer: Optimizer, steps: int) -> dict[str, Any]:
        for number in range(steps):
            optimizer.zero_grad()
            module(torch.full((4, 6), number + 1.0)).square().sum().backward()
            optimizer.step()
        assert all(each.requires_grad for each in module.parameters())
        return optimizer.state_dict()

    torch.manual_seed(0)
    ours, plain = (Net(), Net())
    plain.load_state_dict(ours.state_dict())
    usual = ScheduledOptimizer(ours, USUAL, config, STEPS)
    theirs = AdamW(plain.parameters(), lr=0.1, weight_decay=0.3, fused=True)
    assert usual.kind == f"{AdamW.__module__}.AdamW"
    states = stepped(ours, usual.optimizer, 3), stepped(plain, theirs, 3)
    usual.optimizer.load_state_dict(states[1])
    theirs.load_state_dict(states[0])
    torch.testing.assert_close(
        stepped(ours, usual.optimizer, 2)["state"], stepped(plain, theirs, 2)["state"], rtol=0, atol=0
    )
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_checkpoints_of_one_group_are_continued() -> None:
    """As versions before had them, with all parameters in one group."""
    training = Training(USUAL, "ddp").train(range(3))
    state = saved(training)
    optimizer = state["step"]["optimizer"]
    places = list(range(len(list(Net().parameters()))))
    optimizer["param_groups"] = [{**optimizer["param_groups"][0], "params": places}]
    other = Training(USUAL, "ddp")
    other.state.restore(state)
    torch.testing.assert_close(
        other.train(range(3, STEPS)).weights(), training.train(range(3, STEPS)).weights(), rtol=0, atol=0
    )


class Rowwise(Optimizer):
    """Keeps something of another shape than the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["rows"] = each.grad.flatten()[:1]


class Normed(Rowwise):
    """Divides by the norm of the whole parameter, as LAMB and Muon do."""

    def __init__(self, params: Any, rate: float = 0.1) -> None:
        super().__init__(params)
        self.rate = rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(self.rate * each.grad / (each.grad.norm() + 1e-6))


class WithThread(Rowwise):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["closure"] = self.step


class Hidden(SGD):
    """Counts steps where no checkpoint looks."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step()


class Defaults(Rowwise):
    """Keeps a dictionary that a checkpoint cannot be read with."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["seen"] = defaultdict(list)


class Extra(SGD):
    def state_dict(self) -> Any:
        return super().state_dict() | {"shampoo": 1}


REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (lambda model: model, None, {}, "optimizer returned a Net: give a function from the model"),
    (lambda model: SGD([nn.Parameter(torch.zeros(1))], lr=0.1), None, {}, "parameters that are not the model's"),
    (lambda model: SGD(model.head.parameters(), lr=0.1), None, {}, r"4 parameters need a gradient.*freeze them"),
    (lambda model: torch.optim.LBFGS(model.parameters()), None, {}, r"LBFGS.step\(\) fails.*without a closure"),
    (lambda model: WithThread(model.parameters()), None, {}, "has a method, and a checkpoint holds"),
    (lambda model: Extra(model.parameters(), lr=0.1), None, {}, r"has 'shampoo' beside state"),
    (two_groups, lambda optimizer: 3, {}, "lr_scheduler returned a int: return a scheduler"),
    (two_groups, lambda optimizer: LinearLR(SGD(Net().parameters(), lr=1)), {}, "scheduler of another optimizer"),
    (two_groups, None, {"learning_rate": 0.1}, "training.learning_rate = 0.1 has no effect with an optimizer"),
    (None, partial(LinearLR, total_iters=3), {"warmup_steps": 3}, "training.warmup_steps = 3 has no effect"),
    (two_groups, None, {"strategy": "deepspeed"}, "'deepspeed' trains with AdamW"),
    (lambda model: Rowwise(model.parameters()), None, {"strategy": "fsdp"}, "'rows' of another shape.*element by el"),
    (lambda model: Normed(model.parameters(), 1e-7), None, {"strategy": "hsdp"}, "rows of body.0.weight otherwise"),
    (
        lambda model: SGD([{"params": [each], "lr": each.numel() / 100} for each in model.parameters()]),
        None, {"strategy": "fsdp"}, "has other groups, or other options",
    ),
    (lambda model: Hidden(model.parameters(), lr=0.1), None, {}, "otherwise once its state_dict.. was saved"),
    (two_groups, partial(OneCycleLR, max_lr=0.1, total_steps=4), {}, "scheduler fails after 4 of 6 steps.*total_steps"),
    (two_groups, partial(ReduceLROnPlateau, mode="max"), {}, "'max'. follows training.monitor = 'loss', of which"),
    (lambda model: SGD(model.parameters(), lr=torch.tensor(0.1)), None, {}, "optimizer's lr is a tensor"),
    (lambda model: Defaults(model.parameters()), None, {}, "has a defaultdict, and a checkpoint holds"),
    (lambda model: Normed(model.parameters()), None, {"strategy": "hsdp"}, "rows of body.0.weight otherwise"),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "scheduler", "settings", "words"), REFUSED)
def test_what_cannot_be_trained_with_is_refused_by_name(
    optimizer: Any, scheduler: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        try_optimizer(Net(), OptimizerRecipe(optimizer, scheduler), DistributedTrainingConfig(**settings), STEPS)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_usual_is_not_refused_and_leaves_the_model(name: str, strategy: str) -> None:
    model = Net()
    try_optimizer(model, RECIPES[name], DistributedTrainingConfig(strategy=strategy), STEPS)  # type: ignore[arg-type]
    torch.testing.assert_close(dict(model.named_parameters()), dict(Net().named_parameters()))
    if strategy == "ddp":  # whole updates
        try_optimizer(model, OptimizerRecipe(lambda net: Normed(net.parameters())), DistributedTrainingConfig(), STEPS)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (OptimizerRecipe(lambda model: AdamW(model.parameters())), "trained with .*NAdam, and the optimizer .*AdamW"),
        (OptimizerRecipe(lambda model: NAdam(model.parameters(), lr=0.01)), "with a scheduler of its own"),
        (
            OptimizerRecipe(RECIPES["scalars, milestones"].optimizer, partial(MultiStepLR, milestones=[5])),
            r"its scheduler began otherwise \(milestones\)",
        ),
        (
            OptimizerRecipe(
                lambda model: NAdam([{"params": [each]} for each in model.parameters()], lr=0.01),
                RECIPES["scalars, milestones"].lr_scheduler,
            ),
            "other groups of parameters",
        ),
        (USUAL, "trained with .*NAdam, and the optimizer .*AdamW"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_optimizer_is_refused_before_anything_changes(
    other: OptimizerRecipe, words: str
) -> None:
    state = saved(Training(RECIPES["scalars, milestones"], "ddp").train(range(2)))
    training = Training(other, "ddp")
    before = training.weights()
    with pytest.raises(CheckpointError, match=words):
        training.state.restore(state)
    torch.testing.assert_close(training.weights(), before, rtol=0, atol=0)


def job_of(**parts: Any) -> Any:
    import json

    return parse_job(
        json.dumps({"schema_version": 1, "job_id": "j", "run_dir": "/r", "dataset": {"uri": "/d"}, **parts})
    )


def test_a_job_names_optimizer_groups_and_scheduler() -> None:
    job = job_of(
        optimizer={
            "factory": "torch.optim:SGD",
            "args": {"lr": 0.1, "momentum": 0.9},
            "groups": [{"match": "*.bias", "args": {"weight_decay": 0.0}}, {"match": "head.*", "args": {"lr": 0.5}}],
        },
        lr_scheduler={
            "factory": "torch.optim.lr_scheduler:OneCycleLR",
            "args": {"max_lr": 0.1, "total_steps": "$total_steps"},
        },
    )
    several = {"factory": "torch.optim.lr_scheduler:MultiStepLR", "args": {"milestones": [3, "$total_steps"]}}
    named = job_of(optimizer={"factory": "torch.optim:SGD"}, lr_scheduler=several)
    milestones = ScheduledOptimizer(
        Net(), recipe_for(named.optimizer, named.lr_scheduler), named.training, 40
    ).scheduler
    assert sorted(milestones.milestones) == [3, 40]
    model = Net()
    made = ScheduledOptimizer(model, recipe_for(job.optimizer, job.lr_scheduler), job.training, 40)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(each)] for each in group["params"]] for group in made.optimizer.param_groups]
    assert groups == [
        ["body.0.bias", "body.1.bias", "head.bias"], ["head.weight"], ["body.0.weight", "body.1.weight"]
    ]  # fmt: skip
    assert made.scheduler.total_steps == 40


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"optimizer": {"factory": "mine.optim:SGD"}}, "'mine.optim' is not allowed to be imported"),
        ({"lr_scheduler": {"factory": "OneCycle"}}, "lr_scheduler.factory = 'OneCycle' is not written as"),
        ({"optimizer": {"factory": "torch.optim:SGDD"}}, "has no attribute 'SGDD'"),
        (
            {"optimizer": {"factory": "torch.optim.optimizer:register_optimizer_step_pre_hook"}},
            "is no Optimizer of torch",
        ),
        ({"lr_scheduler": {"factory": "torch.optim:SGD"}}, "is no LRScheduler of torch"),
        (
            {"optimizer": {"factory": "torch.optim:SGD", "groups": [{"match": "tail.*"}]}},
            r"no parameter of the model \(left\) is called 'tail",
        ),
        ({"optimizer": {"factory": "torch.optim:SGD", "args": {"rate": 1}}}, "rate"),
    ],
)
def test_names_that_lead_nowhere_are_refused(parts: dict[str, Any], words: str) -> None:
    job = job_of(**parts)
    with pytest.raises(ConfigError, match=words):
        try_optimizer(Net(), recipe_for(job.optimizer, job.lr_scheduler), job.training, STEPS)
