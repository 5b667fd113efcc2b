from __future__ import annotations

from collections.abc import Callable

from tests.azure.azurite import Azurite


def test_azurite_starts_and_keeps_a_blob(azurite: Azurite, container: Callable[[], str]) -> None:
    from azure.storage.blob import BlobServiceClient

    name = container().removeprefix("az://")
    with BlobServiceClient.from_connection_string(azurite.connection_string) as service:
        blob = service.get_blob_client(name, "a/b")
        blob.upload_blob(b"one")
        assert blob.download_blob().readall() == b"one"
