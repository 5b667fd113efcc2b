"""The rules of buying: the fallback chain, the arithmetic of quotas, and the meaning of a refusal. Pure.

A listed size may be unavailable, a sufficient quota may not be met, and a compute that was made may not get its nodes:
so each of them is a step of its own, and a refusal says at which step, with which code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TIERS = ("dedicated", "low_priority")

DEFAULT_CHAIN = (
    "Standard_NC6s_v3",  # V100; retired, and still listed in places
    "Standard_NC24ads_A100_v4",
    "Standard_NC40ads_H100_v5",
    "Standard_NV36ads_A10_v5",
    "Standard_NC4as_T4_v3",
    "Standard_NC8as_T4_v3",
)
"""One GPU per node each, the strongest equivalents first."""

Verdict = Literal["next", "wait", "fatal"]
"""Meaning of a refusal: try the next choice; the same again in a moment; or no choice will do better."""

IN_USE_SECONDS, SCARCE_SECONDS, NO_QUOTA_SECONDS = 300.0, 900.0, 3600.0
"""Seconds until a new request makes sense: cores are in use now; the region has none; a person has to raise a quota."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkuChoice:
    """One kind of node."""

    sku: str
    tier: str

    def __str__(self) -> str:
        return self.sku if self.tier == "dedicated" else f"{self.sku} (low priority)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A size that the region lists."""

    sku: str
    family: str
    vcpus: int
    gpus: int
    low_priority_capable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Cores of one family, or of a whole tier. ``limit`` below 0: none is set."""

    name: str
    used: int
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SkuRefusal:
    """A refusal of one choice, with the service's code and its verdict."""

    code: str
    message: str
    verdict: Verdict
    retry_seconds: float = SCARCE_SECONDS
    """Seconds after which a new request is worth it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One step down the chain, for the log, the metadata and the run directory."""

    sku: str
    tier: str
    code: str
    """The service's code, or ``Succeeded``."""
    message: str
    decision: Literal["created", "reused", "next", "wait", "fatal"]
    at: float
    """Unix seconds."""
    node_count: int
    compute: str = ""

    def __str__(self) -> str:
        kind = self.sku if self.tier == "dedicated" else f"{self.sku} (low priority)"
        return f"{self.node_count} x {kind}: {self.decision}: {self.code}" + (
            f", {self.message}" if self.message else ""
        )


def chain(
    wanted: str, order: Sequence[str], tiers: Sequence[str], excluded: Collection[SkuChoice] = ()
) -> list[SkuChoice]:
    """Return the choices to try, in order: the wanted size first, then the others; all in the first tier, then all in
    the second."""
    entries = list(dict.fromkeys([wanted, *order]))
    found = []
    for position, tier in enumerate(tiers):
        for entry in entries:
            sku, _, own = entry.partition("@")
            if own and position == 0:
                found.append(SkuChoice(sku=sku, tier=own))
            elif not own:
                found.append(SkuChoice(sku=sku, tier=tier))
    return [choice for choice in dict.fromkeys(found) if choice not in excluded]


def examine(
    choice: SkuChoice,
    sizes: Mapping[str, Size],
    quotas: Sequence[Quota],
    node_count: int,
    nodes_there: int,
    processes_per_node: int,
) -> SkuRefusal | None:
    """Return why this choice is not worth a request; None if it is. ``nodes_there``: nodes of it that we have already,
    whose cores count as used."""
    size = sizes.get(choice.sku.casefold())
    if size is None:
        message = f"{choice.sku} is not among the {len(sizes)} sizes of the region"
        return SkuRefusal(code="SkuNotListed", message=message, verdict="next", retry_seconds=NO_QUOTA_SECONDS)
    if choice.tier == "low_priority" and not size.low_priority_capable:
        message = f"{choice.sku} is not offered on the low-priority tier"
        return SkuRefusal(code="NoLowPriority", message=message, verdict="next", retry_seconds=NO_QUOTA_SECONDS)
    if 0 < size.gpus < processes_per_node:
        message = f"{choice.sku} has {size.gpus} GPUs, and {processes_per_node} processes are to run on each node"
        return SkuRefusal(code="TooFewGpus", message=message, verdict="next", retry_seconds=NO_QUOTA_SECONDS)
    for quota in quotas_of(choice, size, quotas):
        if quota.limit < 0:
            continue
        needed, free = node_count * size.vcpus, quota.limit - quota.used + nodes_there * size.vcpus
        if needed > quota.limit:
            message = f"{node_count} nodes need {needed} cores, and the quota {quota.name} is {quota.limit}"
            return SkuRefusal(code="QuotaTooSmall", message=message, verdict="next", retry_seconds=NO_QUOTA_SECONDS)
        if needed > free:
            message = (
                f"{node_count} nodes need {needed} cores, and of the quota {quota.name} ({quota.limit}) {free} are free"
            )
            return SkuRefusal(code="QuotaInUse", message=message, verdict="next", retry_seconds=IN_USE_SECONDS)
    return None


def quotas_of(choice: SkuChoice, size: Size, quotas: Sequence[Quota]) -> list[Quota]:
    """Return the quotas that count: of the family and of all families (dedicated), or of the tier (low priority).

    Names of families are irregular (``standardNCSv3Family``, ``Standard NCASv3_T4 Family``), so only letters and digits
    are compared. A family that is not listed has no known quota: the service decides.
    """
    if choice.tier == "low_priority":
        return [quota for quota in quotas if "lowpriority" in _plain(quota.name)]
    own = {_plain(size.family), _plain("TotalDedicatedCores"), _plain("Total Cluster Dedicated Regional vCPUs")}
    return [quota for quota in quotas if _plain(quota.name) in own]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


