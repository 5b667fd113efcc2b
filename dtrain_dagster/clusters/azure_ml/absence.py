"""What a 404 says, and when a job that the service does not know is gone. Pure.

The resource manager answers 404 for what exists, for a while: its regions are consistent late (Azure's support in
hashicorp/terraform-provider-azurerm#18268; #32535 has it of things made long before). So one answer decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.refusals import error_parts
from dtrain_dagster.clusters.azure_ml.sku_chain import fold_name

Answer = Literal["found", "own", "scope"]
"""What came of a look: the thing itself; its own 404; a 404 of what it lies in."""
Scope = Literal["subscription", "resource group", "workspace"]
SETTINGS: Mapping[Scope, str] = {
    "subscription": "DTRAIN_AZURE_SUBSCRIPTION_ID",
    "resource group": "DTRAIN_AZURE_RESOURCE_GROUP",
    "workspace": "DTRAIN_AZURE_WORKSPACE",
}
_SCOPES: Mapping[str, Scope] = {
    "subscriptionnotfound": "subscription",
    "invalidsubscriptionid": "subscription",
    "resourcegroupnotfound": "resource group",
    "workspacenotfound": "workspace",
}
"""Codes, folded, that say by themselves what is missing."""
_QUOTED = re.compile(r"['\"‘“]([^'\"’”]+)['\"’”]")
COUNTED_LOOKS, KEPT_LOOKS = 3, 8
"""Looks that it takes until a job that the service does not know is gone; and those that are noted at most."""
CANCEL_TAKEN, CANCEL_NOT_FOUND = "taken", "not found"
"""What becomes of the cancellation of a job that seems to be gone; else it is refused, in the service's words."""


def find_missing_scope(error: Any, workspace: str) -> Scope | None:
    """Return which of subscription, resource group and workspace is not there, by the body of a 404; None where the
    answer is about something within the workspace. The code of a parent or of any resource tells only with its name."""
    for part in error_parts(error):
        code = fold_name(part.code)
        if code in _SCOPES:
            return _SCOPES[code]
        if code in ("parentresourcenotfound", "resourcenotfound", "notfound"):
            quoted, own = [name.rstrip("/").casefold() for name in _QUOTED.findall(part.message)], workspace.casefold()
            if any(name.endswith(f"/workspaces/{own}") for name in quoted):
                return "workspace"
            if code == "parentresourcenotfound" and own in quoted:
                return "workspace"
    return None


def names_resource(error: Any, name: str) -> bool:
    """Return whether the body of a 404 names this job or compute, in a message or as the target of one of its
    errors."""
    word = re.compile(rf"(?i)(?<![\w-]){re.escape(name)}(?![\w-])")
    return any(word.search(text) for part in error_parts(error) for text in (part.message, part.target))


def note_look(
    misses: Sequence[float], answer: Answer, now: float, asked_at: float, options: AzureMLOptions
) -> tuple[float, ...]:
    """Return the times of the looks that count against a job, after one more. Times are Unix seconds; ``asked_at``:
    when the job was asked for. A look that finds it, or that finds not even its workspace, takes all back. None counts
    right after the job was asked for; and several orchestrators in a second are one look."""
    if answer != "own":
        return ()
    gap = options.missing_seconds / (2 * (COUNTED_LOOKS - 1))
    if now - asked_at < options.start_seconds or (misses and now - misses[-1] < gap):
        return tuple(misses)
    return (*misses[:1], *misses[1:][-(KEPT_LOOKS - 2) :], now)


def is_absent(misses: Sequence[float], options: AzureMLOptions) -> bool:
    """Return whether the service has not known a job for long enough, at enough looks."""
    return len(misses) >= COUNTED_LOOKS and misses[-1] - misses[0] >= options.missing_seconds
