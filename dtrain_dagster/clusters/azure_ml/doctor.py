"""What a first training on a subscription needs, decided from what Azure says: one line for each thing, with its
remedy. Pure, but for the price table, which is read. `doctor_reader` asks."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from dtrain_dagster.clusters.azure_ml.client import NotFound, ScopeMissing, ServiceError, ServiceRefused
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.sku_chain import Quota, Size, SkuChoice, examine, quotas_of
from dtrain_dagster.costs.prices import PriceError, hardware_of, price_of, refresh_command, region_of
from dtrain_dagster.settings.tiers import SPOT_QUOTA, tier_of
from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal

ML_NAMESPACE = "Microsoft.MachineLearningServices/"
NEEDED_OPERATIONS = tuple(
    f"{ML_NAMESPACE}workspaces/{name}"
    for name in (
        *("read", "computes/read", "computes/write", "computes/delete", "computes/listNodes/action"),
        *("jobs/read", "jobs/write", "jobs/cancel/action", "codes/versions/read", "codes/versions/write"),
        *("environments/read", "environments/versions/read", "environments/versions/write", "datastores/read"),
        *("environments/build/action", "environments/readSecrets/action", "datastores/listsecrets/action"),
        *("experiments/read", "experiments/runs/read", "experiments/runs/write", "experiments/runs/submit/action"),
        *("metadata/artifacts/read", "metadata/artifacts/write", "models/read", "models/versions/read"),
        *("models/write", "models/versions/write", "onlineEndpoints/read"),
    )
)
"""Operations on the workspace that a training and its registered model need."""
BUYS = "Nothing was bought: the command only reads, and writes one small blob, which it deletes."
ASSIGN = "assign the role of deploy/azure that has this operation; it takes effect after some minutes"
QUOTA_PAGE = "https://ml.azure.com/quota"
RESERVED_ADDRESSES = 5
"""Addresses of each subnet that Azure keeps for itself."""
_DENIED = re.compile(r"perform action '([^']+)'")
_ROLES = {
    "/workspaces/": "dtrain orchestrates (<prefix>)",
    "/subnets/": "dtrain joins its subnet (<prefix>)",
    "/userAssignedIdentities/": "Managed Identity Operator",
}
"""Part of a scope → the role of deploy/azure that the orchestrator has on it."""
_SETTINGS = {"network": "DTRAIN_AZURE_SUBNET", "identity": "DTRAIN_AZURE_IDENTITY", "images": "DTRAIN_AZURE_IMAGE"}
"""Check → the setting that names what it looks for; of all others the workspace's."""

Verdict = Literal["ok", "warning", "missing"]
"""Whether it is as it should be; may be in the way, or is only known later; or a training cannot start without it."""
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DoctorLine:
    """One thing that was looked at. ``remedy``: what to do; ``command``: what does it, or shows more."""

    check: str
    verdict: Verdict
    seen: str
    remedy: str = ""
    command: str = ""


def exit_code_of(lines: Sequence[DoctorLine]) -> int:
    """Return 1 if something is missing, else 0."""
    return int(any(line.verdict == "missing" for line in lines))


def doctor_document(lines: Sequence[DoctorLine]) -> dict[str, Any]:
    """Return everything for JSON."""
    counts = {name: sum(line.verdict == name for line in lines) for name in ("ok", "warning", "missing")}
    return {"buys": BUYS, "counts": counts, "lines": [asdict(line) for line in lines]}


def doctor_text(lines: Sequence[DoctorLine]) -> str:
    """Return the lines for a terminal: verdict, check and what was seen; below it the remedy, and the command."""
    texts = []
    for line in lines:
        texts.append(f"{line.verdict:<8}{line.check:<11} {line.seen}")
        texts += [f"{'':20}{sign} {words}" for sign, words in (("→", line.remedy), ("$", line.command)) if words]
    counts = doctor_document(lines)["counts"]
    return "\n".join([*texts, f"{counts['missing']} missing, {counts['warning']} warnings. {BUYS}"])


