from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from specs import window_spec
from steps import step_of
from thread_worlds import CPU
from torch import nn

from trainer.config import ConfigError, FactoryConfig
from trainer.data.batches import Batch, Samples
from trainer.engine.out_of_memory import MicroBatchLimit
from trainer.engine.steps import StepFlags
from trainer.model.allowed_factories import usual_parts
from trainer.model.build import build_loss, build_model
from trainer.model.compile import compiled, obstacle
from trainer.model.task import SupervisedTask
from trainer.spec import WINDOWS


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("mode", "device", "there", "message"),
    [
        ("reduce-overhead", "cpu", {"g++"}, r"'reduce-overhead' means CUDA graphs.* use 'default' or 'off'"),
        ("default", "cpu", set(), r"C\+\+ compiler.* or set training.compile = 'off'"),
        ("default", "cpu", {"clang++"}, r"\(g\+\+\).* name it in the environment variable CXX"),
        ("default", "cpu", {"g++"}, None),
        ("default", "cuda", {"g++"}, r"package triton"),
        ("reduce-overhead", "cuda", {"triton"}, None),
    ],
)
def test_what_keeps_a_model_from_being_compiled(
    mode: str, device: str, there: set[str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    found = obstacle(mode, device, there.__contains__)
    if message is None:
        assert found is None
    else:
        assert re.search(message, found or "")


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler \(no-such-compiler\).*CXX"):
        compiled(nn.Linear(1, 1), "default", CPU)


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["har_tcn", "tcn", "transformer"])
def test_a_stock_model_and_its_loss_are_one_graph(factory: str) -> None:
    spec = window_spec("abcd", 20)
    loss = build_loss(FactoryConfig(factory=usual_parts(WINDOWS, None)[1]), spec)
    module, task = build_model(FactoryConfig(factory=factory), spec, int(loss.outputs)), SupervisedTask(loss)  # type: ignore[arg-type]
    torch.compiler.reset()
    from torch._dynamo.utils import counters  # not above: every worker would load torch's compiler

    counters.clear()
    losses = torch.compile(partial(task.loss, module), backend="eager")
    losses((torch.randn(8, 20, 4), torch.randn(8))).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_compiled_model_has_the_same_losses_and_keeps_its_names() -> None:
    """With activations computed twice, too."""

    def losses(mode: str) -> tuple[list[float], list[str]]:
        torch.manual_seed(0)
        net = Blocks()
        step = step_of(net, compile=mode, weight_decay=0.0)
        found = []
        made = torch.Generator().manual_seed(1)
        step.apply_limit(MicroBatchLimit(8, mode != "off"))
        for number in range(6):
            windows, target = torch.randn(8, 3, 2, generator=made), torch.ones(8)
            found.append(step(Batch(8, (Samples(0, 8, (windows, target)),), 0), number, 0.05, StepFlags()).loss_sum)
        return found, list(net.state_dict())

    plain, names = losses("off")
    from torch._dynamo.utils import counters  # not above: every worker would load torch's compiler
    from torch._inductor import config

    counters.clear()
    with config.patch(compile_threads=1):  # each of its processes would import torch
        fast, fast_names = losses("default")
    # One graph holds the model and its loss; nothing in it goes back to Python.
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert fast == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0]
    assert fast_names == names
