from __future__ import annotations

import json

import pytest

from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
from dtrain_dagster.settings.environment import SettingsError
from dtrain_dagster.settings.kubernetes import PREFIX, read_kubernetes_options


def read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> KubernetesOptions:
    for name, value in variables.items():
        monkeypatch.setenv(f"{PREFIX}{name.upper()}", value)
    return KubernetesOptions.read(json.loads(json.dumps(read_kubernetes_options())))


def test_an_image_is_all_that_is_needed(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"DTRAIN_KUBERNETES_IMAGE .* is not set"):
        read(monkeypatch)
    options = read(monkeypatch, image="registry.example:5000/dtrain@sha256:ab")
    assert (options.namespace, options.gpus, options.volumes) == ("dtrain", 0, ())


def test_lists_are_read(monkeypatch: pytest.MonkeyPatch):
    options = read(
        monkeypatch, image="dtrain:1", pull_secrets="one, two", node_selector="a.example/kind=gpu,zone=b",
        tolerations="spot, gpu=yes, dedicated=train:NoExecute", volumes="pvc:shared:/data/,host:/mnt:/in:ro",
    )  # fmt: skip
    assert options.pull_secrets == ("one", "two")
    assert options.node_selector == {"a.example/kind": "gpu", "zone": "b"}
    assert [item["operator"] for item in options.tolerations] == ["Exists", "Equal", "Equal"]
    assert [(volume.mount, volume.read_only) for volume in options.volumes] == [("/data", False), ("/in", True)]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("image", "has blanks in it", "pattern"),
        ("namespace", "Upper_Case", "pattern"),
        ("memory", "lots", "pattern"),
        ("gpus", "-1", "greater than or equal to 0"),
        ("node_selector", "gpu", "give key=value"),
        ("node_selector", "a b=c", "give key=value"),
        ("tolerations", "gpu=yes:Never", "not a toleration"),
        ("volumes", "shared:/data", "pvc:claim:/mount"),
        ("volumes", "pvc:shared:data", "pvc:claim:/mount"),
        ("volumes", "pvc:a:/data,pvc:b:/data", "a folder of its own"),
        ("volumes", "host:/mnt:/", "pvc:claim:/mount"),
        ("pull_secrets", "no_name", "not the name of a Secret"),
        ("spread", "maybe", "prefer"),
        ("env_secrets", "env:TOKEN", "takes no reference"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str):
    with pytest.raises(SettingsError) as refused:
        read(monkeypatch, **{"image": "dtrain:1", name: value})
    assert f"{PREFIX}{name.upper()}" in str(refused.value)
    assert said in str(refused.value)