def judge_refused_read(check: str, operation: str, error: ServiceError, scope: str, principal: str) -> DoctorLine:
    """Return why something cannot be read: the network, a missing role, something that does not exist, or no answer.
    ``operation``: the one that the read needs, where Azure does not name it; ``scope``: what the role is needed on."""
    reason = error.reason if isinstance(error, ServiceRefused) else str(error)
    if is_network_refusal(error.code, reason):
        seen = f"{operation}: refused by a network rule ({error.code}): {reason}"
        command = f"az resource show --ids {scope} --query properties.publicNetworkAccess"
        return DoctorLine(check, "missing", seen, NETWORK_REMEDY, command)
    if error.status == 403 or "Authorization" in error.code:
        named = _DENIED.search(reason)
        seen = f"{named[1] if named else operation} is not allowed ({error.code})"
        return DoctorLine(check, "missing", seen, ASSIGN, assignment_command(principal, scope))
    if not isinstance(error, (NotFound, ScopeMissing)):
        return DoctorLine(check, "missing", f"{operation}: {error}", "ask again in a moment")
    remedy = f"correct {_SETTINGS.get(check, 'DTRAIN_AZURE_WORKSPACE')}, or deploy deploy/azure/main.bicep"
    if "Subscription" in error.code:
        remedy = "DTRAIN_AZURE_SUBSCRIPTION_ID is not one that this identity sees: correct it, or log in to its tenant"
    elif "ResourceGroup" in error.code:
        remedy = "correct DTRAIN_AZURE_RESOURCE_GROUP, or deploy deploy/azure/main.bicep into it"
    listed = "account" if "Subscription" in error.code else "ml workspace"
    return DoctorLine(check, "missing", f"{operation}: {error.code}: {reason}", remedy, f"az {listed} list -o table")


def assignment_command(principal: str, scope: str, role: str = "") -> str:
    """Return the command that gives an identity a role on a scope. ``principal``: its object id; "": not known;
    ``role``: "" for the one of deploy/azure on such a scope."""
    role = role or next((name for part, name in _ROLES.items() if part in scope), "dtrain reads locations (<prefix>)")
    return f'az role assignment create --assignee {principal or "<principal>"} --role "{role}" --scope {scope}'


def judge_workspace(document: Document, region: str, options: AzureMLOptions) -> list[DoctorLine]:
    """Return what is to be said of a workspace that can be read. ``region``: that of ``DTRAIN_REGION``."""
    own: Document = document.get("properties") or {}
    location, state = region_of(str(document.get("location"))), str(own.get("provisioningState"))
    where = f"--name {options.workspace} --resource-group {options.resource_group}"
    lines = [DoctorLine("workspace", "ok", f"{options.workspace} in {location} can be reached")]
    if location != region_of(region):
        seen = f"it is in {location}, and DTRAIN_REGION is {region_of(region)}: nothing can be bought until they match"
        remedy = "prices and quotas are those of the workspace's region"
        lines.append(DoctorLine("workspace", "missing", seen, remedy, f"export DTRAIN_REGION={location}"))
    if state != "Succeeded":
        command = f"az ml workspace show {where}"
        lines.append(DoctorLine("workspace", "missing", f"its state is {state}", "wait, or deploy it again", command))
    if not own.get("applicationInsights"):
        remedy = (
            "Azure refuses changes of such a workspace ('Missing dependent resources in workspace json'), though its "
            "schema calls it optional: give it one, as deploy/azure does"
        )
        command = f"az ml workspace update {where} --update-dependent-resources --application-insights <resource id>"
        lines.append(DoctorLine("workspace", "missing", "it has no Application Insights", remedy, command))
    return lines


def judge_permissions(permissions: Sequence[Document], scope: str, principal: str) -> list[DoctorLine]:
    """Return a line for each operation on the workspace that is not granted, or one that all are."""
    missing = missing_operations(NEEDED_OPERATIONS, permissions)
    if not missing:
        return [DoctorLine("roles", "ok", f"all {len(NEEDED_OPERATIONS)} operations on the workspace are granted")]
    command = assignment_command(principal, scope)
    return [DoctorLine("roles", "missing", f"{name} is not granted", ASSIGN, command) for name in missing]


def missing_operations(needed: Iterable[str], permissions: Sequence[Document]) -> list[str]:
    """Return the operations that no permission grants. ``permissions``: as Azure lists them for the caller at a scope,
    ``actions`` and ``notActions`` with wildcards; several are added up, and what one excludes another may grant."""

    def grants(permission: Document, operation: str) -> bool:
        granted = any(_matches(pattern, operation) for pattern in permission.get("actions") or ())
        return granted and not any(_matches(pattern, operation) for pattern in permission.get("notActions") or ())

    return [operation for operation in needed if not any(grants(item, operation) for item in permissions)]


