"""Storage opened by this machine's identity: `DefaultAzureCredential`, a token, TLS; no key anywhere."""

from __future__ import annotations

import logging

import pytest

from harness.azure.emulator import Emulator
from trainer.storage import azure_blob
from trainer.storage.open import open_storage


@pytest.mark.slow
def test_an_identity_opens_storage_without_a_key(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(azure_blob, "BLOCK_BYTES", 1000)
    caplog.set_level(logging.INFO)
    emulator.use(monkeypatch)
    storage = open_storage(f"{emulator.environment['DTRAIN_STORAGE']}/jobs/one")
    storage.write("large", b"x" * 4500)
    storage.create("a/once", b"1")
    with pytest.raises(FileExistsError):
        storage.create("a/once", b"2")
    assert storage.compare_and_swap("a/pointer", None, b"1")
    assert storage.compare_and_swap("a/pointer", b"1", b"2")
    assert storage.read("large") == b"x" * 4500
    assert storage.list() == ["a", "large"]
    storage.delete("a")
    assert storage.list() == ["large"]
    assert "Bearer" not in caplog.text
    assert not [record for record in caplog.records if record.name.startswith("azure.core")], "no line for each request"
