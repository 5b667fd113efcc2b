"""Whole trainings with data and run directory on Blob: real ranks, one of them killed, and what each node records."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.azure.azurite import Azurite
from harness.azure.blob_proxy import BlobProxy
from harness.elastic_nodes import KILLED, QUICK, Nodes
from harness.own_models import OWN_MODELS
from harness.worlds import Job, build
from trainer.checkpoint.manager import LATEST, CheckpointManager
from trainer.data.coverage import find_coverage_errors
from trainer.model.saved_model import load_saved_model
from trainer.rundir import RunDir
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

pytestmark = pytest.mark.slow
Container = Callable[[], str]
STEPS = 30


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training in a folder, in a world of one, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job(folder, dataset, environment={"DTRAIN_CACHE": str(folder / "cache")})
    job.sections["model"] = {"factory": "user_parts:paced", "args": {"seconds": 0.0}}
    assert job.run_here() == 0, job.result()
    assert job.result()["steps"] == STEPS
    return job


class RemoteJob(Job):
    """A job whose job.json, data and run directory are on Blob. Only logs are in ``run_dir``."""

    uri: str

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.uri)

    def write(self) -> Any:
        path = super().write()
        config = {**json.loads(path.read_text()), "run_dir": self.uri}
        self.rundir.storage.write("job.json", json.dumps(config).encode())
        return f"{self.uri}/job.json"


def upload(folder: Path, uri: str) -> None:
    storage = open_storage(uri)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.fixture
def begin(azurite: Azurite, container: Container, dataset: Path, tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Makes the nodes of a job on Blob; none of their processes outlives the test."""
    made: list[Nodes] = []

    def make(environment: dict[str, str], tracking: dict[str, Any] | None = None, **training: Any) -> Nodes:
        address = container()
        upload(dataset, f"{address}/data")
        job = RemoteJob(tmp_path / "logs", dataset, training={**QUICK, **training})
        job.uri = f"{address}/jobs/one"
        job.sections = {"dataset": {"uri": f"{address}/data"}, "model": {"factory": "user_parts:paced"}}
        if tracking:
            job.sections["tracking"] = tracking
        job.environment = {"DTRAIN_CACHE": str(tmp_path / "cache"), "DTRAIN_PRESENCE": "1", **environment}
        made.append(Nodes(job))
        return made[-1]

    yield make
    for nodes in made:
        nodes.kill()


def weights(storage: Storage) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(storage.read("model/weights.pt")), weights_only=True)


@pytest.mark.long
def test_a_training_on_blob_whose_first_rank_is_killed_ends_as_one_in_a_folder(
    begin: Callable[..., Nodes], whole: Job, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlobProxy(azurite.url) as proxy:
        nodes = begin(proxy.environment, {"tensorboard": True}, profile_steps=2)
        nodes.start(faults=({"kind": "kill", "at": "backward", "step": 12, "node": 0},))
        assert nodes.wait() == [KILLED, 0, 0], nodes.log()
    job, storage = nodes.job, nodes.job.rundir.storage
    result = job.result()
    assert (result["status"], result["steps"], result["world_size"]) == ("succeeded", STEPS, 2)
    assert nodes.members() == [[0, 1, 2], [1, 2]]

    mine, theirs = weights(storage), weights(whole.rundir.storage)
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert float((mine[name] - tensor).abs().max()) <= 1e-5 * largest, name
    assert result["consumed"] == whole.result()["consumed"]
    assert find_coverage_errors(result["consumed"], result["train_samples"], round(result["epochs"])) == []
    steps = [item["step"] for item in job.events("step")]
    assert steps == sorted(set(steps))
    assert len(steps) >= STEPS - 1, "the sum for the step in which rank 0 died may have died with it"

    # What the job leaves behind, all of it on Blob.
    checkpoints = CheckpointManager(
        job.rundir, 3, json.loads(storage.read(f"{latest(storage)}/manifest.json"))["fingerprint"]
    )
    folder, state = checkpoints.load_latest() or ("", {})
    assert folder == latest(storage)
    assert state["progress"]["step"] == STEPS
    assert "version_id" not in storage.read(f"{folder}/manifest.json").decode(), "this account keeps no versions"
    assert len(checkpoints.folders()) <= 4, "three are kept, and the best"
    assert result["checkpoint"] in checkpoints.folders()
    monkeypatch.syspath_prepend(OWN_MODELS)
    model = load_saved_model(lambda name: storage.read(f"model/{name}"), modules=("user_parts",))
    assert model.predict(np.zeros((2, model.spec.window, len(model.spec.features))))
    with np.load(io.BytesIO(storage.read("predictions.npz"))) as table:
        assert len(table["mu"]) == json.loads(storage.read("evaluation.json"))["windows"]
    assert sorted(storage.list("profile")) == [f"trace-r{rank:05d}-s000002.json" for rank in range(3)]
    assert any("tfevents" in name for name in storage.list("tensorboard"))

    # Each shard came once, though three ranks share this machine's cache.
    shards = storage_names(job.sections["dataset"]["uri"])
    assert len(shards) == 2
    for shard in shards:
        assert proxy.sent("GET", f"/{shard}") == 1

    # When each node was there.
    first, second, third = job.rundir.nodes()
    assert [node.node_id for node in (first, second, third)] == [0, 1, 2]
    assert (first.ended_at, first.exit_codes) == (None, ()), "nobody was left to write it"
    for node in (second, third):
        assert node.exit_codes == (0,)
        assert node.started_at < (node.ended_at or 0)
        assert (node.launch, node.incarnation) == (1, 1)
    print("requests", len(proxy.requests), "lists", proxy.sent("GET", "comp=list"))


def latest(storage: Storage) -> str:
    return json.loads(storage.read(LATEST))["path"]


def storage_names(uri: str) -> list[str]:
    return [shard["path"] for shard in json.loads(open_storage(uri).read("manifest.json"))["shards"]]