def _matches(pattern: str, operation: str) -> bool:
    """Return whether a pattern of a role holds an operation. ``*`` stands for anything, slashes included; between two
    slashes for nothing, too: Azure's own role ``AzureML Data Scientist`` takes ``workspaces/write`` out of what
    ``workspaces/*/write`` grants."""
    words = re.escape(pattern).replace(r"/\*/", "/(?:.*/)?").replace(r"\*", ".*")
    return re.fullmatch(words, operation, re.IGNORECASE) is not None


def judge_nodes_identity(identity: Document, client_id: str | None) -> DoctorLine:
    """Return whether the identity of the nodes is the one whose client id they are given."""
    found = str((identity.get("properties") or {}).get("clientId") or "")
    seen = f"nodes are {identity.get('name')}, client id {found}"
    if (client_id or "").casefold() == found.casefold():
        return DoctorLine("identity", "ok", seen)
    seen += f", and DTRAIN_AZURE_IDENTITY_CLIENT_ID is {client_id or 'not set'}"
    command = f"export DTRAIN_AZURE_IDENTITY_CLIENT_ID={found}"
    return DoctorLine("identity", "missing", seen, "nodes choose their identity by it", command)


def judge_storage_error(error: OSError, step: str, uri: str, account_url: str, principal: str) -> DoctorLine:
    """Return why the container cannot be read or written; the error says what to do. ``step``: what was tried;
    ``principal``: who did."""
    container, said = uri.removeprefix("az://").partition("/")[0], str(error)
    host = urlsplit(account_url).hostname or "<account>"
    account, remedy = host.partition(".")[0], "as it says"
    scope = f"$(az storage account show --name {account} --query id --output tsv)/blobServices/default/containers/"
    command = assignment_command(principal, f"{scope}{container}", "Storage Blob Data Contributor")
    if NETWORK_REMEDY in said:
        remedy, command = "see the line itself", f"nslookup {host}"
    elif "no such container" in said:
        command = f"az storage container create --auth-mode login --account-name {account} --name {container}"
    return DoctorLine("storage", "missing", f"{step}: {said}", remedy, command)


def judge_choice(
    choice: SkuChoice,
    sizes: Mapping[str, Size],
    quotas: Sequence[Quota],
    node_count: int,
    ranks: int,
    today: datetime.date,
    usage_command: str,
) -> DoctorLine:
    """Return whether this kind of node can be asked for, with the cores that it needs beside those that are free.
    ``sizes``: by name in lower case; ``usage_command``: lists the quotas."""
    retired = retirement_of(choice.sku)
    if retired and retired <= today:
        remedy = "take it out of DTRAIN_GPU_TYPE and DTRAIN_AZURE_CHAIN; the next choice is tried instead"
        return DoctorLine("sizes", "warning", f"{choice}: retired on {retired}, whatever is still listed", remedy)
    refusal, size, cores = examine(choice, sizes, quotas, node_count, 0, ranks), sizes.get(choice.sku.casefold()), ""
    if size is not None:
        free = [
            f"{quota.name} has {quota.limit - quota.used} free of {quota.limit}"
            for quota in quotas_of(choice, size, quotas)
            if quota.limit >= 0
        ]
        cores = f"{node_count} node(s) need {node_count * size.vcpus} cores; "
        cores += ", ".join(free) or "no quota of its family is listed, the service decides"
    if refusal is None:
        return DoctorLine("sizes", "ok", f"{choice}: {cores}" + (f"; it retires on {retired}" if retired else ""))
    if "Quota" in refusal.code:
        seen = f"{choice}: {cores or refusal.message} ({refusal.code})"
        return DoctorLine(
            "sizes", "warning", seen, f"ask for more cores ({QUOTA_PAGE}), or for fewer nodes", usage_command
        )
    remedy = "the next choice is tried instead; take it out of the chain if this is permanent"
    return DoctorLine("sizes", "warning", f"{choice}: {refusal.message} ({refusal.code})", remedy)


def retirement_of(sku: str) -> datetime.date | None:
    """Return the day on which a size retires, None where none is known."""
    try:
        day = hardware_of(sku).retired_on
    except PriceError:
        return None
    return datetime.date.fromisoformat(day) if day else None


