"""Decisions about who asks and what may be read: identity, resource providers, the workspace, roles. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.azure_ml.client import NotFound, ScopeMissing, ServiceError, ServiceRefused
from dtrain_dagster.clusters.azure_ml.doctor.lines import DoctorLine
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.costs.prices import region_of
from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal

PROVIDERS = {
    "Microsoft.MachineLearningServices": True,
    "Microsoft.Storage": True,
    "Microsoft.KeyVault": True,
    "Microsoft.ContainerRegistry": True,
    "Microsoft.Insights": True,
    "Microsoft.OperationalInsights": True,
    "Microsoft.Network": True,
    "Microsoft.ManagedIdentity": True,
    "Microsoft.Consumption": False,  # the budget
    "Microsoft.PolicyInsights": False,  # online endpoints
    "Microsoft.Cdn": False,  # online endpoints
}
"""Resource providers → whether trainings need them."""
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
ASSIGN = "assign the role of deploy/azure that has this operation; it takes effect after some minutes"
_DENIED = re.compile(r"perform action '([^']+)'")


def claims_of(token: str) -> dict[str, Any]:
    """Return what a token says of its holder, unchecked: it is our own. Nothing where it is no JSON Web Token."""
    try:
        part = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (IndexError, ValueError, binascii.Error):
        return {}
    return found if isinstance(found, dict) else {}


def judge_identity(claims: Mapping[str, Any], credential: str, asked_for: str | None) -> DoctorLine:
    """Return who asks. ``asked_for``: the client id that ``AZURE_CLIENT_ID`` names, if any."""
    person = claims.get("upn") or claims.get("unique_name") or claims.get("preferred_username")
    application = claims.get("appid") or claims.get("azp")
    who = f"{person or 'application ' + str(application)}, principal {claims.get('oid', 'unknown')}"
    seen = f"{credential}: {who}, tenant {claims.get('tid', 'unknown')}"
    if asked_for and not person and application and str(application).casefold() != asked_for.casefold():
        return DoctorLine(
            check="identity",
            verdict="warning",
            seen=f"{seen}; AZURE_CLIENT_ID names {asked_for}",
            remedy="AZURE_CLIENT_ID must be the client id of the orchestrator's identity, on this machine",
            command='az identity list --query "[].{name:name,clientId:clientId}" --output table',
        )
    return DoctorLine(check="identity", verdict="ok", seen=seen)


def judge_no_token(what: str, error: str) -> DoctorLine:
    """Return that there is no token for a service."""
    return DoctorLine(
        check="identity",
        verdict="missing",
        seen=f"no token for {what}: {error}",
        remedy="give this machine the orchestrator's managed identity and set AZURE_CLIENT_ID to its client id; on a "
        "laptop, log in",
        command="az login",
    )


def judge_providers(states: Mapping[str, str], subscription: str) -> list[DoctorLine]:
    """Return a line for each provider that is not registered, and one for all others. ``states``: namespace → Azure's
    word."""
    lines, good = [], []
    for namespace, state in states.items():
        if state == "Registered":
            good.append(namespace)
            continue
        needed = PROVIDERS.get(namespace, True)
        waits = state == "Registering"
        what = "" if needed else (" (for the budget only)" if "Consumption" in namespace else " (for endpoints only)")
        lines.append(
            DoctorLine(
                check="providers",
                verdict="warning" if waits or not needed else "missing",
                seen=f"{namespace} is {state}{what}",
                remedy="wait" if waits else "register it, once for the subscription",
                command=f"az provider register --namespace {namespace} --subscription {subscription} --wait",
            )
        )
    if good:
        lines.insert(0, DoctorLine(check="providers", verdict="ok", seen=f"{len(good)} registered: {', '.join(good)}"))
    return lines


def judge_workspace(document: Mapping[str, Any], region: str, options: AzureMLOptions) -> list[DoctorLine]:
    """Return what is to be said of a workspace that can be read. ``region``: that of ``DTRAIN_REGION``."""
    own: Mapping[str, Any] = document.get("properties") or {}
    location, state = region_of(str(document.get("location"))), str(own.get("provisioningState"))
    where = f"--name {options.workspace} --resource-group {options.resource_group}"
    lines = [DoctorLine(check="workspace", verdict="ok", seen=f"{options.workspace} in {location} can be reached")]
    if location != region_of(region):
        lines.append(
            DoctorLine(
                check="workspace",
                verdict="missing",
                seen=f"it is in {location}, and DTRAIN_REGION is {region_of(region)}: nothing can be bought until "
                "they match",
                remedy="prices and quotas are those of the workspace's region",
                command=f"export DTRAIN_REGION={location}",
            )
        )
    if state != "Succeeded":
        lines.append(
            DoctorLine(
                check="workspace",
                verdict="warning" if state in ("Creating", "Updating") else "missing",
                seen=f"its state is {state}",
                remedy="wait, or deploy it again",
                command=f"az ml workspace show {where}",
            )
        )
    if not own.get("applicationInsights"):
        lines.append(
            DoctorLine(
                check="workspace",
                verdict="missing",
                seen="it has no Application Insights",
                remedy="Azure refuses changes of such a workspace ('Missing dependent resources in workspace json'), "
                "though its schema calls it optional: give it one, as deploy/azure does",
                command=f"az ml workspace update {where} --update-dependent-resources --application-insights "
                f"/subscriptions/{options.subscription_id}/resourceGroups/{options.resource_group}/providers/"
                "Microsoft.Insights/components/<name>",
            )
        )
    if options.require_own_key and (own.get("encryption") or {}).get("status") != "Enabled":
        lines.append(
            DoctorLine(
                check="workspace",
                verdict="missing",
                seen="it is encrypted with Microsoft's keys, and DTRAIN_AZURE_REQUIRE_OWN_KEY is set",
                remedy="make one with a customer-managed key, or do not require it",
            )
        )
    return lines


def judge_refused_read(check: str, operation: str, error: ServiceError, scope: str, principal: str) -> DoctorLine:
    """Return why something cannot be read: the network, a missing role, something that does not exist, or no answer.
    ``operation``: the one that the read needs, where Azure does not name it; ``scope``: what the role is needed on."""
    reason = error.reason if isinstance(error, ServiceRefused) else str(error)
    if is_network_refusal(error.code, reason):
        return DoctorLine(
            check=check,
            verdict="missing",
            seen=f"{operation}: refused by a network rule ({error.code}): {reason}",
            remedy=NETWORK_REMEDY,
            command=f"az resource show --ids {scope} --query properties.publicNetworkAccess",
        )
    if error.status == 403 or "Authorization" in error.code:
        named = _DENIED.search(reason)
        return DoctorLine(
            check=check,
            verdict="missing",
            seen=f"{named[1] if named else operation} is not allowed ({error.code})",
            remedy=ASSIGN,
            command=assignment_command(principal, role_of_scope(scope), scope),
        )
    if isinstance(error, (NotFound, ScopeMissing)):
        return DoctorLine(
            check=check,
            verdict="missing",
            seen=f"{operation}: {error.code}: {reason}",
            remedy=_remedy_of_absence(check, error.code),
            command=f"az {'account' if 'Subscription' in error.code else 'ml workspace'} list --output table",
        )
    return DoctorLine(check=check, verdict="missing", seen=f"{operation}: {error}", remedy="ask again in a moment")


def assignment_command(principal: str, role: str, scope: str) -> str:
    """Return the command that gives an identity a role on a scope. ``principal``: its object id; "": not known."""
    return f'az role assignment create --assignee {principal or "<principal>"} --role "{role}" --scope {scope}'


def role_of_scope(scope: str) -> str:
    """Return the role of deploy/azure that the orchestrator has on such a scope."""
    kinds = {
        "/workspaces/": "dtrain orchestrates (<prefix>)",
        "/subnets/": "dtrain joins its subnet (<prefix>)",
        "/userAssignedIdentities/": "Managed Identity Operator",
    }
    return next((role for part, role in kinds.items() if part in scope), "dtrain reads locations (<prefix>)")


def _remedy_of_absence(check: str, code: str) -> str:
    named = {"network": "DTRAIN_AZURE_SUBNET", "identity": "DTRAIN_AZURE_IDENTITY", "images": "DTRAIN_AZURE_IMAGE"}
    if "Subscription" in code:
        return "DTRAIN_AZURE_SUBSCRIPTION_ID is not one that this identity sees: correct it, or log in to its tenant"
    if "ResourceGroup" in code:
        return "correct DTRAIN_AZURE_RESOURCE_GROUP, or deploy deploy/azure/main.bicep into it"
    return f"correct {named.get(check, 'DTRAIN_AZURE_WORKSPACE')}, or deploy deploy/azure/main.bicep"


def missing_operations(needed: Iterable[str], permissions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the operations that no permission grants. ``permissions``: as Azure lists them for the caller at a scope,
    ``actions`` and ``notActions`` with wildcards; several are added up, and what one excludes another may grant."""

    def grants(permission: Mapping[str, Any], operation: str) -> bool:
        granted = any(_matches(pattern, operation) for pattern in permission.get("actions") or ())
        return granted and not any(_matches(pattern, operation) for pattern in permission.get("notActions") or ())

    return [operation for operation in needed if not any(grants(item, operation) for item in permissions)]


def _matches(pattern: str, operation: str) -> bool:
    """Return whether a pattern of a role holds an operation. ``*`` stands for anything, slashes included; between two
    slashes for nothing, too: Azure's own role ``AzureML Data Scientist`` takes ``workspaces/write`` out of what
    ``workspaces/*/write`` grants."""
    words = re.escape(pattern).replace(r"/\*/", "/(?:.*/)?").replace(r"\*", ".*")
    return re.fullmatch(words, operation, re.IGNORECASE) is not None


def judge_permissions(permissions: Sequence[Mapping[str, Any]], scope: str, principal: str) -> list[DoctorLine]:
    """Return a line for each operation on the workspace that is not granted, or one that all are."""
    missing = missing_operations(NEEDED_OPERATIONS, permissions)
    if not missing:
        return [
            DoctorLine(
                check="roles",
                verdict="ok",
                seen=f"all {len(NEEDED_OPERATIONS)} operations on the workspace are granted",
            )
        ]
    command = assignment_command(principal, role_of_scope(scope), scope)
    return [
        DoctorLine(check="roles", verdict="missing", seen=f"{name} is not granted", remedy=ASSIGN, command=command)
        for name in missing
    ]
