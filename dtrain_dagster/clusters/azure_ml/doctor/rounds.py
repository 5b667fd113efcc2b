"""The walk itself: each check asks what it needs, and lets a pure function decide. No check stops the others."""

from __future__ import annotations

import datetime
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.azure_ml.client import NotFound, ScopeMissing, ServiceError
from dtrain_dagster.clusters.azure_ml.doctor import access, buying, surroundings
from dtrain_dagster.clusters.azure_ml.doctor.lines import DoctorLine
from dtrain_dagster.clusters.azure_ml.doctor.reader import STORAGE_SCOPE, AzureReader
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.provision import Provisioner
from dtrain_dagster.clusters.azure_ml.sku_chain import chain
from dtrain_dagster.costs.prices import region_of
from dtrain_dagster.support.audit import AuditLog
from trainer.errors import ConfigError
from trainer.storage.open import open_storage

WORKSPACE_VERSION, RESOURCES_VERSION, NETWORK_VERSION, IDENTITY_VERSION = (
    "2024-10-01-preview",
    "2021-04-01",
    "2024-05-01",
    "2023-01-31",
)
READ_LISTS = {
    "computes": "computes/read",
    "jobs": "jobs/read",
    "datastores": "datastores/read",
    "onlineEndpoints": "onlineEndpoints/read",
}
"""Lists of the workspace → the operation that reading each needs."""


