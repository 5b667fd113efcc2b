"""What an administrator applies: Kubernetes takes it, and it grants what the engine asks for and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas

FOLDER = Path(__file__).parents[4] / "deploy" / "kubernetes"
VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")


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
    granted = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert granted == {
        ("jobs", "create"), ("jobs", "list"), ("jobs", "delete"), ("configmaps", "create"), ("configmaps", "get"),
        ("configmaps", "delete"), ("pods", "list"), ("pods", "delete"), ("pods/log", "get"), ("events", "list"),
    }  # fmt: skip
    assert not [made for made in objects() if made["kind"].startswith("ClusterRole")]
