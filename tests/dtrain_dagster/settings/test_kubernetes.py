from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from dtrain_dagster.settings.environment import SettingsError, variable_of
from dtrain_dagster.settings.kubernetes import PREFIX, KubernetesSettings


def read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> KubernetesSettings:
    own = {name: value for name, value in variables.items() if name not in KubernetesSettings.OPTIONS}
    for name, value in own.items():
        monkeypatch.setenv(f"{PREFIX}{name.upper()}", value)
    words = [f"{name}={value}" for name, value in variables.items() if name not in own]
    monkeypatch.setenv(f"{PREFIX}OPTIONS", shlex.join(words))
    return KubernetesSettings.of(json.loads(json.dumps(KubernetesSettings.read().options())))


def test_an_image_is_all_that_is_needed(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"DTRAIN_KUBERNETES_IMAGE .* is not set"):
        read(monkeypatch)
    options = read(monkeypatch, image="registry.example:5000/dtrain@sha256:ab")
    assert (options.namespace, options.gpus, list(options.volumes)) == ("dtrain", 0, [])


def test_volumes_and_a_template_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    template = tmp_path / "pod.yaml"
    template.write_text("kind: PodTemplate\nspec:\n  nodeSelector: {a.example/kind: gpu}\n")
    options = read(
        monkeypatch, image="dtrain:1", volumes="pvc:shared:/data/,host:/mnt:/in:ro", pod_template=str(template)
    )
    assert options.pod_template == {"spec": {"nodeSelector": {"a.example/kind": "gpu"}}}
    assert [(volume["mount"], volume["read_only"]) for volume in options.volumes] == [("/data", False), ("/in", True)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no pod template"),
        ("[1]", "has no pod template"),
        ("spec: {a: b: c}", "cannot be read"),
        ("spec: [1]", "spec is no mapping"),
        ("spec: {containers: {name: node}}", "spec.containers is no list"),
        ("spec: {containers: [{name: node, resources: {limits: {nvidia.com/gpu: 4}}}]}", "nvidia.com/gpu is set by"),
        ("spec: {restartPolicy: Always}", "spec.restartPolicy is set by dtrain"),
        ("spec: {containers: [{name: node, command: [sh]}]}", "command of the container is set by dtrain"),
        ("spec: {containers: [{name: logs, image: x}]}", "it has the container logs"),
        (
            "spec: {containers: [{name: node, env: [{name: A, value: 'postgresql://me:secret@host/db'}]}]}",
            "pod_template",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, said: str
):
    template = tmp_path / "pod.yaml"
    template.write_text(text)
    with pytest.raises(SettingsError, match=said) as refused:
        read(monkeypatch, image="dtrain:1", pod_template=str(template))
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("image", "has blanks in it", "pattern"),
        ("namespace", "Upper_Case", "pattern"),
        ("volumes", "shared:/data", "pvc:claim:/mount"),
        ("volumes", "pvc:shared:data", "pvc:claim:/mount"),
        ("volumes", "pvc:a:/data,pvc:b:/data", "a folder of its own"),
        ("volumes", "host:/mnt:/", "pvc:claim:/mount"),
        ("pod_template", "/absent.yaml", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str):
    with pytest.raises(SettingsError) as refused:
        read(monkeypatch, **{"image": "dtrain:1", name: value})
    assert variable_of(KubernetesSettings, name) in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MEMORY_GIB", "lots", "DTRAIN_NODE_MEMORY_GIB='lots' (GiB of memory"),
        ("GPUS", "-1", "greater than or equal to 0"),
        ("PYTHON", "py thon", "pattern"),
    ],
)
def test_what_no_node_can_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str):
    monkeypatch.setenv(f"DTRAIN_NODE_{name}", value)
    with pytest.raises(SettingsError) as refused:
        read(monkeypatch, image="dtrain:1")
    assert f"DTRAIN_NODE_{name}" in str(refused.value)
    assert said in str(refused.value)


def test_what_a_node_has_is_read_from_the_variables_of_all_engines(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("CPUS", "0.5"), ("MEMORY_GIB", "1.5"), ("GPUS", "2"), ("PYTHON", "/opt/python")):
        monkeypatch.setenv(f"DTRAIN_NODE_{name}", value)
    monkeypatch.setenv("KUBECONFIG", "/home/me/kubeconfig")
    found = read(monkeypatch, image="dtrain:1")
    assert (found.cpus, found.memory_gib, found.gpus, found.python) == (0.5, 1.5, 2, "/opt/python")
    assert found.kubeconfig == "/home/me/kubeconfig"
