"""The ways in which a workspace's datastores reach the storage account: models go up and come down with each."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.azure.emulator.storage import DATASTORE_AUTHS
from tests.azure.stage import Stage


@pytest.mark.parametrize("auth", DATASTORE_AUTHS)
def test_a_model_comes_back_as_it_went(stage: Stage, auth: str, tmp_path: Path) -> None:
    from azure.ai.ml.entities import Model

    stage.control("datastore", auth=auth)
    (tmp_path / "made").mkdir()
    (tmp_path / "made/weights").write_text(auth)
    client = stage.manager().service.ml
    made = client.models.create_or_update(Model(name=f"sums-{auth}", path=str(tmp_path / "made")))
    before = len(stage.control("requests", operation="datastores.secrets"))
    client.models.download(made.name, str(made.version), download_path=str(tmp_path / "back"))
    [found] = (tmp_path / "back").rglob("weights")
    assert found.read_text() == auth
    asked = stage.control("requests", operation="datastores.secrets")[before:]
    assert bool(asked) == (auth != "identity"), "an identity has no secret to ask for"
    assert all(seen["body"] == {"expirableSecret": True, "expireAfterHours": 1} for seen in asked)
