"""Who may do what: each request to Azure Resource Manager is held against the roles that deploy/azure gives somebody.

The action of a request follows from its method and path, as Azure derives it (GET: ``read``, PUT and PATCH: ``write``,
DELETE: ``delete``, POST: its last word and ``action``); the words of a refusal are as reported
(microsoft/mlops-template-for-azureml-sdk-v2, issue 9). Assumed: where code and models are uploaded to is told to
whoever may write them, since the documented least role for submitting has no action for it. The workspace's own
services (history, tracking) are not checked: what they ask for is not told by their paths.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from harness.azure.emulator.answers import Refusal

MODULES = Path(__file__).parents[3] / "deploy/azure/modules"
ROLES = {
    "orchestrator": (("roles.bicep", "orchestrates"), ("location_role.bicep", "readsLocations"),
                     ("roles.bicep", "joinsSubnet")),
    "node": (("roles.bicep", "reportsMetrics"),),
}  # fmt: skip
"""Identity → its roles: the file and the name there."""
BUILT_IN = {
    "blobContributor": ("Microsoft.Storage/storageAccounts/blobServices/containers/read",
                        "Microsoft.Storage/storageAccounts/blobServices/containers/write",
                        "Microsoft.Storage/storageAccounts/blobServices/containers/delete",
                        "Microsoft.Storage/storageAccounts/blobServices/generateUserDelegationKey/action"),
    "secretsUser": (),
    "imagePull": ("Microsoft.ContainerRegistry/registries/pull/read",),
    "identityOperator": ("Microsoft.ManagedIdentity/userAssignedIdentities/*/read",
                         "Microsoft.ManagedIdentity/userAssignedIdentities/*/assign/action",
                         "Microsoft.Authorization/*/read", "Microsoft.Resources/subscriptions/resourceGroups/read"),
}  # fmt: skip
"""Azure's own roles under the names that roles.bicep gives them → their actions, as published (those for alerts,
deployments and support left out; data actions are the stores' own)."""
PRINCIPALS = {"orchestrator": "orchestratorPrincipalId", "node": "nodesPrincipalId"}
WORDS = {"GET": "read", "HEAD": "read", "PUT": "write", "PATCH": "write", "DELETE": "delete"}
_ACTIONS = re.compile(r"^ +actions: \[\n(.*?)^ +\]", re.M | re.S)


def refuse_unless_granted(
    claims: Mapping[str, str], action: str, scope: str, granted: Collection[str], denied: Collection[str]
) -> None:
    """`Refusal` (403) for an identity (the claims of its token) whose roles do not have the action, nor the ``granted``
    patterns beside them, or where the ``denied`` patterns have it."""
    has_it = any(_matches(action, pattern) for pattern in (*granted_actions(claims["name"]), *granted))
    if has_it and not any(_matches(action, pattern) for pattern in denied):
        return
    who = claims["oid"]
    raise Refusal(
        403,
        "AuthorizationFailed",
        f"The client '{who}' with object id '{who}' does not have authorization to perform action '{action}' over "
        f"scope '{scope}' or the scope is invalid. If access was recently granted, please refresh your credentials.",
    )


def action_of(method: str, path: str) -> str:
    """Such as ``Microsoft.MachineLearningServices/workspaces/jobs/read``; "" for what no provider offers."""
    if not path.startswith("/subscriptions/"):
        return ""
    _, found, rest = path.rpartition("/providers/")
    if not found:
        return ""
    if path.count("/") == 4:  # /subscriptions/{id}/providers/{namespace}: about the provider itself
        return "Microsoft.Resources/subscriptions/providers/read"
    namespace, *parts = rest.strip("/").split("/")
    kinds = parts[::2]
    if method != "POST":
        return "/".join((namespace, *kinds, WORDS[method]))
    # Of type, name, …, verb the verb is where a type would be.
    if kinds[-1] == "startPendingUpload":
        return "/".join((namespace, *kinds[:-1], "write"))
    return "/".join((namespace, *kinds, "action"))


@cache
def granted_actions(who: str) -> tuple[str, ...]:
    """Of the roles in the templates; everything for an identity that has none there."""
    if who not in ROLES:
        return ("*",)
    ours = [action for file, role in ROLES[who] for action in _role_actions(file, role)]
    assigned = re.findall(
        rf"principalId: {PRINCIPALS[who]}\b[^}}]*?builtIn\.(\w+)", (MODULES / "roles.bicep").read_text()
    )
    return (*ours, *(action for role in assigned for action in BUILT_IN[role]))


def _role_actions(file: str, role: str) -> list[str]:
    text = (MODULES / file).read_text().partition(f"resource {role} ")[2]
    found = _ACTIONS.search(text)
    assert found, f"{file} has no role {role}"
    return re.findall(r"^ +'([^']+)'$", found[1], re.M)


def _matches(action: str, pattern: str) -> bool:
    """``a/*/read`` grants ``a/read`` too: of the operations that «Managed Identity Operator» names so, Azure has only
    ``userAssignedIdentities/read`` and ``userAssignedIdentities/assign/action``."""
    forms = (pattern, pattern.replace("/*/", "/"))
    return any(fnmatchcase(action.lower(), form.lower()) for form in forms)
