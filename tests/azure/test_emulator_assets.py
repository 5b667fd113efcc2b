"""Models, endpoints that answer, and the workspace's MLflow, all through the real SDK and the real MLflow client."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.azure.emulator import Emulator

pytestmark = pytest.mark.slow
SUMS = """
import mlflow
from mlflow.models import set_model

class Sums(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return [float(sum(row)) for row in model_input.values]

set_model(Sums())
"""
LOG = """
import json, os, urllib.request

metric = {"run_id": os.environ["MLFLOW_RUN_ID"], "key": "loss", "value": 0.5, "step": 7, "timestamp": 1}
url = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/log-metric"
headers = {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url, json.dumps(metric).encode(), headers))
"""
"""What MLflow's client does, without the seconds of its import."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import mlflow.pyfunc

    folder = tmp_path_factory.mktemp("model")
    (folder / "sums.py").write_text(SUMS)
    mlflow.pyfunc.save_model(folder / "saved", python_model=str(folder / "sums.py"), pip_requirements=[])
    return folder / "saved"


def test_a_model_is_registered_found_and_downloaded(client: Any, model: Path, tmp_path: Path) -> None:
    from azure.ai.ml.entities import Model
    from azure.core.exceptions import ResourceNotFoundError

    facts: dict[str, Any] = {
        "tags": {"sku": "Standard_NC6s_v3"},
        "properties": {"dollars": "1.25"},
        "description": "sums",
    }
    made = client.models.create_or_update(Model(name="sums", path=str(model), type="mlflow_model", **facts))
    assert (made.version, made.tags, made.properties["dollars"]) == ("1", facts["tags"], "1.25")
    again = client.models.create_or_update(Model(name="sums", path=str(model), type="mlflow_model"))
    assert again.version == "2"
    assert client.models.get("sums", label="latest").version == "2"
    assert {one.version for one in client.models.list("sums")} == {"1", "2"}
    client.models.download("sums", "1", download_path=tmp_path)
    found = next(tmp_path.rglob("MLmodel"))
    assert found.read_text() == (model / "MLmodel").read_text()
    with pytest.raises(ResourceNotFoundError):
        client.models.get("sums", version="3")


def test_a_deployment_serves_its_model(emulator: Emulator, client: Any, model: Path, tmp_path: Path) -> None:
    import requests
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint, Model
    from azure.core.exceptions import HttpResponseError

    emulator.control("grant", actions=["*/onlineEndpoints/*/action"])  # keys and tokens, which the roles have not

    registered = client.models.create_or_update(Model(name="served", path=str(model), type="mlflow_model"))
    client.online_endpoints.begin_create_or_update(ManagedOnlineEndpoint(name="sums-here", auth_mode="key")).result()
    deployment = ManagedOnlineDeployment(
        name="blue",
        endpoint_name="sums-here",
        model=registered.id,
        instance_type="Standard_DS3_v2",
        instance_count=1,
    )
    made = client.online_deployments.begin_create_or_update(deployment).result()
    assert (made.provisioning_state, made.instance_count) == ("Succeeded", 1)
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps({"input_data": {"columns": ["a", "b"], "index": [0, 1], "data": [[1, 2], [3, 4]]}}))
    with pytest.raises(HttpResponseError, match="DeploymentNotFound"):
        client.online_endpoints.invoke("sums-here", request_file=asked)
    endpoint = client.online_endpoints.get("sums-here")
    endpoint.traffic = {"blue": 100}
    client.online_endpoints.begin_create_or_update(endpoint).result()
    assert json.loads(client.online_endpoints.invoke("sums-here", request_file=asked)) == [3.0, 7.0]
    ca = emulator.environment["REQUESTS_CA_BUNDLE"]
    wrong_key = {"Authorization": "Bearer wrong"}
    body = json.loads(asked.read_text())
    assert requests.post(endpoint.scoring_uri, json=body, headers=wrong_key, verify=ca, timeout=30).status_code == 401
    key = {"Authorization": f"Bearer {client.online_endpoints.get_keys('sums-here').primary_key}"}
    unknown = requests.post(endpoint.scoring_uri, json={"inputs": [[1, 2]]}, headers=key, verify=ca, timeout=30)
    assert unknown.status_code == 400
    assert "input_data" in unknown.text
    with pytest.raises(HttpResponseError, match="takes traffic"):
        client.online_deployments.begin_delete("blue", "sums-here")
    client.online_endpoints.begin_delete("sums-here").wait()
    assert list(client.online_endpoints.list()) == []


