"""`fit` on streams, by weights and by lengths: the same training at any number of ranks, and when nodes are lost."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fit_jobs import BATCH, QUIET, SETTINGS, Scripts, be_script, network, points
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from harness.worlds import assert_same_training, launched
from trainer import DistributedConfig, FitResult, Stream, Trainer
from trainer.config import ConfigError, JobConfig, parse_job
from trainer.data.coverage import find_coverage_errors, kind_of_data
from trainer.engine.own_problem import OwnProblemMaker, describe_own_job
from trainer.engine.run_job import run_job
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch

KILLED = -signal.SIGKILL
LENGTHS = [21, 13, 1, 25, 9, 18, 0, 31, 12, 2, 14, 5]
"""Of the sub-streams: some end long before others, and a sample that is left of one micro-batch joins the last."""
MORE = {"epochs": 2, "max_steps": 100}


class Nodes(Scripts):
    """Ranks of which one comes again."""

    def until_lost(self, rank: int) -> None:
        self.wait_for(60.0, rank)

    def start_again(self, rank: int, world: int, **options: Any) -> None:
        """Start it as the next incarnation of its node."""
        environment = launched(rank, world, 1) | Launch(incarnation=2, is_elastic=True).variables()
        log = self.run_dir.parent / f"{self.run_dir.name}-{rank}-again.log"
        self.fork(rank, be_script, environment, str(log), str(self.run_dir), options)


class Part(IterableDataset[tuple[Tensor, Tensor]]):
    """A sub-stream of points, read with noise, with a state."""

    begun: ClassVar[list[int]] = []
    """Where it was begun to be read."""

    def __init__(self, number: int) -> None:
        self.number, self.at = number, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.begun.append(self.at)
        chance = torch.Generator().manual_seed(self.number)
        inputs = torch.randn(LENGTHS[self.number], 2, generator=chance)
        while self.at < len(inputs):
            self.at += 1
            found = inputs[self.at - 1]
            yield found + 0.1 * torch.randn(2), (found[0] > 0).long() + (found[1] > 0.5).long()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stream() -> Stream:
    return Stream(lambda number, count: Part(number), len(LENGTHS))


def fit(run_dir: Path, workers: int = 0, norm: bool = False, **settings: Any) -> FitResult:
    """What a script does. ``norm``: with BatchNorm, and with weights of the classes."""
    settings = {**SETTINGS, **MORE, **settings}
    loader = DataLoader(
        stream(), batch_size=BATCH // 2, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 2.0])) if norm else None
    trainer = Trainer(network(norm=norm), DistributedConfig(**settings), loss=loss, run_dir=run_dir, tracking=QUIET)
    return trainer.fit(loader, points(40, 1))


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], Nodes]]:
    """Makes launches of a script; none of their processes outlives the test."""
    made: list[Nodes] = []

    def make(name: str) -> Nodes:
        made.append(Nodes(tmp_path / name))
        return made[-1]

    yield make
    for scripts in made:
        scripts.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    """The training that nothing disturbed, in a world of one."""
    scripts = Scripts(tmp_path_factory.mktemp("whole") / "run").start(script=fit)
    assert scripts.wait() == [0], scripts.log()
    result = scripts.result()
    assert result["samples_seen"] == 2 * sum(LENGTHS)
    assert result["epochs"] == 2
    return scripts


def losses(scripts: Scripts) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in RunDir(str(scripts.run_dir)).events("step")}


def assert_same(one: Scripts, whole: Scripts) -> None:
    assert_same_training(one, whole)
    mine, theirs = losses(one), losses(whole)
    assert len(mine) > len(theirs) // 2, "only a few reports are lost with a node"
    assert mine == pytest.approx({step: theirs[step] for step in mine}, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_stream_trains_the_same_at_any_number_of_ranks(begin: Any, whole: Scripts, world: int) -> None:
    """With four ranks, two of six micro-batches are on one rank and one on another; some end early."""
    scripts = begin("run").start(world, script=fit, workers=world == 2)
    assert scripts.wait() == [0] * world, scripts.log()
    assert_same(scripts, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("at", "step"), [("backward", 4), ("input", 3), ("optimizer", 9)])
def test_a_node_is_lost_and_the_others_draw_the_same_samples(begin: Any, whole: Scripts, at: str, step: int) -> None:
    fault = {"kind": "kill", "at": at, "step": step, "node": 1}
    scripts = begin("run").start(3, faults=(fault,), launch=True, script=fit, workers=at == "backward")
    assert scripts.wait() == [0, KILLED, 0], scripts.log()
    assert_same(scripts, whole)
    assert scripts.result()["world_size"] == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_node_that_comes_reads_on_where_the_others_are(begin: Any) -> None:
    """It takes sub-streams over in the middle of a pass, after others had them."""
    options = {"script": fit, "epochs": 30, "max_steps": 1000, "log_frequency": 20, "checkpoint_frequency": 20}
    alone, scripts = begin("alone").start(**options), begin("run")
    assert alone.wait() == [0], alone.log()
    fault = {"kind": "kill", "at": "backward", "step": 4, "node": 1}
    scripts.start(3, faults=(fault,), launch=True, **options)
    scripts.until_lost(1)
    scripts.start_again(1, 3, **options)
    assert scripts.wait() == [0, 0, 0], scripts.log()
    assert_same_training(scripts, alone)
    sizes = [event["world_size"] for event in RunDir(str(scripts.run_dir)).events("membership")]
    assert sizes == [3, 2, 3]


@pytest.mark.slow
def test_a_rank_without_samples_changes_neither_running_statistics_nor_the_mean(begin: Any) -> None:
    """The mean is by weights. Rank 0, whose running statistics count, has nothing left long before the end."""
    alone, three = begin("alone").start(script=fit, norm=True, epochs=1), begin("three")
    assert alone.wait() == [0], alone.log()
    assert three.start(3, script=fit, norm=True, epochs=1).wait() == [0, 0, 0], three.log()
    assert losses(three) == pytest.approx(losses(alone), rel=1e-4)
    mine, theirs = three.weights(), alone.weights()
    counted = [name for name in mine if name.endswith("num_batches_tracked")]
    assert [int(mine[name]) for name in counted] == [sum(-(-sum(LENGTHS[part::6]) // 5) for part in (0, 3))]
    for name in ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias"):  # the gradient of 0.bias is noise
        assert torch.allclose(mine[name], theirs[name], atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("at", ["", "backward"])
def test_ranks_with_fsdp_make_equally_many_passes(begin: Any, whole: Scripts, at: str) -> None:
    """Also while the sub-streams of one have ended; and from a checkpoint, where rows of the model were lost."""
    faults = ({"kind": "kill", "at": at, "step": 13, "node": 1},) if at else ()
    scripts = begin("run").start(3, faults=faults, launch=bool(at), script=fit, strategy="fsdp")
    assert scripts.wait() == ([0, KILLED, 0] if at else [0, 0, 0]), scripts.log()
    assert_same(scripts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_resumed_where_it_was_bit_for_bit(begin: Any, whole: Scripts, workers: int) -> None:
    scripts = begin("run")
    fault = {"kind": "kill", "at": "forward", "step": 7, "node": 0}
    assert scripts.start(faults=(fault,), script=fit, workers=workers).wait() == [KILLED], scripts.log()
    assert scripts.start(script=fit, workers=workers).wait() == [0], scripts.log()
    assert scripts.result()["weights_sha256"] == whole.result()["weights_sha256"]
    assert_same(scripts, whole)


LENGTHS_OF_TEXTS = [1 + (7 * number) % 23 for number in range(150)]
WEIGHTS = [float(number % 4) for number in range(150)]


def fit_in_order(run_dir: Path, by: str, **settings: Any) -> FitResult:
    """What a script does with weights, or with lengths."""
    settings = {**SETTINGS, **settings}
    given: dict[str, Any] = {"weights": {"sample_weights": WEIGHTS}, "lengths": {"lengths": LENGTHS_OF_TEXTS}}[by]
    trainer = Trainer(network(), DistributedConfig(**settings), run_dir=run_dir, tracking=QUIET)
    return trainer.fit(DataLoader(points(), batch_size=BATCH, shuffle=True), points(40, 1), **given)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["weights", "lengths"])
def test_weights_and_lengths_train_the_same_when_a_node_is_lost(begin: Any, by: str) -> None:
    alone = begin("alone").start(script=fit_in_order, by=by)
    assert alone.wait() == [0], alone.log()
    fault = {"kind": "kill", "at": "backward", "step": 4, "node": 1}
    scripts = begin("run").start(3, faults=(fault,), launch=True, script=fit_in_order, by=by)
    assert scripts.wait() == [0, KILLED, 0], scripts.log()
    assert_same(scripts, alone)
    assert {item.get("kind", "samples") for item in scripts.result()["consumed"]} == {
        "draws" if by == "weights" else "samples"
    }


ALONE: dict[str, Any] = {"world_size": 1, "gradient_accumulation_steps": 2, "batch_size_per_gpu": 5}


def trained(run_dir: Path, data: Any, loss: Any = None, model: nn.Module | None = None, **given: Any) -> FitResult:
    """A training in this process."""
    names = {"valid", "test", "sample_weights", "lengths"}
    splits = {name: given.pop(name) for name in [*given] if name in names}
    config = DistributedConfig(**{**SETTINGS, **ALONE, **given})
    return Trainer(model or network(), config, loss=loss, run_dir=run_dir, tracking=QUIET).fit(data, **splits)


@pytest.mark.slow
def test_a_stream_in_one_process_ends_with_its_passes_or_with_max_steps(tmp_path: Path) -> None:
    data = Stream(lambda number, count: Part(number), len(LENGTHS))
    result = trained(tmp_path / "passes", data, epochs=1, max_steps=500, valid=points(9), log_frequency=100)
    assert result.samples_seen == sum(LENGTHS)
    written = RunDir(str(tmp_path / "passes"))
    found = written.read_json("result.json")
    assert (found["epochs"], found["consumed"][0]["drawn"]) == (1, LENGTHS)
    assert [event["step"] for event in written.events("evaluation") if event["split"] == "valid"] == [result.steps]
    assert list(written.events("step"))[-1]["step"] == result.steps
    short = trained(tmp_path / "steps", data, epochs=9, max_steps=4)
    assert (short.steps, short.samples_seen) == (4, 40)
    found = RunDir(str(tmp_path / "steps")).read_json("result.json")
    assert find_coverage_errors(found["consumed"], 1000, int(found["epochs"])) == []
    Part.begun.clear()
    more = trained(tmp_path / "steps", data, epochs=9, max_steps=7)
    assert max(Part.begun) > 1, "from a state in the checkpoint; to be tried, it begins at 0 and at 1"
    assert (more.steps, more.samples_seen) == (7, 70)
    with pytest.raises(ConfigError, match=r"stream-\w+-of-6"):
        trained(tmp_path / "steps", Stream(lambda number, count: Part(number), 6), epochs=9, max_steps=9)


def test_a_stream_that_cannot_be_trained_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = Stream(lambda number, count: Part(number), len(LENGTHS))
    for given, said in [
        ({}, "set it"),
        ({"max_steps": 4, "gradient_accumulation_steps": 5}, "a multiple of 5"),
        ({"max_steps": 4, "strategy": "deepspeed"}, "set it to 'ddp', 'fsdp' or 'hsdp'"),
        ({"max_steps": 4, "valid": data}, r"valid=list\(dataset\)"),
        ({"max_steps": 4, "sample_weights": [1.0]}, "sample_weights are of samples with positions"),
        ({"max_steps": 4, "lengths": [1.0]}, "lengths are of samples with positions"),
    ]:
        with pytest.raises(ConfigError, match=said):
            trained(tmp_path / "run", data, **given)
    with pytest.raises(ConfigError, match=r"Give trainer.Stream\(make_substream, count=…\)"):
        trained(tmp_path / "run", Part(0))
    assert not (tmp_path / "run").exists()


def test_what_a_sample_is_called_where_it_is_no_number(tmp_path: Path) -> None:
    def make(number: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for sample in range(8):
            value = float("nan") if (number, sample) == (1, 5) else float(sample + number)
            yield torch.tensor([value, 1.0]), torch.tensor(sample % 3)

    with pytest.raises(Exception, match=r"sample 5 of sub-stream 1 of the training split has nan in its inputs"):
        trained(tmp_path / "run", Stream(make, 2), max_steps=9)


def test_weights_and_lengths_in_one_process(tmp_path: Path) -> None:
    class Noted(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        read: list[int] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 60

        def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
            self.read.append(position)
            return torch.tensor([float(position), 1.0]), torch.tensor(position % 3)

    data = Noted()
    trained(tmp_path / "weights", data, sample_weights=[0.0] * 59 + [2.0], epochs=2)
    assert set(data.read[-100:]) == {59}
    found = RunDir(str(tmp_path / "weights")).read_json("result.json")
    assert [item["kind"] for item in found["consumed"]] == ["draws", "draws"]
    assert kind_of_data(RunDir(str(tmp_path / "weights")).read_job().dataset.dataset_id or "") == "draws"
    assert find_coverage_errors(found["consumed"], 60, 2) == []
    with pytest.raises(ConfigError, match="weights-"):
        trained(tmp_path / "weights", data, sample_weights=[0.0] * 58 + [1.0, 2.0], epochs=3)
    data.read.clear()
    lengths = [position % 7 for position in range(60)]
    trained(tmp_path / "lengths", data, lengths=lengths, epochs=1)
    assert sorted(data.read[-60:]) == list(range(60))
    batches = [{position % 7 for position in data.read[-60:][first : first + 10]} for first in range(0, 60, 10)]
    assert max(max(each) - min(each) for each in batches) <= 2
    with pytest.raises(ConfigError, match=r"training.global_batch_size = 20 \(10 before\)"):
        trained(tmp_path / "lengths", data, lengths=lengths, epochs=2, batch_size_per_gpu=10)


def test_a_job_names_a_stream_and_the_order_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", f"{__name__},fit_jobs")

    def job(function: str, **training: Any) -> JobConfig:
        document = {
            "job_id": "j", "run_dir": str(tmp_path / "run"), "dataset": {"uri": f"factory:{__name__}:{function}"},
            "model": {"factory": f"{__name__}:network"}, "loss": {"factory": "cross_entropy"},
            "training": {**ALONE, "threads_per_rank": 1, **training}, "tracking": {"tensorboard": False},
        }  # fmt: skip
        return parse_job(json.dumps(document))

    cpu, maker = torch.device("cpu"), OwnProblemMaker()
    data = maker.open_data(job("ordered"), cpu)
    assert data.drawing is not None
    assert data.dataset_id.endswith(data.drawing.name)
    assert data.read("train", np.arange(3), cpu) == "3 samples"
    with pytest.raises(ConfigError, match="known keys are train, valid, test, sample_weights, lengths, collate_fn"):
        maker.open_data(job("misspelt"), cpu)
    whole = job("stream", max_steps=100, epochs=1)
    RunDir(whole.run_dir).make()
    assert run_job(whole) == 0
    result = RunDir(whole.run_dir).read_json("result.json")
    assert result["samples_seen"] == sum(LENGTHS)
    (tmp_path / "job.json").write_text(whole.to_json())
    with redirect_stdout(io.StringIO()) as told:
        describe_own_job(str(tmp_path / "job.json"))
    described = json.loads(told.getvalue())
    assert described["samples"] == {"train": 1000, "valid": 0, "test": 0}
    assert described["dataset_id"].endswith("-of-12")


def ordered() -> dict[str, Any]:
    return {"train": points(), "lengths": LENGTHS_OF_TEXTS, "collate_fn": lambda samples: f"{len(samples)} samples"}


def misspelt() -> dict[str, Any]:
    return {"train": points(), "length": LENGTHS_OF_TEXTS}