_NEXT = {
    # code, in small letters: when to ask again
    "skunotavailable": SCARCE_SECONDS,
    "vmsizenotsupported": NO_QUOTA_SECONDS,
    "vmsizenotavailable": SCARCE_SECONDS,
    "notavailableforsubscription": NO_QUOTA_SECONDS,
    "skuretired": NO_QUOTA_SECONDS,
    "allocationfailed": SCARCE_SECONDS,
    "zonalallocationfailed": SCARCE_SECONDS,
    "overconstrainedallocationrequest": SCARCE_SECONDS,
    "outofcapacity": SCARCE_SECONDS,
    "insufficientcapacity": SCARCE_SECONDS,
    "clusteroutofcapacity": SCARCE_SECONDS,
    "quotaexceeded": NO_QUOTA_SECONDS,
    "corequotaexceeded": NO_QUOTA_SECONDS,
    "clustercorequotareached": IN_USE_SECONDS,
    "clusterminnodesexceedcorequota": NO_QUOTA_SECONDS,
    "jobnodecountexceedscorequota": NO_QUOTA_SECONDS,
    "operationnotallowed": NO_QUOTA_SECONDS,  # what Compute says when cores do not suffice
    "lowprioritynotsupported": NO_QUOTA_SECONDS,
    "requestdisallowedbypolicy": NO_QUOTA_SECONDS,  # often a policy on sizes
    "operationtimedout": SCARCE_SECONDS,
}
_WAIT = {"toomanyrequests", "conflict", "operationpreempted", "serverbusy", "serviceunavailable", "internalservererror",
         "gatewaytimeout", "badgateway", "timeout", "requesttimeout"}  # fmt: skip
_SCARCE_WORDS = re.compile(
    r"(?i)\b(v?cpu quota|core quota|quota (of|is) 0|exceed\w* (the )?\w* ?quota|not (currently )?available in|"
    r"not supported in|is not offered|no capacity|not enough capacity|insufficient capacity|out of capacity|"
    r"has been retired|is retired)"
)


def classify(code: str, message: str, status: int | None) -> SkuRefusal:
    """Return the meaning of a refusal of a compute, from the service's code, its words, and the HTTP status.

    Known codes first; then the words, because quotas are refused as a plain ``BadRequest`` too; then the status: what
    is forbidden or malformed will be so for every size, but a conflict or a failed creation may not.
    """
    known = _plain(code)
    if known in _NEXT:
        return SkuRefusal(code=code, message=message, verdict="next", retry_seconds=_NEXT[known])
    if known in _WAIT or (status is not None and (status in (408, 429) or status >= 500)):
        return SkuRefusal(code=code, message=message, verdict="wait", retry_seconds=60.0)
    if _SCARCE_WORDS.search(message):
        by_quota = "quota" in message.casefold()
        after = NO_QUOTA_SECONDS if by_quota else SCARCE_SECONDS
        return SkuRefusal(code=code, message=message, verdict="next", retry_seconds=after)
    if status is not None and 400 <= status < 500 and status != 409:
        return SkuRefusal(code=code, message=message, verdict="fatal")
    return SkuRefusal(code=code, message=message, verdict="next")


def compute_name(cluster_name: str, choice: SkuChoice) -> str:
    """Return the name of the compute for one kind of node: ``dtrain-nc24adsa100v4``, with ``-lp`` for low priority. 3
    to 24 small letters, digits and hyphens, a letter first and no number after the last hyphen: the service's rule."""
    short = re.sub(r"[^a-z0-9]", "", choice.sku.casefold().removeprefix("standard_"))
    tail = "-lp" if choice.tier == "low_priority" else ""
    room = 24 - len(cluster_name) - 1 - len(tail)
    if len(short) > room:
        short = short[: room - 4] + hashlib.sha256(choice.sku.encode()).hexdigest()[:4]
    return f"{cluster_name}-{short}{tail}".lower()


def retry_at(refusals: Sequence[SkuRefusal], now: float) -> float:
    """Return the earliest time at which a new request for the whole chain makes sense, in Unix seconds."""
    return now + min((refusal.retry_seconds for refusal in refusals), default=SCARCE_SECONDS)


def value_of(thing: Any, *names: str) -> Any:
    """Return the first of these attributes that is set. The service's client keeps the values of some of its own types
    in attributes of the REST names (``vCPUs``), beside attributes of the documented names that stay None."""
    for name in names:
        found = getattr(thing, name, None)
        if found is not None:
            return found
    return None


def vm_size_of(listed: Any) -> Size:
    """Return a size from the service's client's list."""
    return Size(
        sku=listed.name,
        family=str(value_of(listed, "family") or ""),
        vcpus=int(value_of(listed, "vCPUs", "v_cp_us") or 0),
        gpus=int(value_of(listed, "gpus") or 0),
        low_priority_capable=bool(value_of(listed, "lowPriorityCapable", "low_priority_capable")),
    )


def quota_of(listed: Any) -> Quota | None:
    """Return a usage from the service's client's list; None for one that counts no cores."""
    name = value_of(listed, "name")
    value = name.get("value") if isinstance(name, Mapping) else value_of(name, "value")
    limit = value_of(listed, "limit")
    if not value or limit is None:
        return None
    return Quota(name=str(value), used=int(value_of(listed, "currentValue", "current_value") or 0), limit=int(limit))
