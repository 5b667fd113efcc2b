"""Models in an Azure ML workspace and on its endpoints: the real client against the emulator, over TLS, by identity."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.registry.azure import AzureMLRegistry, fit_tags
from dtrain_dagster.registry.promotion import AliasDecision, choose_alias
from dtrain_dagster.registry.smoke_test import Candidate
from dtrain_dagster.registry.versions import RegisteredModel, RegistryError, TrainingProvenance, open_client
from dtrain_dagster.support.audit import AuditLog
from harness import small_job
from harness.azure.emulator import Emulator
from trainer.evaluation.gate import Gate
from trainer.rundir import RunDir
from trainer.secrets import azure_token

WORKSPACE_ID = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
PROVENANCE = TrainingProvenance(
    nodes=3,
    node_hours=0.0123,
    cost_usd="$0.0377",
    code_version="abc",
    dagster_run_id="d1",
    sku="Standard_NC24ads_A100_v4",
    cost_usd_total=0.0377,
)


def test_tags_keep_within_what_azure_takes() -> None:
    tags = fit_tags({"a": "x" * 2000, "b": 3, "none": None, "empty": ""})
    assert tags["a"] == "x" * 999 + "…"
    assert len(tags["a"]) == 1000
    assert tags == {"a": tags["a"], "b": "3"}


@pytest.mark.parametrize("tags", [{f"t{number}": "x" for number in range(51)}, {"n" * 101: "x"}])
def test_tags_that_would_vanish_are_refused(tags: dict[str, str]) -> None:
    with pytest.raises(RegistryError, match="Azure ML takes 50"):
        fit_tags(tags)


@pytest.mark.parametrize(
    ("uri", "address", "authorised"),
    [
        ("azureml://h.example/mlflow/v1.0/subscriptions/s?x=1", "https://h.example/mlflow/v1.0/subscriptions/s", True),
        (f"https://h.example/mlflow/v1.0{WORKSPACE_ID}/", f"https://h.example/mlflow/v1.0{WORKSPACE_ID}", True),
        ("https://mlflow.example/", "https://mlflow.example/", False),
        (f"http://h.example{WORKSPACE_ID}", f"http://h.example{WORKSPACE_ID}", False),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db", False),
    ],
)
def test_tokens_go_to_workspaces_only(
    uri: str, address: str, authorised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "")
    monkeypatch.setattr(azure_token, "_hosts", set())
    assert azure_token.tracking_address(uri) == address
    assert (azure_token._hosts, os.environ["MLFLOW_TRACKING_AUTH"]) == (
        ({"h.example"}, azure_token.AUTH_NAME) if authorised else (set(), "")
    )


@dataclass
class Workspace:
    """The emulator, a client of it, and jobs that really ran."""

    emulator: Emulator
    client: Any
    path: Path
    asked: int = 0
    runs: dict[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> AzureMLRegistry:
        return AzureMLRegistry(self.client, self.audit)

    @property
    def audit(self) -> AuditLog:
        return AuditLog(self.path / "registry")

    def train(self, job_id: str, tracking_uri: str | None = None, steps: int = 10) -> str:
        if job_id not in self.runs:
            self.runs[job_id] = small_job.train(
                self.path, self.path / "dataset", job_id, steps=steps, tracking_uri=tracking_uri
            )
        return self.runs[job_id]

    def register(self, run_dir: str, name: str, card: str = "# card") -> RegisteredModel:
        return self.registry.register_model(Candidate(run_dir), name, PROVENANCE.tags(), card)


@pytest.fixture(scope="module")
def workspace(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    path = tmp_path_factory.mktemp("azure")
    with pytest.MonkeyPatch.context() as patch:
        emulator.use(patch)
        patch.setenv("DTRAIN_CACHE", str(path / "cache"))
        patch.setenv("MLFLOW_TRACKING_AUTH", "")
        azure_token.credential.cache_clear()
        from azure.ai.ml import MLClient

        where = [
            emulator.environment[f"DTRAIN_AZURE_{name}"] for name in ("SUBSCRIPTION_ID", "RESOURCE_GROUP", "WORKSPACE")
        ]
        client = MLClient(azure_token.credential(), *where, polling_interval=1)
        small_job.write_dataset(path / "dataset")
        yield Workspace(emulator, client, path)
        azure_token.credential.cache_clear()


@pytest.fixture(scope="module")
def run_dir(workspace: Workspace) -> str:
    """Its metrics went to the workspace while it trained: over plain MLflow, with a token in every request."""
    return workspace.train("job-a", tracking_uri=azure_token.tracking_address(workspace.registry.tracking_uri))


@pytest.fixture(scope="module")
def model(workspace: Workspace, run_dir: str) -> RegisteredModel:
    """Registered although the service throttles, loses an answer and drops a request."""
    for fault in ("throttle", "error", "drop"):
        moment = {"moment": "after"} if fault == "error" else {}
        workspace.emulator.control("fault", fault=fault, operation="model*", **moment)
    return workspace.register(run_dir, "forecaster", "# card\n" + "x" * 6000)


@pytest.mark.slow
def test_a_request_without_a_token_is_turned_away_and_other_hosts_get_none(workspace: Workspace) -> None:
    import requests

    address = azure_token.tracking_address(workspace.registry.tracking_uri)
    url = f"{address}/api/2.0/mlflow/experiments/search"
    assert requests.post(url, json={"max_results": 5}, timeout=150).status_code == 401
    from mlflow.tracking.request_auth.registry import fetch_auth

    auth = fetch_auth(azure_token.AUTH_NAME)
    assert requests.post(url, json={"max_results": 5}, auth=auth, timeout=150).status_code == 200
    elsewhere = requests.Request("GET", "https://example.org/x", auth=auth).prepare()
    in_the_clear = requests.Request("GET", url.replace("https", "http"), auth=auth).prepare()
    assert "Authorization" not in {**elsewhere.headers, **in_the_clear.headers}


@pytest.mark.slow
def test_a_version_carries_how_it_was_trained(workspace: Workspace, run_dir: str, model: RegisteredModel) -> None:
    version = workspace.client.models.get("forecaster", model.version)
    result = RunDir(run_dir).read_json("result.json")
    expected = {
        "job_id": "job-a",
        "world_size": "1",
        "world_size_history": "1",
        "sku": "Standard_NC24ads_A100_v4",
        "strategy": f"ddp, all-reduce ({result['backend']}, fp32)",
        "dataset_id": json.loads((workspace.path / "dataset" / "manifest.json").read_text())["dataset_id"],
        "code_version": "abc",
        "node_hours": "0.012300",
        "cost_usd": "$0.0377",
        "cost_usd_total": "0.037700",
        "weights_sha256": result["weights_sha256"],
        "checkpoint_uri": f"{run_dir}/{result['checkpoint']}",
        "test_nll": f"{result['test']['nll']:.6f}",
        "mlflow_run_id": model.run_id,
    }
    assert {name: version.tags.get(name) for name in expected} == expected
    assert version.type == "mlflow_model"
    assert version.tags["weights_sha256"] == result["weights_sha256"]
    assert len(version.description) <= 5000
    assert model.uri == f"azureml:forecaster:{model.version}"
    run = open_client(azure_token.tracking_address(workspace.registry.tracking_uri)).get_run(model.run_id)
    assert expected["sku"] == run.data.tags["sku"]
    assert run.data.metrics["test.nll"] == pytest.approx(result["test"]["nll"])
    assert run.data.tags["model_name"] == "forecaster"


@pytest.mark.slow
def test_what_registration_needs_is_tried_without_a_version(workspace: Workspace) -> None:
    workspace.registry.try_out("new-one", "dtrain")
    assert not list(workspace.client.models.list(name="new-one"))
    with pytest.raises(RegistryError, match=r"DTRAIN_MODEL_NAME='new one': models of Azure ML have letters"):
        workspace.registry.try_out("new one", "dtrain")
    client = open_client(azure_token.tracking_address(workspace.registry.tracking_uri))
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(RegistryError, match="experiment 'gone' was deleted"):
        workspace.registry.try_out("new-one", "gone")


@pytest.mark.slow
def test_the_same_weights_make_one_version(workspace: Workspace, run_dir: str, model: RegisteredModel) -> None:
    again = workspace.register(run_dir, "forecaster")
    assert (again.version, again.created, model.created) == (model.version, False, True)
    twin = workspace.path / "jobs" / "twin"
    subprocess.run(["cp", "-r", run_dir, str(twin)], check=True)
    document = json.loads((twin / "job.json").read_text())
    (twin / "job.json").write_text(json.dumps({**document, "job_id": "twin", "run_dir": str(twin)}))
    assert workspace.register(str(twin), "forecaster").version == model.version
    assert [item.version for item in workspace.client.models.list(name="forecaster")] == ["1"] == [model.version]


@pytest.mark.slow
def test_who_registers_the_same_at_the_same_time_gets_the_older_version(
    workspace: Workspace, run_dir: str, model: RegisteredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was quicker between the look and the creation, and has taken the number, too."""
    from azure.core.exceptions import ResourceExistsError

    find, create, missed, taken = AzureMLRegistry.find, workspace.client.models.create_or_update, [1], [1]

    def miss_once(registry: AzureMLRegistry, *of: Any) -> RegisteredModel | None:
        return None if missed and missed.pop() else find(registry, *of)

    def refuse_once(version: Any) -> Any:
        if taken:
            raise ResourceExistsError(f"a version {taken.pop()} exists")
        return create(version)

    monkeypatch.setattr(AzureMLRegistry, "find", miss_once)
    monkeypatch.setattr(workspace.client.models, "create_or_update", refuse_once)
    raced = workspace.register(run_dir, "forecaster")
    assert (raced.version, raced.created, missed, taken) == (model.version, False, [], [])
    assert [item.version for item in workspace.client.models.list(name="forecaster")] == [model.version]


