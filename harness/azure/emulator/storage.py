"""The service's own side of the storage account: SAS addresses, code that nodes fetch, logs that they leave. Blocking:
called from threads."""

from __future__ import annotations

import datetime
import uuid
from pathlib import Path
from typing import Any

from harness.azure.azurite import ACCOUNT, KEY, connection_string
from harness.azure.emulator.state import Addresses

SAS_LIFE = datetime.timedelta(hours=2)


DATASTORE_AUTHS = {"key": "AccountKey", "sas": "Sas", "identity": "None"}
"""Ways in which a datastore reaches its account, and what its ``credentialsType`` says then."""


class Blobs:
    """By key, as the workspace's system has it."""

    def __init__(self, addresses: Addresses) -> None:
        from azure.storage.blob import BlobServiceClient

        self._addresses = addresses
        # The certificate is this process's own; there is nobody to be checked.
        self._service = BlobServiceClient.from_connection_string(
            connection_string(addresses.storage), connection_verify=False
        )

    @property
    def account_url(self) -> str:
        """As the service names it: by host, not by path."""
        return f"https://{ACCOUNT}.blob.{self._addresses.storage_suffix}"

    def empty(self, container: str) -> None:
        """Make it, or make it anew."""
        client = self._service.get_container_client(container)
        if client.exists():
            client.delete_container()
        client.create_container()

    def fresh_container(self) -> tuple[str, str]:
        """A new container: its address, and the same with a SAS that may write. One for each upload: a client that
        finds its file's name in a container takes it for its file."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        name = str(uuid.uuid4())
        self._service.create_container(name)
        sas = generate_container_sas(
            ACCOUNT,
            name,
            account_key=KEY,
            permission=ContainerSasPermissions(read=True, write=True, add=True, create=True, list=True),
            expiry=datetime.datetime.now(datetime.UTC) + SAS_LIFE,
        )
        address = f"{self.account_url}/{name}"
        return address, f"{address}?{sas}"

    def datastore_secrets(self, auth: str, is_expirable: bool) -> dict[str, str]:
        """As `listSecrets` answers: by key the key, or a SAS to whoever asks for a secret that expires
        (azure-sdk-assets, test_command_job_serverless.json at 0f205ad0: with its question mark, for blobs and files); a
        SAS as it is; no secret where an identity is needed (assumed: the clients of today do not ask then)."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        if auth == "identity":
            return {"secretsType": "None"}
        if auth == "key" and not is_expirable:
            return {"secretsType": "AccountKey", "key": KEY}
        sas = generate_account_sas(
            ACCOUNT,
            account_key=KEY,
            resource_types=ResourceTypes(container=True, object=True),
            permission=AccountSasPermissions(read=True, create=True, update=True, write=True, delete=True, list=True),
            expiry=datetime.datetime.now(datetime.UTC) + SAS_LIFE,
        )
        return {"secretsType": "Sas", "sasToken": f"?{sas}"}

    def signed(self, container: str, blob: str) -> str:
        """A blob's address that may be read for a while."""
        from azure.storage.blob import BlobSasPermissions, generate_blob_sas

        expiry = datetime.datetime.now(datetime.UTC) + SAS_LIFE
        permission = BlobSasPermissions(read=True)
        sas = generate_blob_sas(ACCOUNT, container, blob, account_key=KEY, permission=permission, expiry=expiry)
        return f"{self.account_url}/{container}/{blob}?{sas}"

    def download_folder(self, container: str, prefix: str, target: Path) -> Path:
        """All blobs below a prefix. FileNotFoundError if there are none."""
        prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        client, found = self._service.get_container_client(container), False
        for name in client.list_blob_names(name_starts_with=prefix):
            file = target / name.removeprefix(prefix)
            if not file.resolve().is_relative_to(target.resolve()):
                raise ValueError(f"blob {name} leads out of its folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as output:
                client.download_blob(name).readinto(output)
            found = True
        if not found:
            raise FileNotFoundError(f"there is nothing in {container}/{prefix}")
        return target

    def upload(self, container: str, blob: str, content: bytes) -> None:
        from azure.storage.blob import ContentSettings

        client: Any = self._service.get_blob_client(container, blob)
        client.upload_blob(content, overwrite=True, content_settings=ContentSettings(content_type="text/plain"))

    def exists(self, container: str, blob: str) -> bool:
        return bool(self._service.get_blob_client(container, blob).exists())

    def names(self, container: str, prefix: str) -> list[str]:
        return list(self._service.get_container_client(container).list_blob_names(name_starts_with=prefix))


def container_and_prefix(address: str) -> tuple[str, str]:
    """Of ``https://account.blob.suffix/container/prefix``."""
    path = address.partition("://")[2].partition("?")[0].partition("/")[2]
    container, _, prefix = path.partition("/")
    return container, prefix