def test_an_endpoint_may_ask_for_a_token(emulator: Emulator, client: Any) -> None:
    import requests
    from azure.ai.ml.entities import ManagedOnlineEndpoint

    asked = ManagedOnlineEndpoint(name="by-token", auth_mode="aad_token")
    where = client.online_endpoints.begin_create_or_update(asked).result().scoring_uri
    token = client.online_endpoints.get_keys("by-token").access_token
    status = {
        given: requests.post(
            where,
            json={},
            headers={"Authorization": f"Bearer {given}"},
            verify=emulator.environment["REQUESTS_CA_BUNDLE"],
            timeout=30,
        ).status_code
        for given in ("a key", token)
    }
    assert status == {"a key": 401, token: 404}, "whom it knows, it tells that it has no deployment"


def test_a_model_that_does_not_load_fails_its_deployment(client: Any, model: Path, tmp_path: Path) -> None:
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint, Model
    from azure.core.exceptions import HttpResponseError

    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "MLmodel").write_text("flavors: {}\n")
    registered = client.models.create_or_update(Model(name="broken", path=str(broken), type="mlflow_model"))
    client.online_endpoints.begin_create_or_update(ManagedOnlineEndpoint(name="breaks", auth_mode="key")).result()
    deployment = ManagedOnlineDeployment(
        name="blue", endpoint_name="breaks", model=registered.id, instance_type="Standard_DS3_v2", instance_count=1
    )
    poller = client.online_deployments.begin_create_or_update(deployment)
    with pytest.raises(HttpResponseError, match="ResourceNotReady"):
        poller.result()
    assert client.online_deployments.get("blue", "breaks").provisioning_state == "Failed"


@pytest.mark.long
def test_metrics_reach_the_workspace_and_jobs_are_runs(
    emulator: Emulator, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from azure.ai.ml import command
    from azure.ai.ml.entities import AmlCompute, Environment
    from mlflow.exceptions import MlflowException

    client.compute.begin_create_or_update(AmlCompute(name="cpu", size="Standard_DS3_v2")).result()
    (tmp_path / "log.py").write_text(LOG)
    image = Environment(name="image", version="1", image="registry.example/image:1")
    job = command(
        name="logs-metrics", code=str(tmp_path), command="python log.py", environment=image, compute="cpu",
        experiment_name="measured",
    )  # fmt: skip
    client.jobs.create_or_update(job)
    while client.jobs.get("logs-metrics").status not in ("Completed", "Failed"):
        time.sleep(0.1)
    assert client.jobs.get("logs-metrics").status == "Completed"

    base = emulator.environment["ARM_CLOUD_METADATA_URL"].partition("/metadata")[0]
    token = client._credential.get_token(f"{base}/.default").token
    address = client.workspaces.get(emulator.environment["DTRAIN_AZURE_WORKSPACE"]).mlflow_tracking_uri
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "was not written by")
    with pytest.raises(MlflowException, match="azureml"):  # not without the package azureml-mlflow
        mlflow.MlflowClient(address).get_run("logs-metrics")
    assert address.startswith("azureml://")
    address = address.replace("azureml://", "https://")
    tracking = mlflow.MlflowClient(address)
    with pytest.raises(MlflowException, match="InvalidAuthenticationToken"):
        tracking.get_run("logs-metrics")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    run = tracking.get_run("logs-metrics")
    assert run.data.metrics == {"loss": 0.5}
    assert run.info.status == "FINISHED"
    assert tracking.get_experiment(run.info.experiment_id).name == "measured"
    # Two things that plain MLflow can not do there.
    with pytest.raises(MlflowException, match="logged-models"):
        tracking.create_logged_model(run.info.experiment_id, name="model")
    with pytest.raises(MlflowException, match="azureml"):
        tracking.log_text("logs-metrics", "text", "file.txt")