@dataclass(slots=True)
class Rounds:
    """One walk. ``region``: that of ``DTRAIN_REGION``; ``wanted``: the size that is asked for first."""

    reader: AzureReader
    options: AzureMLOptions
    home: Path
    region: str
    wanted: str
    node_count: int
    ranks: int
    today: datetime.date
    workspace: dict[str, Any] = field(default_factory=dict)
    """The workspace's document, once it was read."""
    principal: str = ""
    """The id of who asks, once it is known."""
    is_absent: bool = False
    """Whether there is no such workspace, so that nothing in it need be asked for."""

    def all_lines(self) -> list[DoctorLine]:
        """Return every line, in the order of the walk. Without a token for the Resource Manager it ends after the first
        check: nobody would answer the others."""
        lines = self.check_identity()
        if any(line.verdict == "missing" and "Resource Manager" in line.seen for line in lines):
            return lines
        checks: tuple[Callable[[], list[DoctorLine]], ...] = (
            *(self.check_providers, self.check_workspace, self.check_roles, self.check_nodes_identity),
            *(self.check_storage, self.check_sizes, self.check_prices, self.check_images, self.check_network),
        )
        for check in checks:
            lines += check()
        return lines

    def check_identity(self) -> list[DoctorLine]:
        """Return who asks, and whether it gets tokens."""
        lines = []
        for what, scope in (("the Resource Manager", self.reader.arm_scope), ("storage", STORAGE_SCOPE)):
            try:
                token = self.reader.token(scope)
            except Exception as error:  # whatever a credential of the chain raises
                words = " ".join(str(getattr(error, "message", "") or error).split())[:600]
                lines.append(access.judge_no_token(what, words))
                continue
            if not lines:
                claims = access.claims_of(token)
                self.principal = str(claims.get("oid") or "")
                asked_for = os.environ.get("AZURE_CLIENT_ID")
                lines.append(access.judge_identity(claims, self.reader.credential_name(), asked_for))
        return lines

    def check_providers(self) -> list[DoctorLine]:
        """Return whether the resource providers are registered."""
        root, states = f"/subscriptions/{self.options.subscription_id}", {}
        for namespace in access.PROVIDERS:
            try:
                found = self.reader.document(f"look at {namespace}", f"{root}/providers/{namespace}", RESOURCES_VERSION)
            except ServiceError as error:
                operation = "Microsoft.Resources/subscriptions/providers/read"
                return [access.judge_refused_read("providers", operation, error, root, self.principal)]
            states[namespace] = str(found.get("registrationState"))
        return access.judge_providers(states, self.options.subscription_id)

    def check_workspace(self) -> list[DoctorLine]:
        """Return whether the workspace is there, and as dtrain needs it."""
        scope = self.options.workspace_id
        try:
            self.workspace = self.reader.document("look at the workspace", scope, WORKSPACE_VERSION)
        except ServiceError as error:
            self.is_absent = isinstance(error, (NotFound, ScopeMissing))
            operation = f"{access.ML_NAMESPACE}workspaces/read"
            return [access.judge_refused_read("workspace", operation, error, scope, self.principal)]
        return access.judge_workspace(self.workspace, self.region, self.options)

    def check_roles(self) -> list[DoctorLine]:
        """Return which lists of the workspace can be read, and which operations are granted, as far as that can be
        known without doing them."""
        scope, lines, good = self.options.workspace_id, [], []
        if self.is_absent:
            return []
        for name, needed in READ_LISTS.items():
            operation = f"{access.ML_NAMESPACE}workspaces/{needed}"
            try:
                self.reader.document(f"list {name}", f"{scope}/{name}", "2024-04-01")
                good.append(name)
            except ServiceError as error:
                lines.append(access.judge_refused_read("roles", operation, error, scope, self.principal))
        if good:
            lines.insert(0, DoctorLine(check="roles", verdict="ok", seen=f"can be listed: {', '.join(good)}"))
        try:
            return lines + access.judge_permissions(self.reader.permissions(scope), scope, self.principal)
        except ServiceError as error:
            return [*lines, judge_unknown_permissions(error)]

    def check_nodes_identity(self) -> list[DoctorLine]:
        """Return whether the nodes' identity is there, and is the one that they are told of."""
        scope = self.options.identity
        if scope is None:
            return [surroundings.judge_no_nodes_identity()]
        try:
            found = self.reader.document("look at the nodes' identity", scope, IDENTITY_VERSION)
        except ServiceError as error:
            operation = "Microsoft.ManagedIdentity/userAssignedIdentities/read"
            return [access.judge_refused_read("identity", operation, error, scope, self.principal)]
        return [surroundings.judge_nodes_identity(found, self.options.identity_client_id)]

    def check_storage(self) -> list[DoctorLine]:
        """Return whether the container of trainings can be written and read; what was written is deleted."""
        account, uri = os.environ.get("AZURE_STORAGE_ACCOUNT_URL", ""), self.options.root_uri
        if not account:
            return [surroundings.judge_no_account(bool(os.environ.get("AZURE_STORAGE_CONNECTION_STRING")))]
        name, content, step = f"probe-{uuid.uuid4().hex}", uuid.uuid4().bytes, "open"
        try:
            storage = open_storage(f"{uri}/doctor")
            step = "write"
            version = storage.create(name, content)
            step = "read"
            same = storage.read(name) == content
            step = "delete"
            storage.delete(name)
        except OSError as error:  # also of a container that is not there, which is an error of the settings, too
            if step == "read":
                with suppress(OSError):
                    storage.delete(name)
            return [surroundings.judge_storage_error(error, step, uri, account, self.principal)]
        except ConfigError as error:
            return [DoctorLine(check="storage", verdict="missing", seen=str(error), remedy="correct the setting")]
        assert same, "storage gave back other bytes than it was given"
        kept = "old versions are kept" if version else "the account keeps no old versions"
        seen = f"{uri}: a blob of {len(content)} bytes was written, read and deleted; {kept}"
        return [DoctorLine(check="storage", verdict="ok", seen=seen)]

    def check_sizes(self) -> list[DoctorLine]:
        """Return which sizes of the chain can be asked for, and whether any can."""
        region = region_of(str(self.workspace.get("location") or self.region))
        root = f"/subscriptions/{self.options.subscription_id}/providers/{access.ML_NAMESPACE}locations/{region}"
        provisioner = Provisioner(self.reader.service, AuditLog(self.home))
        operation = f"{access.ML_NAMESPACE}locations/vmsizes/read"
        try:
            listed = self.reader.document("list the sizes", f"{root}/vmSizes", WORKSPACE_VERSION)
            sizes, operation = provisioner.sizes(), f"{access.ML_NAMESPACE}locations/usages/read"
            quotas = provisioner.quotas()
        except ServiceError as error:
            scope = f"/subscriptions/{self.options.subscription_id}"
            return [access.judge_refused_read("sizes", operation, error, scope, self.principal)]
        rows = listed.get("value") or listed.get("amlCompute") or []
        types = {
            str(row["name"]).casefold(): row["supportedComputeTypes"] for row in rows if "supportedComputeTypes" in row
        }
        market = buying.Market(region=region, sizes=sizes, compute_types=types, quotas=quotas)
        choices = chain(self.wanted, self.options.chain, self.options.tiers)
        lines = [
            buying.judge_choice(choice, market, self.node_count, self.ranks, self.today, self.options)
            for choice in choices
        ]
        return [*lines, buying.judge_chain(choices, lines, self.node_count)]

    def check_prices(self) -> list[DoctorLine]:
        """Return whether each kind of node in the chain has a known price."""
        choices = chain(self.wanted, self.options.chain, self.options.tiers)
        return [buying.judge_price(choice, self.region) for choice in choices]

    def check_images(self) -> list[DoctorLine]:
        """Return whether the nodes' image is there."""
        text, scope = self.options.image, self.options.workspace_id
        environment, image = surroundings.parse_environment(text), surroundings.parse_image(text)
        if environment is not None:
            name, version = environment
            path = f"{scope}/environments/{name}" + (f"/versions/{version}" if version else "")
            try:
                self.reader.document("look at the environment", path, "2024-04-01")
            except ServiceError as error:
                operation = f"{access.ML_NAMESPACE}workspaces/environments/versions/read"
                return [access.judge_refused_read("images", operation, error, scope, self.principal)]
            return [DoctorLine(check="images", verdict="ok", seen=f"{text} is in the workspace")]
        if image is None:
            return [surroundings.judge_unreadable_image(text)]
        return [surroundings.judge_image(image, *self.reader.image_answer(image), self.principal)]

    def check_network(self) -> list[DoctorLine]:
        """Return whether names lead where they should from here, and whether nodes fit into their subnet."""
        image = surroundings.parse_image(self.options.image)
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_URL", "")
        closed = surroundings.is_closed(self.workspace)
        lines = [
            surroundings.judge_address(host, self.reader.addresses(host), closed)
            for host in surroundings.hosts_to_resolve(self.workspace, account, image)
        ]
        return [*lines, *self._check_subnet()]

    def _check_subnet(self) -> list[DoctorLine]:
        scope = surroundings.subnet_id_of(self.options)
        if scope is None:
            return [surroundings.judge_no_subnet(self.workspace, self.options)]
        try:
            found = self.reader.document("look at the subnet", scope, NETWORK_VERSION)
        except ServiceError as error:
            operation = "Microsoft.Network/virtualNetworks/subnets/read"
            return [access.judge_refused_read("network", operation, error, scope, self.principal)]
        try:
            permissions = self.reader.permissions(scope)
        except ServiceError:
            permissions = None
        return surroundings.judge_subnet(found, permissions, self.node_count, scope, self.principal)


def judge_unknown_permissions(error: ServiceError) -> DoctorLine:
    """Return that the granted operations cannot be listed, so that only reading was tried."""
    return DoctorLine(
        check="roles",
        verdict="warning",
        seen=f"other permissions cannot be listed ({error.code}): whether computes and jobs may be made is known "
        "only when the first one is",
        remedy="give this identity Microsoft.Authorization/permissions/read on the workspace, as deploy/azure does",
    )
