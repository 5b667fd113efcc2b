"""`dtrain doctor` on Azure ML: whether a first training can start, and what to do where it cannot.

Each check looks at one thing; none stops the others. Documents are read without the client's own types, which drop what
matters here, and without the SDK's policy that registers providers by itself.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtrain_dagster.clusters.azure_ml.client import NotFound, ScopeMissing, Service, ServiceError, words
from dtrain_dagster.clusters.azure_ml.provision import Provisioner
from dtrain_dagster.clusters.azure_ml.refusals import SETTINGS
from dtrain_dagster.clusters.azure_ml.sku_chain import (
    Quota,
    Size,
    SkuChoice,
    chain,
    examine,
    explain_retired,
    quotas_of,
)
from dtrain_dagster.costs.prices import PriceError, price_of, refresh_command, region_of
from dtrain_dagster.settings.cluster_kinds import SPOT_QUOTA, tier_of
from dtrain_dagster.support.audit import AuditLog
from trainer.errors import ConfigError
from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal
from trainer.storage.open import open_storage

NEEDED_OPERATIONS = tuple(
    f"Microsoft.MachineLearningServices/workspaces/{name}"
    for name in (
        *("read", "computes/read", "computes/write", "computes/delete", "computes/listNodes/action"),
        *("jobs/read", "jobs/write", "jobs/cancel/action", "codes/versions/read", "codes/versions/write"),
        *("environments/read", "environments/versions/read", "environments/versions/write", "datastores/read"),
        *("environments/build/action", "environments/readSecrets/action", "datastores/listsecrets/action"),
        *("experiments/read", "experiments/runs/read", "experiments/runs/write", "experiments/runs/submit/action"),
        *("metadata/artifacts/read", "metadata/artifacts/write", "models/read", "models/versions/read"),
        *("models/write", "models/versions/write"),
    )
)
"""Operations on the workspace that a training and its registered model need."""
SIZES_REMEDY = (
    "raise a quota (https://ml.azure.com/quota), ask for fewer nodes (DTRAIN_NODES), or for other sizes or tiers "
    f"(chain in DTRAIN_AZURE_OPTIONS; DTRAIN_TIER, for Spot's quota: {SPOT_QUOTA})"
)
SIGN_IN_REMEDY = "`az login`; on a machine of Azure's a managed identity, with AZURE_CLIENT_ID set to its client id"
_OPTIONS = "DTRAIN_AZURE_OPTIONS"
_NAMED_BY = {"identity": f"identity in {_OPTIONS}", "network": f"subnet in {_OPTIONS}", "images": "DTRAIN_AZURE_IMAGE"}
"""What is looked at → the setting that names it."""

Document = Mapping[str, Any]
Verdict = Literal["ok", "warning", "missing"]
"""Whether it is as it should be; may be in the way, or is only known later; or a training cannot start without it."""


@dataclass(frozen=True, slots=True)
class DoctorLine:
    """One thing that was looked at. ``remedy``: what to do, or the command that does it."""

    check: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def judged(check: str, good: object, seen: str, remedy: str) -> DoctorLine:
    """Return a line with the remedy only where it is needed."""
    return DoctorLine(check, "ok", seen) if good else DoctorLine(check, "missing", seen, remedy)


def missing_operations(needed: Iterable[str], permissions: Sequence[Document]) -> list[str]:
    """Return the operations that no permission grants. ``permissions``: as Azure lists them for the caller at a scope,
    ``actions`` and ``notActions`` with wildcards; several are added up, and what one excludes another may grant."""

    def holds(patterns: Iterable[str] | None, operation: str) -> bool:
        # * stands for anything, slashes included; between two slashes for nothing, too: Azure's own role "AzureML Data
        # Scientist" takes workspaces/write out of what workspaces/*/write grants.
        texts = (re.escape(text).replace(r"/\*/", "/(?:.*/)?").replace(r"\*", ".*") for text in patterns or ())
        return any(re.fullmatch(text, operation, re.IGNORECASE) for text in texts)

    granted = [(item.get("actions"), item.get("notActions")) for item in permissions]
    return [name for name in needed if not any(holds(good, name) and not holds(bad, name) for good, bad in granted)]


def judge_choice(
    choice: SkuChoice, sizes: Mapping[str, Size], quotas: Sequence[Quota], node_count: int, ranks: int
) -> DoctorLine:
    """Return whether this kind of node can be asked for. ``sizes``: by name in lower case."""
    today, refusal = datetime.datetime.now(datetime.UTC).date(), examine(choice, sizes, quotas, node_count, 0, ranks)
    if problem := explain_retired(choice.sku, today) or (refusal and f"{refusal.message} ({refusal.code})"):
        return DoctorLine("sizes", "warning", f"{choice}: {problem}", SIZES_REMEDY)
    size = sizes[choice.sku.casefold()]
    limited = [quota for quota in quotas_of(choice, size, quotas) if quota.limit >= 0]
    free = ", ".join(f"{quota.name} has {quota.limit - quota.used} free of {quota.limit}" for quota in limited)
    seen = f"{choice}: {node_count} node(s) need {node_count * size.vcpus} cores; {free or 'no quota of it is listed'}"
    return DoctorLine("sizes", "ok", seen)


def judge_price(choice: SkuChoice, region: str) -> DoctorLine:
    """Return whether the price of this kind of node is known; a plan is refused where that of one choice is not."""
    try:
        figure = price_of(choice.sku, region).figure(tier_of(choice.tier))
    except PriceError as error:
        remedy = f"`{refresh_command(region, choice.sku)}`, or take the size out of the chain"
        return DoctorLine("prices", "missing", f"{choice}: {error}", remedy)
    seen = f"{choice}: {figure.usd_per_hour:.4g} US dollars per node and hour ({figure.how}, {figure.recorded_on})"
    return DoctorLine("prices", "ok", seen)


class Doctor:
    """One walk over everything. ``region``: that of ``DTRAIN_REGION``; ``wanted``: the size that is asked for first;
    ``writes``: whether storage is tried by a blob, which is deleted."""

    def __init__(
        self, service: Service, home: Path, region: str, wanted: str, node_count: int, ranks: int, writes: bool = True
    ) -> None:
        self.service, self.options, self.region, self.wanted = service, service.options, region_of(region), wanted
        self.provisioner = Provisioner(service, AuditLog(home))
        self.node_count, self.ranks, self.writes = node_count, ranks, writes
        self.properties: Document = {}  # of the workspace, once it was read
        self.principal = "<principal>"  # the id of who asks, once it is known

    def examine(self) -> list[DoctorLine]:
        """Return every line. Without an identity there is only that one: nobody would answer the other checks."""
        lines = [self._sign_in()]
        if lines[0].verdict == "missing":
            return lines
        for check, look in (
            *(("workspace", self._workspace), ("roles", self._roles), ("identity", self._nodes_identity)),
            *(("storage", self._storage), ("sizes", self._sizes), ("images", self._image), ("network", self._network)),
        ):
            try:
                with self.service.looking():
                    for line in look():
                        lines.append(line)  # those before a refusal count
            except ServiceError as error:
                lines.append(self._refused(check, error))
        return lines

    def _refused(self, check: str, error: ServiceError) -> DoctorLine:
        """Return why something cannot be read: the network, a missing role, what does not exist, or no answer."""
        reason, remedy = error.reason, "ask again in a moment"
        if is_network_refusal(error.code, reason):
            remedy = NETWORK_REMEDY
        elif error.status == 401:
            remedy = SIGN_IN_REMEDY
        elif error.status == 403 or "Authorization" in error.code:
            remedy = self._assignment(check)
        elif isinstance(error, (NotFound, ScopeMissing)):
            setting = SETTINGS[error.scope] if isinstance(error, ScopeMissing) else _NAMED_BY.get(check, "its setting")
            remedy = f"correct {setting}, or deploy deploy/azure/main.bicep"
        return DoctorLine(check, "missing", f"{error.code}: {reason}", remedy)

    def _assignment(self, check: str) -> str:
        """Return the command that gives the orchestrator its role of deploy/azure on what is looked at."""
        elsewhere = {
            "identity": ("Managed Identity Operator", self.options.identity),
            "sizes": ("dtrain reads locations (<prefix>)", f"/subscriptions/{self.options.subscription_id}"),
            "network": ("dtrain joins its subnet (<prefix>)", self.options.subnet),
        }
        role, scope = elsewhere.get(check, ("dtrain orchestrates (<prefix>)", self.options.workspace_id))
        command = f'az role assignment create --assignee {self.principal} --role "{role}" --scope {scope}'
        return f"`{command}`; it takes effect after some minutes"

    def _sign_in(self) -> DoctorLine:
        try:
            token = str(self.service.credential.get_token(f"{self.service.address}/.default").token)
        except Exception as error:  # whatever a credential of the chain raises
            return DoctorLine("identity", "missing", f"no token for Azure: {words(error)}", SIGN_IN_REMEDY)
        try:  # unchecked: it is our own
            claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
            self.principal = str(claims["oid"])
            who = claims.get("upn") or claims.get("unique_name") or f"application {claims.get('appid')}"
            return DoctorLine("identity", "ok", f"{who}, principal {self.principal}, tenant {claims.get('tid')}")
        except (LookupError, ValueError, TypeError):
            return DoctorLine("identity", "ok", "an identity whose token does not say who it is")

    def _workspace(self) -> Iterator[DoctorLine]:
        found = self._document(self.options.workspace_id, "2024-10-01-preview")
        self.properties = found.get("properties") or {}
        location, state = region_of(str(found.get("location"))), self.properties.get("provisioningState")
        seen = f"{self.options.workspace} is in {location}, and DTRAIN_REGION, whose prices count, is {self.region}"
        yield judged("workspace", location == self.region, seen, f"`export DTRAIN_REGION={location}`")
        yield judged("workspace", state == "Succeeded", f"its state is {state}", "wait, or deploy it again")

    def _roles(self) -> Iterator[DoctorLine]:
        path = f"{self.options.workspace_id}/providers/Microsoft.Authorization/permissions"
        try:
            found = list(self.service.read_all(f"read {path}", path, "2022-04-01"))
        except (NotFound, ScopeMissing):  # of a workspace that is not there, as its line says
            return
        except ServiceError as error:
            seen = f"permissions cannot be listed ({error.code}): whether they suffice is known when a job is started"
            remedy = "give this identity Microsoft.Authorization/permissions/read, as deploy/azure does"
            yield DoctorLine("roles", "warning", seen, remedy)
            return
        missing = missing_operations(NEEDED_OPERATIONS, found)
        seen = f"of {len(NEEDED_OPERATIONS)} operations on the workspace, {', '.join(missing) or 'none'} is not granted"
        yield judged("roles", not missing, seen, self._assignment("roles"))

    def _nodes_identity(self) -> Iterator[DoctorLine]:
        if self.options.identity is None:
            remedy = f"set identity and identity_client_id in {_OPTIONS} (outputs of deploy/azure)"
            yield DoctorLine("identity", "warning", "nodes get their compute's identity, which has no roles", remedy)
            return
        found = self._document(self.options.identity, "2023-01-31")
        known, told = str((found.get("properties") or {}).get("clientId")), self.options.identity_client_id
        seen = f"nodes are {found.get('name')}, client id {known}; identity_client_id is {told}"
        remedy = f"put `identity_client_id={known}` into {_OPTIONS}, by which nodes choose it"
        yield judged("identity", known.casefold() == str(told).casefold(), seen, remedy)

    def _storage(self) -> Iterator[DoctorLine]:
        uri, name, fault = self.options.root_uri, f"probe-{uuid.uuid4().hex}", ""
        if not self.writes:
            yield DoctorLine("storage", "ok", f"{uri}: not tried, since that writes; `dtrain doctor` does")
            return
        try:
            if not os.environ.get("AZURE_STORAGE_ACCOUNT_URL"):
                raise ConfigError("AZURE_STORAGE_ACCOUNT_URL is not set: nodes are told it, and open it by identity")
            storage = open_storage(f"{uri}/doctor")
            storage.create(name, name.encode())
            storage.read(name)
            storage.delete(name)
        except (OSError, ConfigError) as error:
            fault = str(error)
        remedy = "as it says; deploy/azure/README.md has the roles and the network"
        yield judged("storage", not fault, fault or f"{uri}: a blob was written, read and deleted", remedy)

    def _sizes(self) -> Iterator[DoctorLine]:
        choices = chain(self.wanted, self.options.chain, self.options.tiers)
        yield from (judge_price(choice, self.region) for choice in choices)
        sizes, quotas = self.provisioner.sizes(), self.provisioner.quotas()
        lines = [judge_choice(choice, sizes, quotas, self.node_count, self.ranks) for choice in choices]
        good = sum(line.verdict == "ok" for line in lines)
        seen = f"{good} of {len(lines)} choices can be asked for; whether there is capacity is known once they are"
        yield from [*lines, judged("sizes", good, seen, SIZES_REMEDY)]

    def _image(self) -> Iterator[DoctorLine]:
        text = self.options.image
        if text.startswith("azureml:"):
            path = text.removeprefix("azureml:").removesuffix("@latest").replace(":", "/versions/")
            self._document(f"{self.options.workspace_id}/environments/{path}", "2024-04-01")
            yield DoctorLine("images", "ok", f"{text} is in the workspace")
        elif not re.match(r"[^/]*[.:][^/]*/", text):
            remedy = "name an image with its registry (registry.azurecr.io/dtrain-nodes:1), or azureml:<name>:<version>"
            yield DoctorLine("images", "warning", f"{text} names no registry: nodes look for it at Docker Hub", remedy)
        else:
            remedy = f"see that nodes can pull it: `az acr manifest show {text}`; their identity needs AcrPull"
            yield DoctorLine("images", "warning", f"{text}: its registry was not asked", remedy)

    def _network(self) -> Iterator[DoctorLine]:
        if self.options.subnet is None:
            managed = (self.properties.get("managedNetwork") or {}).get("isolationMode") or "Disabled"
            access, has_ip = self.properties.get("publicNetworkAccess") or "Enabled", self.options.public_ip
            seen = f"no subnet is named, nodes have {'' if has_ip else 'no '}public addresses, the workspace's managed "
            seen += f"network is {managed}, and its public access {access}"
            remedy = f"set subnet in {_OPTIONS} (output nodesSubnetId of deploy/azure), or use a managed network"
            yield judged("network", managed != "Disabled" or (has_ip and access != "Disabled"), seen, remedy)
            return
        found = self._document(self.options.subnet, "2024-05-01")
        yield DoctorLine("network", "ok", f"subnet {found.get('name')} is there")

    def _document(self, path: str, version: str) -> dict[str, Any]:
        return self.service.read(f"read {path}", path, version)