@pytest.mark.slow
def test_a_missing_role_is_explained(workspace: Workspace, run_dir: str) -> None:
    workspace.emulator.control("fault", fault="error", operation="model*", status=403, code="AuthorizationFailed")
    with pytest.raises(RegistryError, match=r"looking for versions of .*lacks a role: deploy/azure"):
        workspace.register(run_dir, "forbidden")


@pytest.mark.long
@pytest.mark.slow
def test_a_champion_is_beaten_on_the_same_windows_and_keeps_its_tag_until_then(workspace: Workspace) -> None:
    first, second = workspace.train("job-first", steps=5), workspace.train("job-second", steps=12)
    one = workspace.register(first, "rivals")
    assert workspace.registry.judge_champion(Candidate(first), one) is None
    chosen = choose_alias(Gate(True, ()), None)
    assert workspace.registry.promote(one, chosen) is None
    assert workspace.registry.champion_version("rivals") == one.version
    two = workspace.register(second, "rivals")
    comparison = workspace.registry.judge_champion(Candidate(second), two)
    assert comparison is not None
    assert (comparison.champion_version, comparison.metric) == (one.version, "NLL")
    challenger = AliasDecision(alias="challenger", reason="not better")
    assert workspace.registry.promote(two, challenger) is None
    assert workspace.registry.champion_version("rivals") == one.version
    assert workspace.registry.promote(two, AliasDecision(alias="champion", reason="better")) == one.version
    assert workspace.registry.champion_version("rivals") == two.version
    tags = {item.version: item.tags for item in workspace.client.models.list(name="rivals")}
    assert tags[one.version]["alias"] == "former champion"
    assert tags[two.version]["alias_reason"] == "better"
    assert tags[two.version]["job_id"] == "job-second"
    audit = [line for line in workspace.audit.lines() if line["target"].startswith("rivals")]
    assert [(line["operation"], line["target"], line["details"].get("alias")) for line in audit] == [
        ("model.register", "rivals", None), ("model.tag", f"rivals:{one.version}", "champion"),
        ("model.register", "rivals", None), ("model.tag", f"rivals:{two.version}", "challenger"),
        ("model.tag", f"rivals:{two.version}", "champion"), ("model.tag", f"rivals:{one.version}", "former champion"),
    ]  # fmt: skip
    assert {line["result"] for line in audit} == {"done"}
