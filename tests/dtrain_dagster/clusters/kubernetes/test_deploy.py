"""What an administrator applies: Kubernetes takes it, and it grants what the engine asks for and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster._config import validate_config
from kubernetes_validate import utils as schemas

from dtrain_dagster.clusters.kubernetes.engine import RIGHTS
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import load_settings
from dtrain_dagster.settings.kubernetes import KubernetesSettings

FOLDER = Path(__file__).parents[4] / "deploy" / "kubernetes"
VERSIONS = ("1.33", "1.37")


def objects() -> list[dict[str, Any]]:
    named = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    return [made for name in named for made in yaml.safe_load_all((FOLDER / name).read_text())]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_kubernetes_takes(version: str):
    assert len(objects()) == 6
    for made in objects():
        schemas.validate(made, version, strict=True)


def test_all_files_are_applied():
    named = set(yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"])
    assert named == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_role_is_the_least_that_the_engine_needs():
    (role,) = (made for made in objects() if made["kind"] == "Role")
    granted = [
        (group, *resource.partition("/")[::2], verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]
    assert sorted(granted) == sorted(RIGHTS)
    assert not [made for made in objects() if made["kind"].startswith("ClusterRole")]


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "dagster" / "values.yaml").read_text()))


def launcher_config() -> dict[str, Any]:
    """The chart's values as it writes them into `dagster.yaml`."""
    given = values()["runLauncher"]["config"]["k8sRunLauncher"]
    names = {
        "jobNamespace": "job_namespace", "loadInclusterConfig": "load_incluster_config", "resources": "resources",
        "failPodOnRunFailure": "fail_pod_on_run_failure", "securityContext": "security_context",
        "runK8sConfig": "run_k8s_config",
    }  # fmt: skip
    made = {names[name]: value for name, value in given.items()}
    deeper = {
        "podSpecConfig": "pod_spec_config", "podTemplateSpecMetadata": "pod_template_spec_metadata",
        "jobSpecConfig": "job_spec_config",
    }  # fmt: skip
    made["run_k8s_config"] = {deeper[name]: value for name, value in made["run_k8s_config"].items()}
    account = {"service_account_name": values()["global"]["serviceAccountName"]}
    return {**made, **account, "instance_config_map": "dagster-instance", "dagster_home": "/opt/dagster/dagster_home"}


def test_dagsters_launcher_takes_its_configuration():
    from dagster_k8s import K8sRunLauncher  # not above: every worker would load the client of Kubernetes

    assert validate_config(K8sRunLauncher.config_type(), launcher_config()).success
    assert not validate_config(K8sRunLauncher.config_type(), {**launcher_config(), "absent": 1}).success


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_of_dagster_are_what_kubernetes_takes(version: str):
    from dagster_k8s.job import UserDefinedDagsterK8sConfig

    (deployment,) = values()["dagster-user-deployments"]["deployments"]
    context = UserDefinedDagsterK8sConfig.from_dict(launcher_config()["run_k8s_config"])
    about = {
        "name": "run", "image": "registry.example/dtrain-dagster:1",
        **{name: deployment[name] for name in ("env", "volumeMounts", "securityContext", "resources")},
    }  # fmt: skip
    spec = {
        "containers": [about], "volumes": deployment["volumes"], "securityContext": deployment["podSecurityContext"],
        "restartPolicy": "Never", **launcher_config()["run_k8s_config"]["pod_spec_config"],
    }  # fmt: skip
    assert context.job_spec_config["backoff_limit"] == 0
    template = {"metadata": {}, "spec": spec}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, "spec": {"template": template}}
    schemas.validate(job, version, strict=True)


def test_sensors_have_the_rights_of_runs():
    (binding,) = yaml.safe_load_all((FOLDER / "dagster" / "rights.yaml").read_text())
    for version in VERSIONS:
        schemas.validate(binding, version, strict=True)
    (role,) = (made for made in objects() if made["kind"] == "Role")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]
    }  # fmt: skip
    (namespace,) = (made["metadata"]["name"] for made in objects() if made["kind"] == "Namespace")
    account = values()["global"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_ray_cluster_is_what_its_settings_say(version: str):
    """Its pods are checked by Kubernetes' schemas; of KubeRay's own fields, that they are those of ``ray.io/v1``."""
    (made,) = yaml.safe_load_all((FOLDER / "ray" / "raycluster.yaml").read_text())
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayCluster")
    head, (workers,) = made["spec"]["headGroupSpec"], made["spec"]["workerGroupSpecs"]
    assert set(head) == {"serviceType", "rayStartParams", "template"}
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        template = {"metadata": {}, **group["template"]}
        schemas.validate(
            {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "a"}}, version, strict=True
        )
    ports = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    text, service = (FOLDER / "ray" / "raycluster.yaml").read_text(), f"{made['metadata']['name']}-head-svc"
    assert f"DTRAIN_RAY_ADDRESS=ray://{service}:{ports['client']}" in text
    assert f"DTRAIN_RAY_OPTIONS=dashboard=http://{service}:{ports['dashboard']}" in text
    mounts = [group["template"]["spec"]["containers"][0]["volumeMounts"] for group in (head, workers)]
    (deployment,) = values()["dagster-user-deployments"]["deployments"]
    assert mounts == [deployment["volumeMounts"]] * 2


def test_dagster_has_the_settings_of_this_project(monkeypatch: pytest.MonkeyPatch):
    (deployment,) = values()["dagster-user-deployments"]["deployments"]
    variables = {item["name"]: item["value"] for item in deployment["env"]}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = KubernetesSettings.of(KubernetesSettings.read().options())
    (claim,) = (volume["persistentVolumeClaim"]["claimName"] for volume in deployment["volumes"])
    assert options.volumes[0]["source"] == {"persistentVolumeClaim": {"claimName": claim}}
    assert options.volumes[0]["mount"] == deployment["volumeMounts"][0]["mountPath"]
    assert variables["DTRAIN_HOME"].startswith(options.volumes[0]["mount"] + "/"), "runs, sensors and nodes share it"
    settings = load_settings()
    assert build_resources(settings)["cluster"].manager().home == settings.home
    accounts = {made["metadata"]["name"] for made in objects() if made["kind"] == "ServiceAccount"}
    assert "dtrain-node" in accounts, "whose rights a pod template may give to nodes"
    assert launcher_config()["run_k8s_config"]["pod_spec_config"]["serviceAccountName"] in accounts
