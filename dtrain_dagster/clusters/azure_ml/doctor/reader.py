"""The doctor's requests: tokens, documents of Azure Resource Manager, names of hosts, images. All of them only read.

Documents are asked for without the client's own types, which drop what matters here (`supportedComputeTypes`,
`applicationInsights` where it is null); and without the SDK's policy that registers providers by itself.
"""

from __future__ import annotations

import os
import socket
from functools import cached_property
from typing import Any

import requests

from dtrain_dagster.clusters.azure_ml.client import ScopeMissing, Service, ServiceUnreachable
from dtrain_dagster.clusters.azure_ml.doctor.surroundings import ImageName
from trainer.secrets.redaction import redact

STORAGE_SCOPE = "https://storage.azure.com/.default"
ANSWER_SECONDS = 20.0
REGISTRY_SUFFIXES = ("azurecr.io", "azurecr.us", "azurecr.cn")
"""Ends of host names that are Azure's own registries: only they are shown a token."""
MANIFEST_TYPES = ", ".join(
    (
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.oci.image.index.v1+json",
    )
)


class AzureReader:
    """Whoever asks. No request is made before a method is called."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._patience_seconds = service.options.look_patience_seconds

    @cached_property
    def _cloud(self) -> dict[str, Any]:
        # The one place where the client keeps the addresses of the cloud that it is in; it has no public way to them.
        from azure.ai.ml import _azure_environments as clouds

        found: dict[str, Any] = clouds._get_cloud_details(clouds._get_default_cloud_name())
        return found

    @property
    def arm_url(self) -> str:
        """Return the address of the Resource Manager of this cloud."""
        return str(self._cloud["resource_manager"]).rstrip("/")

    @property
    def arm_scope(self) -> str:
        """Return the scope of tokens for the Resource Manager."""
        return f"{self.arm_url}/.default"

    def token(self, scope: str) -> str:
        """Return a token. Raise the SDK's own error, which lists what was tried, where there is none."""
        return str(self.service.credential.get_token(scope).token)

    def credential_name(self) -> str:
        """Return the kind of credential that gave the last token."""
        chosen = getattr(self.service.credential, "_successful_credential", None)
        return type(chosen or self.service.credential).__name__

    @cached_property
    def _pipeline(self) -> Any:
        from azure.core import PipelineClient
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy

        policy = BearerTokenCredentialPolicy(self.service.credential, self.arm_scope)
        return PipelineClient(self.arm_url, policies=[policy])

    def document(self, what: str, path: str, version: str, **query: str) -> dict[str, Any]:
        """Return a document of the Resource Manager by its path. Raise `ServiceError`. ``what``: words for messages."""
        from azure.core.rest import HttpRequest

        request = HttpRequest("GET", f"{self.arm_url}{path}", params={"api-version": version, **query})
        return self._answer(what, request)

    def _answer(self, what: str, request: Any) -> dict[str, Any]:
        from azure.core.exceptions import ClientAuthenticationError, HttpResponseError

        def ask() -> dict[str, Any]:
            answer = self._pipeline.send_request(request, connection_timeout=10, read_timeout=ANSWER_SECONDS)
            if answer.status_code == 401:
                raise ClientAuthenticationError(response=answer)
            if answer.status_code >= 300:
                raise HttpResponseError(response=answer)
            found: dict[str, Any] = answer.json()
            return found

        try:
            return self.service.call(what, ask, self._patience_seconds)
        except ScopeMissing:
            raise
        except ServiceUnreachable:
            self._patience_seconds = 1.0  # one long wait for a service that does not answer is enough
            raise

    def permissions(self, scope: str) -> list[dict[str, Any]]:
        """Return what this identity may do at a scope. Raise `ServiceError`."""
        from azure.core.rest import HttpRequest

        what, path = f"list the permissions on {scope}", f"{scope}/providers/Microsoft.Authorization/permissions"
        found: list[dict[str, Any]] = []
        page = self.document(what, path, "2022-04-01")
        while True:
            found += page.get("value") or []
            following = str(page.get("nextLink") or "")
            if not following.startswith(f"{self.arm_url}/"):  # no further page, or one that leads elsewhere
                return found
            page = self._answer(what, HttpRequest("GET", following))

    def addresses(self, host: str) -> list[str]:
        """Return the addresses of a host, as this machine sees them; none where it has none."""
        try:
            return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
        except OSError:
            return []

    def image_answer(self, image: ImageName) -> tuple[int, str]:
        """Return a registry's answer to a question for an image: the HTTP status, and its words; 0 and the reason where
        it does not answer."""
        address = f"https://{image.host}/v2/{image.repository}/manifests/{image.reference}"
        try:
            answer = self._head(address, None)
            if answer.status_code == 401:
                answer = self._head(address, self._registry_token(image, answer.headers.get("WWW-Authenticate", "")))
            return answer.status_code, redact(answer.text[:300])
        except (requests.RequestException, ValueError, KeyError) as error:
            return 0, redact(f"{type(error).__name__}: {error}")[:300]

    def _head(self, address: str, token: str | None) -> requests.Response:
        headers = {"Accept": MANIFEST_TYPES} | ({"Authorization": f"Bearer {token}"} if token else {})
        # GET, not HEAD: a refusal's words tell a firewall from a missing role. A manifest is a few kilobytes.
        return requests.get(address, headers=headers, timeout=ANSWER_SECONDS, allow_redirects=False)

    def _registry_token(self, image: ImageName, challenge: str) -> str | None:
        """Return a registry's own token: for our identity where the registry is Azure's, else for anybody."""
        asked = dict(
            part.split("=", 1) for part in challenge.removeprefix("Bearer ").replace('"', "").split(",") if "=" in part
        )
        scope = f"repository:{image.repository}:pull"
        if not self.is_azures(image.host):
            if not asked.get("realm", "").startswith("https://"):
                return None
            query = {"service": asked.get("service", ""), "scope": scope}
            answer = requests.get(asked["realm"], params=query, timeout=ANSWER_SECONDS)
            return answer.json().get("token") if answer.ok else None
        form = {"grant_type": "access_token", "service": image.host, "access_token": self.token(self.arm_scope)}
        answer = requests.post(
            f"https://{image.host}/oauth2/exchange", data=form, timeout=ANSWER_SECONDS, allow_redirects=False
        )
        if not answer.ok:
            return None
        form = {
            "grant_type": "refresh_token",
            "service": image.host,
            "scope": scope,
            "refresh_token": answer.json()["refresh_token"],
        }
        answer = requests.post(
            f"https://{image.host}/oauth2/token", data=form, timeout=ANSWER_SECONDS, allow_redirects=False
        )
        return answer.json()["access_token"] if answer.ok else None

    def is_azures(self, host: str) -> bool:
        """Return whether a registry is Azure's, in this cloud."""
        name = host.partition(":")[0]
        return any(name.endswith(f".{suffix}") for suffix in (*REGISTRY_SUFFIXES, *self._own_registry_suffix))

    @cached_property
    def _own_registry_suffix(self) -> tuple[str, ...]:
        """The end of registries' names in a cloud that `ARM_CLOUD_METADATA_URL` describes."""
        metadata = os.environ.get("ARM_CLOUD_METADATA_URL")
        if not metadata:
            return ()
        clouds = requests.get(metadata, timeout=ANSWER_SECONDS).json()
        here = [cloud for cloud in clouds if str(cloud.get("resourceManager", "")).rstrip("/") == self.arm_url]
        names = [str((cloud.get("suffixes") or {}).get("acrLoginServer", "")).partition(":")[0] for cloud in here]
        return tuple(name for name in names if name)
