"""A preempted node on the Azure path, by the policies that Azure's documents tell of: the whole graph ends with exit
code 0, a registered model and a bill. That the survivors go on is in `test_azure`."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path

import dagster as dg
import pytest
import torch

from harness.azure.azurite import missing
from harness.azure.emulator import Emulator
from tests.page import Page
from trainer.rundir import RunDir
from trainer.storage.open import open_storage

from .conftest import ON_AZURE, ROOT, make_project

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


TOLERANCE = 1e-3
"""The other node may go on alone before the service ends the job, even to another checkpoint: sums over one rank are
rounded differently. That no sample was lost, or used twice, is compared exactly."""


def read_weights(rundir: RunDir) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(rundir.storage.read("model/weights.pt")), weights_only=True)


def preempt_after_checkpoint(cloud: Emulator, policy: str) -> None:
    """Let a node of the training be preempted as soon as there is a checkpoint to go on from."""
    for _ in range(3000):
        time.sleep(0.1)
        names = [name for name in open_storage("az://dtrain/jobs").list() if name.startswith("train-")]
        if names and RunDir(f"az://dtrain/jobs/{names[0]}").latest_checkpoint() is not None:
            cloud.control("fault", fault="preempt", job="train-*-l1", node=1, policy=policy)
            return


@pytest.mark.parametrize("policy", ["fail", "restart"])
def test_the_graph_ends_well_though_a_node_is_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """R2.4: with the bundled prices, since a model of less is not promoted; and the weights are those of a training
    that nothing has disturbed."""
    if why := missing():
        pytest.skip(why)
    with Emulator(tmp_path / "cloud") as cloud:
        own = {
            "DTRAIN_NODES": "2",
            "DTRAIN_GPU_TYPE": "Standard_NC6s_v3",
            "PYTHONPATH": os.pathsep.join([cloud.environment["PYTHONPATH"], str(ROOT)]),
        }
        project = make_project(tmp_path / "home", **cloud.environment | ON_AZURE | own)
        cloud.use(monkeypatch)
        preemption = threading.Thread(target=preempt_after_checkpoint, args=(cloud, policy), daemon=True)
        preemption.start()
        config = {"ops": {"cost_estimate": {"config": {"checkpoint_frequency": 20}}}}
        done = project.cli(
            *("dagster", "asset", "materialize", "-m", "dtrain_dagster.definitions"),
            *("--select", "not group:studies", "--config-json", json.dumps(config)),
            timeout=600,
        )
        bought = cloud.control("bought")
        assert done.returncode == 0, done.stdout[-4000:]
        names = [name for name in bought["jobs"] if name.startswith("train-")]
        rundir = RunDir(f"az://dtrain/jobs/{names[0].removesuffix('-l1')}")
        result, launch = rundir.read_json("result.json"), rundir.read_json("launch.json")
        resumed = list(rundir.events("resume"))
        stays = rundir.nodes()

        # The same training again, and nothing happens to it.
        job = rundir.read_json("job.json") | {"job_id": "undisturbed", "run_dir": "az://dtrain/jobs/undisturbed"}
        (tmp_path / "job.json").write_text(json.dumps(job))
        alone = project.cli("dtrain", "train", "--config", str(tmp_path / "job.json"), "--nodes", "2", timeout=300)
        assert alone.returncode == 0, alone.stdout[-4000:]
        again = RunDir("az://dtrain/jobs/undisturbed")
        undisturbed = again.read_json("result.json")
        found, expected = read_weights(rundir), read_weights(again)

    launches = {name: job["launches"] for name, job in bought["jobs"].items() if name.startswith("train-")}
    if policy == "fail":  # the service gave up, so it was submitted again
        assert list(launches.values()) == [1, 1]
        assert launch["launch"] == result["launch"] == 2
        assert {stay.launch for stay in stays} == {1, 2}
    else:  # the service has started it again by itself, under the same name, and that was enough
        assert list(launches.values()) == [2], launch["history"]
        assert launch["launch"] == result["launch"] == 1
    preemption.join(10)
    assert resumed, "it went on from its checkpoint"
    assert result["status"] == "succeeded"
    assert result["consumed"] == undisturbed["consumed"]
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE), name
    assert all(stay.ended_at for stay in stays)
    monkeypatch.setenv("DAGSTER_HOME", project.env["DAGSTER_HOME"])
    with dg.DagsterInstance.get() as instance:

        def metadata(asset: str) -> Page:
            event = instance.get_latest_materialization_event(dg.AssetKey(asset))
            assert event is not None
            assert event.asset_materialization is not None
            return Page(event.asset_materialization.metadata)

        assert metadata("registered_model")["version"]
        cost = metadata("cost_breakdown")
        paid = sum(stay.seconds(stay.ended_at or 0.0) for stay in stays) / 3600
        trained = metadata("trained_checkpoint")
        assert float(str(trained["node_hours"])) == pytest.approx(paid, rel=0.01), stays
        assert float(str(cost["node_hours"])) > paid, "and the probe's"
