"""`TensorFlowDistributedTrainer` in real processes: the losses of DDP, also after kills; and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks.small_windows import (
    MARKET,
    QUIET,
    RANKS,
    free_port,
    largest_difference,
    losses,
    needs,
    stock_model,
    train_by_ddp,
    valid_losses,
)
from trainer import DistributedConfig, TensorFlowDistributedTrainer
from trainer.config import ConfigError
from trainer.exit_codes import EVICTED
from trainer.rundir import RunDir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    needs("tensorflow", "tensorflow"),
    needs("keras", "keras"),
]
ROOT = Path(__file__).parents[2]
SAME = 1e-6
"""TensorFlow and PyTorch round differently: 39 steps differ by 1e-7 of the loss."""
KILLED = -signal.SIGKILL


class Ranks:
    """The ranks of one start of a script, each a process with TensorFlow."""

    def __init__(self, run_dir: Path, world: int = RANKS, tf_config: bool = False, faults: Any = (), **settings: Any):
        self.run_dir, port = run_dir, free_port()
        workers = [f"127.0.0.1:{free_port()}" for _ in range(world)]
        self.processes = []
        for rank in range(world):
            place = {
                "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
                "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            if tf_config:
                task = {"type": "worker", "index": rank}
                place = {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}
            environment = {**os.environ, **place, "DTRAIN_FAULTS": json.dumps(faults), "TF_CPP_MIN_LOG_LEVEL": "2"}
            command = [sys.executable, "-m", "tests.frameworks.keras_rank", str(run_dir), json.dumps(settings)]
            with self.log_file(rank).open("a") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                    )
                )  # fmt: skip

    def log_file(self, rank: int) -> Path:
        return self.run_dir.parent / f"{self.run_dir.name}-{rank}.log"

    def log(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.run_dir.parent.glob("*.log")))

    def wait(self) -> list[int]:
        try:
            return [process.wait(400) for process in self.processes]
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    """Starts ranks; none of them outlives the test."""
    made: list[Ranks] = []

    def begin(*arguments: Any, **options: Any) -> Ranks:
        made.append(Ranks(*arguments, **options))
        return made[-1]

    yield begin
    for ranks in made:
        ranks.kill()


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_by_ddp(tmp_path_factory.mktemp("ddp") / "run", dropout=0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training by two ranks that nothing disturbed."""
    ranks = Ranks(tmp_path_factory.mktemp("whole") / "run")
    assert ranks.wait() == [0, 0], ranks.log()
    return ranks.run_dir


def read(run_dir: Path, name: str = "result.json") -> dict[str, Any]:
    return json.loads((run_dir / name).read_text())


def assert_same_bits(run_dir: Path, whole: Path) -> None:
    assert losses(run_dir) == losses(whole)
    for name in ("weights_sha256", "consumed", "test", "best_step"):
        assert read(run_dir)[name] == read(whole)[name], name


def test_two_ranks_learn_what_two_ranks_of_ddp_do(by_ddp: Path, whole: Path) -> None:
    """From equal weights on: all losses, the samples of each epoch, and the best weights."""
    assert largest_difference(losses(whole), losses(by_ddp)) <= SAME
    assert largest_difference(valid_losses(whole), valid_losses(by_ddp)) <= SAME
    mine, theirs = read(whole), read(by_ddp)
    assert mine["world_size"] == RANKS
    for name in ("status", "steps", "consumed", "best_step", "samples_seen"):
        assert mine[name] == theirs[name], name
    best = read(whole, "checkpoints/BEST.json")["path"]
    found = torch.load(whole / best / "state.pt", weights_only=True)["model"].values()
    kernels = {tensor.T.shape: tensor.T for tensor in found}
    expected = torch.load(by_ddp / "model" / "weights.pt", weights_only=True)
    for name in ("body.layers.0", "head", "skip"):
        weight = expected[f"model.{name}.weight"]
        assert torch.allclose(kernels[weight.shape], weight, rtol=0, atol=1e-5 * float(weight.abs().max())), name
    assert (whole / "model" / "model.weights.h5").stat().st_size > 0


