"""How the service words its refusals of computes, and in what it wraps them. Each says where it was seen."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

from harness.azure.emulator.answers import Refusal
from harness.azure.emulator.state import LOCATION, Cloud, Compute, Size, quota_of, total_quota_of

NESTINGS = ("flat", "details", "text", "innererror", "info")
"""Where the code of a refusal lies: at the top, or below a sentence that says nothing."""
GENERAL = "The request is invalid."
HELP = (
    "Talk to your Subscription Admin or refer to https://docs.microsoft.com/azure/machine-learning/how-to-manage-quotas"
    "#request-quota-increases to increase the"
)


def wrapped(code: str, message: str, nesting: str = "flat") -> dict[str, Any]:
    """An error as the service's front end writes it: ARM's fields, and its own in ``additionalInfo``
    (azure-sdk-for-python and report of 2026-08-15: ComponentName managementfrontend, InnerError)."""
    inner: dict[str, Any] = {"code": code, "message": message}
    info: list[dict[str, Any]] = [
        {"type": "ComponentName", "info": {"value": "managementfrontend"}},
        {"type": "Environment", "info": {"value": LOCATION}},
    ]
    made: dict[str, Any] = {"code": "BadRequest", "message": GENERAL, "target": None, "details": []}
    if nesting == "flat":
        made |= inner
    elif nesting == "details":  # ARM's own way (theonemule/fahclient-azure-vm, issue 3)
        made["details"] = [{**inner, "target": None, "details": []}]
    elif nesting == "text":  # microsoft/az-deep-batch-score, issue 4; JSON in a text: microsoft/openshift-origin, 42
        listed = f"RequestId: \nError code: '{code}'. Target: ''. Message: '{message}'"
        made["details"] = [{"code": GENERAL, "message": listed if "'" not in message else json.dumps({"error": inner})}]
    elif nesting == "innererror":
        made["innererror"] = {"code": "BadArgument", "innererror": inner}
    else:
        made["code"] = "UserError"
        info.append({"type": "InnerError", "info": {"value": {"code": "BadArgument", "innerError": inner}}})
    return {**made, "additionalInfo": info}


class WrappedRefusal(Refusal):
    """A refusal at once, wrapped."""

    def __init__(self, status: int, code: str, message: str, nesting: str) -> None:
        super().__init__(status, code, message)
        self.body = wrapped(code, message, nesting)

    def answer(self) -> JSONResponse:
        return JSONResponse({"error": self.body}, self.status, self.headers)


def refused_later(cloud: Cloud, compute: Compute) -> dict[str, Any] | None:
    """The error with which the creation of this compute ends; None: it succeeds.

    Refusals are told by the operation, after 201, and leave a Failed compute (Azure/mlops-v2, issue 81: «waiting for
    creation»). A minimum of 0 nodes does not help: there must be cores for one (ansible-collections/azure, pull 2209).
    """
    size = cloud.sizes[compute.vm_size]
    if "AmlCompute" not in size.compute_types:
        # A size that is for endpoints alone, though it is listed (report of 2026-08-21 on A10 sizes).
        sizes = ",".join(name.upper() for name in cloud.sizes)
        why = (
            f"The specified value {compute.vm_size} for property Cluster.Properties.VMSize is not a supported VM size. "
            f"Supported VM sizes: {sizes}"
        )
        return wrapped("InvalidPropertyValue", why, "text")
    low = compute.tier == "low_priority"
    nodes = max(1, compute.min_nodes)
    cores = nodes * size.vcpus
    if not low and (limit := quota_of(cloud, size.family, "dedicated")) < cores:
        return wrapped("ClusterMinNodesExceedCoreQuota", _too_few(f"{_spoken(size)} family", limit, nodes, cores))
    if (limit := total_quota_of(cloud, compute.tier)) < cores:
        # For low priority, too: reports of 2026 on subscriptions without any; others saw it created all the same.
        code = "ClusterMinNodesExceedCoreQuota" if low else "BadRequest"
        return wrapped(code, _too_few("total", limit, nodes, cores))
    return None


def refused_for_good(size: Size, compute: Compute) -> list[dict[str, Any]]:
    """What ``errors`` of a compute hold that is created as Succeeded and never gets a node (report of 2026-08-26: H100
    on the low-priority tier, though ``lowPriorityCapable`` is true; other sizes, where it is false)."""
    if compute.tier != "low_priority" or (size.low_priority_capable and "H100" not in compute.vm_size):
        return []
    why = (
        f"The VM size {compute.vm_size.upper()} is not allowed for LowPriority. Please convert to Dedicated or use a "
        "different VM size."
    )
    return [{"error": wrapped("UnsupportedVMSizeForLowPriority", why)}]


def _too_few(of: str, limit: int, nodes: int, cores: int) -> str:
    if nodes > 1:
        less = f"is less than the requested compute training cluster's min nodes of {nodes} which maps to {cores} vCPUs"
    else:  # in the service's own spelling
        less = f"cannot accomodate for at least 1 requested managed compute nodes which maps to {cores} vCPUs"
    return f"The specified subscription has a {of} vCPU quota of {limit} and {less}. {HELP} {of} quota"


def _spoken(size: Size) -> str:
    return f"Standard {size.family.removeprefix('standard').removeprefix('Standard').removesuffix('Family').strip()}"
