"""The walk of `dtrain doctor`: each check asks Azure for what it needs, and `doctor` decides. No check stops the
others. All requests only read, but for one small blob.

Documents are asked for without the client's own types, which drop what matters here (`applicationInsights` where it is
null), and without the SDK's policy that registers providers by itself.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import re
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import requests

from dtrain_dagster.clusters.azure_ml import doctor
from dtrain_dagster.clusters.azure_ml.client import NotFound, ScopeMissing, Service, ServiceError
from dtrain_dagster.clusters.azure_ml.doctor import ML_NAMESPACE, DoctorLine
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.provision import Provisioner
from dtrain_dagster.clusters.azure_ml.sku_chain import chain
from dtrain_dagster.support.audit import AuditLog
from trainer.errors import ConfigError
from trainer.secrets.redaction import redact
from trainer.storage.open import open_storage

STORAGE_SCOPE = "https://storage.azure.com/.default"
ANSWER_SECONDS = 20.0
MANIFEST_TYPES = (
    "application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json"
)
_IMAGE = re.compile(
    r"(?P<host>[a-z0-9.-]+\.[a-z0-9-]+(?::\d+)?|localhost:\d+)/(?P<repository>[a-z0-9._/-]+?)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]*)|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_ENVIRONMENT = re.compile(r"azureml:(?P<name>[^:@/]+)(?::(?P<version>[^:]+)|@latest)")


@dataclass
class Walk:
    """One walk over everything. ``region``: that of ``DTRAIN_REGION``; ``wanted``: the size that is asked for first."""

    service: Service
    home: Path
    region: str
    wanted: str
    node_count: int
    ranks: int
    workspace: dict[str, Any] = field(default_factory=dict)
    """The workspace's document, once it was read."""
    principal: str = ""
    """The id of who asks, once it is known."""

    @property
    def options(self) -> AzureMLOptions:
        """Return the settings of the workspace."""
        return self.service.options

    def all_lines(self) -> list[DoctorLine]:
        """Return every line, in the order of the walk. Without a token for the Resource Manager it ends after the first
        check: nobody would answer the others."""
        lines = self.check_identity()
        if any(line.verdict == "missing" and "Resource Manager" in line.seen for line in lines):
            return lines
        checks = (
            *(self.check_workspace, self.check_roles, self.check_nodes_identity, self.check_storage),
            *(self.check_sizes, self.check_images, self.check_network),
        )
        return [*lines, *(line for check in checks for line in check())]

    def check_identity(self) -> list[DoctorLine]:
        """Return who asks, and whether it gets tokens."""
        lines = []
        for what, scope in (("the Resource Manager", self._arm_scope), ("storage", STORAGE_SCOPE)):
            try:
                token = str(self.service.credential.get_token(scope).token)
            except Exception as error:  # whatever a credential of the chain raises
                words = " ".join(str(getattr(error, "message", "") or error).split())[:600]
                remedy = (
                    "give this machine the orchestrator's managed identity and set AZURE_CLIENT_ID to its client id; "
                )
                remedy += "on a laptop, log in"
                lines.append(DoctorLine("identity", "missing", f"no token for {what}: {words}", remedy, "az login"))
                continue
            if not lines:
                claims = claims_of(token)
                self.principal = str(claims.get("oid") or "")
                who = claims.get("upn") or claims.get("unique_name") or f"application {claims.get('appid')}"
                seen = f"{who}, principal {claims.get('oid', 'unknown')}, tenant {claims.get('tid', 'unknown')}"
                lines.append(DoctorLine("identity", "ok", seen))
        return lines

    def check_workspace(self) -> list[DoctorLine]:
        """Return whether the workspace is there, and as dtrain needs it."""
        scope, operation = self.options.workspace_id, f"{ML_NAMESPACE}workspaces/read"
        try:
            self.workspace = self._document("look at the workspace", scope, "2024-10-01-preview")
        except ServiceError as error:
            return [doctor.judge_refused_read("workspace", operation, error, scope, self.principal)]
        return doctor.judge_workspace(self.workspace, self.region, self.options)

    def check_roles(self) -> list[DoctorLine]:
        """Return which operations on the workspace are granted, as far as that can be known without doing them."""
        scope = self.options.workspace_id
        what, path = f"list the permissions on {scope}", f"{scope}/providers/Microsoft.Authorization/permissions"
        found: list[dict[str, Any]] = []
        try:
            page = self._document(what, path, "2022-04-01")
            found += page.get("value") or []
            while str(following := page.get("nextLink") or "").startswith(f"{self._arm_url}/"):
                page = self._document(what, following.removeprefix(self._arm_url))
                found += page.get("value") or []
        except (NotFound, ScopeMissing):
            return []  # there is no such workspace, as the line about it says
        except ServiceError as error:
            seen = f"permissions cannot be listed ({error.code}): whether computes and jobs may be made is known only "
            remedy = (
                "give this identity Microsoft.Authorization/permissions/read on the workspace, as deploy/azure does"
            )
            return [DoctorLine("roles", "warning", f"{seen}when the first one is", remedy)]
        return doctor.judge_permissions(found, scope, self.principal)

    def check_nodes_identity(self) -> list[DoctorLine]:
        """Return whether the nodes' identity is there, and is the one that they are told of."""
        scope, operation = self.options.identity, "Microsoft.ManagedIdentity/userAssignedIdentities/read"
        if scope is None:
            remedy = "set DTRAIN_AZURE_IDENTITY and DTRAIN_AZURE_IDENTITY_CLIENT_ID (outputs nodesIdentityId and "
            remedy += "nodesClientId of deploy/azure); else give the compute's identity its roles once it is made"
            seen = "nodes get the identity of their compute, which has no roles"
            return [DoctorLine("identity", "warning", seen, remedy)]
        try:
            found = self._document("look at the nodes' identity", scope, "2023-01-31")
        except ServiceError as error:
            return [doctor.judge_refused_read("identity", operation, error, scope, self.principal)]
        return [doctor.judge_nodes_identity(found, self.options.identity_client_id)]

    def check_storage(self) -> list[DoctorLine]:
        """Return whether the container of trainings can be written and read; what was written is deleted."""
        account, uri = os.environ.get("AZURE_STORAGE_ACCOUNT_URL", ""), self.options.root_uri
        if not account:
            remedy = "set it: nodes are told it, and open the account by their identity"
            command = "export AZURE_STORAGE_ACCOUNT_URL=https://<account>.blob.core.windows.net"
            return [DoctorLine("storage", "missing", "AZURE_STORAGE_ACCOUNT_URL is not set", remedy, command)]
        name, content, step = f"probe-{uuid.uuid4().hex}", uuid.uuid4().bytes, "open"
        try:
            storage = open_storage(f"{uri}/doctor")
            step = "write"
            storage.create(name, content)
            step = "read"
            storage.read(name)
            step = "delete"
            storage.delete(name)
        except OSError as error:  # also of a container that is not there, which is an error of the settings, too
            return [doctor.judge_storage_error(error, step, uri, account, self.principal)]
        except ConfigError as error:
            return [DoctorLine("storage", "missing", str(error), "correct the setting")]
        return [DoctorLine("storage", "ok", f"{uri}: a blob of {len(content)} bytes was written, read and deleted")]

    def check_sizes(self) -> list[DoctorLine]:
        """Return which sizes of the chain can be asked for, whether any can, and what each costs."""
        choices = chain(self.wanted, self.options.chain, self.options.tiers)
        prices = [doctor.judge_price(choice, self.region) for choice in choices]
        provisioner, scope = Provisioner(self.service, AuditLog(self.home)), self.options.subscription_id
        operation = f"{ML_NAMESPACE}locations/vmsizes/read"
        try:
            sizes, operation = provisioner.sizes(), f"{ML_NAMESPACE}locations/usages/read"
            quotas = provisioner.quotas()
        except ServiceError as error:
            refused = doctor.judge_refused_read("sizes", operation, error, f"/subscriptions/{scope}", self.principal)
            return [refused, *prices]
        where = f"--resource-group {self.options.resource_group} --workspace-name {self.options.workspace}"
        usage, today = f"az ml compute list-usage {where} --output table", datetime.datetime.now(datetime.UTC).date()
        lines = [
            doctor.judge_choice(choice, sizes, quotas, self.node_count, self.ranks, today, usage) for choice in choices
        ]
        return [*lines, doctor.judge_chain(choices, lines, self.node_count), *prices]

    def check_images(self) -> list[DoctorLine]:
        """Return whether the nodes' image is there."""
        text, scope = self.options.image, self.options.workspace_id
        if environment := _ENVIRONMENT.fullmatch(text):
            version = f"/versions/{environment['version']}" if environment["version"] else ""
            path = f"{scope}/environments/{environment['name']}{version}"
            operation = f"{ML_NAMESPACE}workspaces/environments/versions/read"
            try:
                self._document(
                    "look at the environment", path + (f"/versions/{version}" if version else ""), "2024-04-01"
                )
            except ServiceError as error:
                return [doctor.judge_refused_read("images", operation, error, scope, self.principal)]
            return [DoctorLine("images", "ok", f"{text} is in the workspace")]
        image = _IMAGE.fullmatch(text)
        if image is None:
            seen = f"DTRAIN_AZURE_IMAGE={text!r} names no registry and no environment"
            remedy = "name an image with its registry (registry.azurecr.io/dtrain-nodes:1), or azureml:<name>:<version>"
            return [DoctorLine("images", "missing", seen, remedy)]
        if not image["host"].partition(":")[0].endswith(self._cloud[1]):
            seen, remedy = (
                f"{text} is not in a registry of Azure's, and was not looked for",
                "see that nodes can pull it",
            )
            return [DoctorLine("images", "warning", seen, remedy)]
        try:
            answer = self._ask_registry(image["host"], image["repository"], image["tag"] or image["digest"] or "latest")
            status, said = answer.status_code, answer.text[:300]
        except (requests.RequestException, ValueError, KeyError) as error:
            status, said = 0, f"{type(error).__name__}: {error}"[:300]
        return [doctor.judge_image(text, status, redact(said), self.principal)]

    def check_network(self) -> list[DoctorLine]:
        """Return whether nodes fit into their subnet."""
        options, operation = self.options, "Microsoft.Network/virtualNetworks/subnets/read"
        if options.subnet is None:
            return [doctor.judge_no_subnet(self.workspace, options)]
        scope = options.subnet
        try:
            return [doctor.judge_subnet(self._document("look at the subnet", scope, "2024-05-01"), self.node_count)]
        except ServiceError as error:
            return [doctor.judge_refused_read("network", operation, error, scope, self.principal)]

    @cached_property
    def _cloud(self) -> tuple[str, str]:
        """The address of the Resource Manager, and the end of names of Azure's registries, which alone are shown a
        token: of the public cloud, or of the one that `ARM_CLOUD_METADATA_URL` describes."""
        url, registries = "https://management.azure.com", ".azurecr.io"
        if metadata := os.environ.get("ARM_CLOUD_METADATA_URL"):
            for cloud in requests.get(metadata, timeout=ANSWER_SECONDS).json():
                if (here := cloud["resourceManager"].rstrip("/")) in metadata:
                    url, registries = here, f".{cloud['suffixes']['acrLoginServer']}"
        return url, registries

    @property
    def _arm_url(self) -> str:
        return self._cloud[0]

    @property
    def _arm_scope(self) -> str:
        return f"{self._arm_url}/.default"

    @cached_property
    def _pipeline(self) -> Any:
        from azure.core import PipelineClient
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy

        policy = BearerTokenCredentialPolicy(self.service.credential, self._arm_scope)
        return PipelineClient(self._arm_url, policies=[policy])

    def _document(self, what: str, path: str, version: str = "") -> dict[str, Any]:
        """Return a document of the Resource Manager by its path. Raise `ServiceError`. ``what``: words for messages."""
        from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
        from azure.core.rest import HttpRequest

        query = {"api-version": version} if version else None
        request = HttpRequest("GET", f"{self._arm_url}{path}", params=query)

        def ask() -> dict[str, Any]:
            answer = self._pipeline.send_request(request, connection_timeout=10, read_timeout=ANSWER_SECONDS)
            if answer.status_code == 401:
                raise ClientAuthenticationError(response=answer)
            if answer.status_code >= 300:
                raise HttpResponseError(response=answer)
            found: dict[str, Any] = answer.json()
            return found

        return self.service.call(what, ask, self.options.look_patience_seconds)

    def _ask_registry(self, host: str, repository: str, reference: str) -> requests.Response:
        """Return the answer of a registry of Azure's to a question for an image, with its own token where it gives one.
        The question is GET, not HEAD: a refusal's words tell a firewall from a missing role."""
        mine = self.service.credential.get_token(self._arm_scope).token
        form = {"grant_type": "access_token", "service": host, "access_token": mine}
        given = self._post(f"https://{host}/oauth2/exchange", form)
        if given.ok:
            scope, refresh = f"repository:{repository}:pull", given.json()["refresh_token"]
            form = {"grant_type": "refresh_token", "service": host, "scope": scope, "refresh_token": refresh}
            given = self._post(f"https://{host}/oauth2/token", form)
        if not given.ok:
            return given
        headers = {"Accept": MANIFEST_TYPES, "Authorization": f"Bearer {given.json()['access_token']}"}
        address = f"https://{host}/v2/{repository}/manifests/{reference}"
        return requests.get(address, headers=headers, timeout=ANSWER_SECONDS, allow_redirects=False)

    def _post(self, address: str, form: dict[str, str]) -> requests.Response:
        return requests.post(address, data=form, timeout=ANSWER_SECONDS, allow_redirects=False)


def claims_of(token: str) -> dict[str, Any]:
    """Return what a token says of its holder, unchecked: it is our own. Nothing where it is no JSON Web Token."""
    try:
        part = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError):  # `binascii.Error` is a ValueError
        return {}
    return found if isinstance(found, dict) else {}