def test_a_lost_rank_ends_the_job_and_a_resubmitted_one_repeats_it_bit_for_bit(
    start: Callable[..., Ranks], whole: Path, tmp_path: Path
) -> None:
    fault = {"kind": "kill", "at": "forward", "step": 30, "node": 1}
    ranks = start(tmp_path / "run", faults=[fault])
    assert ranks.wait() == [1, KILLED], ranks.log()
    assert "TrainingFailedError" in ranks.log_file(0).read_text()
    assert read(tmp_path / "run")["status"] == "failed"
    assert max(losses(tmp_path / "run")) <= 30
    ranks = start(tmp_path / "run")
    assert ranks.wait() == [0, 0], ranks.log()
    again = [event["step"] for event in RunDir(str(ranks.run_dir)).events("step") if event["generation"] == 2]
    assert 26 < again[0] <= 31
    assert_same_bits(ranks.run_dir, whole)


def test_on_a_cluster_a_lost_node_costs_a_step(whole: Path, tmp_path: Path) -> None:
    """`dtrain train --script` keeps the other node, which goes on with the same losses."""
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    fault = {"kind": "kill", "at": "forward", "step": 20, "node": 1}
    homes = {"DTRAIN_HOME": str(tmp_path), "DAGSTER_HOME": str(tmp_path / "dagster"), "PYTHONPATH": str(ROOT)}
    environment = {**kept, **homes, "DTRAIN_FAULTS": json.dumps([fault]), "TF_CPP_MIN_LOG_LEVEL": "2"}
    dtrain = [sys.executable, "-c", "from dtrain_dagster.cli.main import main; main()", "train"]
    command = [*dtrain, "--nodes", "2", "--name", "keras", "--script", str(ROOT / "tests/frameworks/keras_rank.py")]
    done = subprocess.run(
        [*command, "--", "unused", "{}"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [job] = tmp_path.glob("**/keras/job.json")
    formed = [event["lost"] for event in RunDir(str(job.parent)).events("membership")]
    assert [1] in formed, formed
    assert largest_difference(losses(job.parent), losses(whole)) <= SAME
    assert read(job.parent)["consumed"] == read(whole)["consumed"]


def test_sigterm_to_one_rank_ends_all_with_a_checkpoint(
    start: Callable[..., Ranks], whole: Path, tmp_path: Path
) -> None:
    slow = [{"kind": "sleep", "at": "forward", "node": 1, "seconds": 0.2, "every": True}]
    ranks = start(tmp_path / "run", faults=slow)
    until = time.monotonic() + 300
    while not list((tmp_path / "run").glob("checkpoints/*/manifest.json")) and time.monotonic() < until:
        time.sleep(0.1)
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert ranks.wait() == [EVICTED, EVICTED], ranks.log()
    stopped = read(tmp_path / "run")
    assert stopped["status"] == "stopped"
    assert read(tmp_path / "run", "checkpoints/LATEST.json")["step"] == stopped["steps"]
    ranks = start(tmp_path / "run")
    assert ranks.wait() == [0, 0], ranks.log()
    assert_same_bits(ranks.run_dir, whole)


def test_dropout_does_not_depend_on_the_number_of_ranks(start: Callable[..., Ranks], tmp_path: Path) -> None:
    """With the addresses from ``TF_CONFIG``; without dropout the losses are others."""
    few = {"max_steps": 8, "dropout": 0.5, "schedule": "constant"}
    one, two = start(tmp_path / "one", 1, **few), start(tmp_path / "two", tf_config=True, **few)
    assert one.wait() == [0], one.log()
    assert two.wait() == [0, 0], two.log()
    assert largest_difference(losses(one.run_dir), losses(two.run_dir)) <= SAME
    assert largest_difference(valid_losses(one.run_dir) | {0: 1.0}, valid_losses(two.run_dir) | {0: 1.0}) <= SAME
    plain = start(tmp_path / "plain", 1, **{**few, "dropout": 0.0})
    assert plain.wait() == [0], plain.log()
    assert largest_difference(losses(one.run_dir), losses(plain.run_dir)) > 1e-4


def test_the_example_trains_in_one_process(tmp_path: Path) -> None:
    script = ROOT / "examples" / "frameworks" / "tensorflow_trainer.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "test loss " in done.stdout
    assert read(tmp_path / "run")["status"] == "succeeded"


# In this process, which is a world of one.


def points(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).standard_normal((count, 2)).astype(np.float32)
    return inputs, (inputs[:, 0] > 0).astype(np.int64)


def network(*more: Any, **options: Any) -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential([keras.Input((2,)), layers.Dense(8, "tanh", **options), *more, layers.Dense(2)])


def cross_entropy() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(run_dir: Path, make_model: Any = network, loss: Any = None, **options: Any) -> TensorFlowDistributedTrainer:
    config = DistributedConfig(world_size=1, batch_size_per_gpu=20, epochs=3, learning_rate=0.1, warmup_steps=0)
    trainer = TensorFlowDistributedTrainer(make_model, config, loss=loss, run_dir=run_dir, tracking=QUIET, **options)
    trainer.fit(points(), points(40))
    return trainer


def test_classes_bring_the_accuracy_and_a_second_call_goes_on(tmp_path: Path) -> None:
    def compiled() -> Any:
        model = network()
        model.compile(loss=cross_entropy())
        return model

    assert fit(tmp_path / "run", compiled).best_accuracy > 0.9
    assert read(tmp_path / "run")["test"]["accuracy"] > 0.9
    steps = len(losses(tmp_path / "run"))
    fit(tmp_path / "run", compiled)
    assert len(losses(tmp_path / "run")) == steps


def test_another_model_does_not_go_on_from_this_run_directory(tmp_path: Path) -> None:
    import keras

    fit(tmp_path / "run", loss=cross_entropy())
    with pytest.raises(ConfigError, match="belongs to another training"):
        fit(tmp_path / "run", lambda: network(keras.layers.Dense(4)), cross_entropy())
    with pytest.raises(ConfigError, match="belongs to another training"):
        fit(tmp_path / "run", lambda: network(use_bias=False), cross_entropy())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("batch_norm", "keeps statistics of the batches of one rank"),
        ("half", "must be float32"),
        ("torch", "must return a keras.Model"),
        ("no_loss", "no loss was given"),
        ("reduced", r"gave shape \(\), .*must give one real number per sample"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(make: str, message: str, tmp_path: Path) -> None:
    import keras

    models = {
        "batch_norm": lambda: network(keras.layers.BatchNormalization()),
        "half": lambda: network(dtype="float16"),
        "torch": lambda: stock_model(),
    }
    given: Any = {"no_loss": None, "reduced": lambda target, outputs: keras.ops.mean(outputs)}
    with pytest.raises(ConfigError, match=message):
        fit(
            tmp_path / "run", models.get(make, network), given.get(make, cross_entropy() if make != "no_loss" else None)
        )


def test_the_twin_computes_what_the_stock_model_does() -> None:
    from tests.frameworks.keras_twin import copy_weights, stock_twin, student_t

    module = stock_model(0.0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    twin = stock_twin(MARKET.spec, dropout=0.0)
    copy_weights(module, twin)
    inputs, target = MARKET.gather(MARKET.rows["train"][:64])
    outputs = module(inputs)
    mine = np.asarray(twin(inputs.numpy()))
    assert np.abs(mine - outputs.detach().numpy()).max() <= 1e-5
    from tests.frameworks.small_windows import stock_loss

    losses_of_twin = np.asarray(student_t(MARKET.spec)(target.numpy(), outputs.detach().numpy()))
    assert np.abs(losses_of_twin - stock_loss()(outputs, target).detach().numpy()).max() <= 1e-5
    with pytest.raises(ConfigError, match="is not the stock model tcn"):
        copy_weights(torch.nn.Linear(2, 2), twin)