def judge_chain(choices: Sequence[SkuChoice], lines: Sequence[DoctorLine], node_count: int) -> DoctorLine:
    """Return whether anything of the chain can be asked for. ``lines``: those of `judge_choice`, in the same order."""
    good = [choice for choice, line in zip(choices, lines, strict=True) if line.verdict == "ok"]
    if good:
        seen = f"{len(good)} of {len(choices)} choices can be asked for, {good[0]} first"
        return DoctorLine("sizes", "ok", f"{seen}; whether there is capacity is known only when they are bought")
    remedy = (
        f"raise a quota ({QUOTA_PAGE}), add sizes to DTRAIN_AZURE_CHAIN or spot to DTRAIN_TIER (its quota: "
        f"{SPOT_QUOTA}), or ask for fewer nodes (DTRAIN_NODES)"
    )
    return DoctorLine(
        "sizes", "missing", f"none of {len(choices)} choices can be asked for, with {node_count} nodes", remedy
    )


def judge_price(choice: SkuChoice, region: str) -> DoctorLine:
    """Return whether the price of this kind of node is known; a plan is refused where that of one choice is not."""
    try:
        figure = price_of(choice.sku, region).figure(tier_of(choice.tier))
    except PriceError as error:
        remedy = "ask Azure's price list, or take the size out of the chain"
        return DoctorLine("prices", "missing", f"{choice}: {error}", remedy, refresh_command(region, choice.sku))
    seen = f"{choice}: {figure.usd_per_hour:.4g} US dollars per node and hour ({figure.how}, {figure.recorded_on})"
    return DoctorLine("prices", "ok", seen)


def judge_image(text: str, status: int, said: str, principal: str) -> DoctorLine:
    """Return what a registry's answer to a question for an image means. ``status``: of HTTP, 0 where there was none;
    ``said``: its words, or why there is no answer; ``principal``: who asked."""
    host = text.partition("/")[0].partition(":")[0]
    registry = host.partition(".")[0]
    if status == 200:
        return DoctorLine("images", "ok", f"{text} is there")
    if is_network_refusal("", said):
        seen = f"{text}: refused by a network rule ({status})"
        return DoctorLine("images", "missing", seen, NETWORK_REMEDY, f"nslookup {host}")
    if status == 404:
        remedy = "build it and push it (deploy/azure/README.md), or correct DTRAIN_AZURE_IMAGE"
        command = f"az acr repository list --name {registry} --output table"
        return DoctorLine("images", "missing", f"{text}: the registry has no such image", remedy, command)
    if status in (401, 403):
        remedy = "the nodes' identity needs AcrPull on it; give it to this one too, and the tag can be looked for"
        command = assignment_command(principal, f"$(az acr show --name {registry} --query id --output tsv)", "AcrPull")
        return DoctorLine("images", "warning", f"{text}: the registry denies access ({status})", remedy, command)
    seen = f"{text}: the registry does not answer: {status or ''} {said}".rstrip()
    remedy = "check the host in DTRAIN_AZURE_IMAGE, and that this machine may reach it"
    return DoctorLine("images", "missing", seen, remedy, f"az acr check-health --name {registry}")


def judge_no_subnet(workspace: Document, options: AzureMLOptions) -> DoctorLine:
    """Return what it means that no subnet is named for the nodes."""
    own: Document = workspace.get("properties") or {}
    managed, is_closed = (own.get("managedNetwork") or {}).get("isolationMode"), own.get("publicNetworkAccess")
    if managed and managed != "Disabled":
        return DoctorLine("network", "ok", f"nodes are in the workspace's managed network ({managed})")
    if options.public_ip and is_closed != "Disabled":
        return DoctorLine("network", "ok", "nodes are in no network of yours, with public addresses")
    seen = "nodes must have no public addresses, but no subnet is named: Azure does not make such a compute"
    if options.public_ip:
        seen = "the workspace is closed to the internet, and nodes are in no network that reaches it"
    remedy = "set DTRAIN_AZURE_SUBNET (output nodesSubnetId of deploy/azure), or use a managed network"
    return DoctorLine("network", "missing", seen, remedy)


def judge_subnet(subnet: Document, node_count: int) -> DoctorLine:
    """Return whether nodes fit into their subnet."""
    own: Document = subnet.get("properties") or {}
    prefixes = [str(text) for text in (own.get("addressPrefixes") or [own.get("addressPrefix")]) if text]
    room = sum(ipaddress.ip_network(prefix).num_addresses - RESERVED_ADDRESSES for prefix in prefixes)
    seen = f"subnet {subnet.get('name')} ({', '.join(prefixes)}) has room for {max(room, 0)} nodes"
    if room >= node_count:
        return DoctorLine("network", "ok", seen)
    return DoctorLine(
        "network", "missing", f"{seen}, not for {node_count}", "choose a larger subnet, or ask for fewer nodes"
    )
