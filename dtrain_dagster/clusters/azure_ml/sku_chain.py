"""The rules of buying: which sizes are tried in which order, what keeps a size from training here, and the arithmetic
of quotas. Pure. What a refusal means is in `refusals`.

A listed size may be unavailable, a sufficient quota may not be met, and a compute that was made may not get its nodes:
so each of them is a step of its own, and a refusal says at which step, with which code.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Literal

from dtrain_dagster.clusters.base import NoCapacityError
from dtrain_dagster.costs.prices import PriceError, SkuPrice, hardware_of, price_of
from dtrain_dagster.settings.cluster_kinds import SPOT_QUOTA, current_tier, tier_in_words, tier_of
from dtrain_dagster.settings.environment import BUYABLE_GPU_TYPE

DEFAULT_CHAIN = ("Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5", "Standard_NC4as_T4_v3", "Standard_NC8as_T4_v3")
"""One GPU per node each, the equivalents of a V100 first. No V100, whose sizes are retired; no A10, whose sizes only
endpoints can have."""

DEFAULT_CHAINS = {
    1: DEFAULT_CHAIN,
    2: ("Standard_NC48ads_A100_v4", "Standard_NC80adis_H100_v5"),
    4: ("Standard_NC96ads_A100_v4", "Standard_NC64as_T4_v3"),
    8: ("Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5", "Standard_ND96asr_v4"),
}
"""The same, by the number of GPUs per node: a training keeps its ranks when it falls back to another size."""

AML_COMPUTE = "AmlCompute"
"""The service's word for the computes that we make, among those that a size is for."""

Verdict = Literal["next", "wait", "fatal"]
"""Meaning of a refusal: try the next choice; the same again in a moment; or no choice will do better."""

IN_USE_SECONDS, SCARCE_SECONDS, NO_QUOTA_SECONDS = 300.0, 900.0, 3600.0
"""Seconds until a new request makes sense: cores are in use now; the region has none; a person has to raise a quota."""


INTERFACES = "eth"
"""Prefix of the interfaces over which nodes of Azure reach each other; without it NCCL would prefer ``ib0``, which need
not have an address in a container."""
_SHARED = re.compile(r"(?i)standard_nv(6|12|18)ads_a10_v5|.*mig.*|standard_nv\d+as_v4|standard_nv(4|8|12)ads_v710_v5")
"""Sizes with a part of a GPU: vGPUs of an A10, MIG instances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkuChoice:
    """One kind of node."""

    sku: str
    tier: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "tier", current_tier(self.tier))  # run directories have the old name of Spot

    def __str__(self) -> str:
        return self.sku if self.tier == "dedicated" else f"{self.sku} ({tier_in_words(self.tier)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A size that the region lists."""

    sku: str
    family: str
    vcpus: int
    gpus: int
    low_priority_capable: bool
    compute_types: tuple[str, ...] = ()
    """Kinds of computes that can have it, in the service's words; empty where it does not say."""

    @property
    def is_for_clusters(self) -> bool:
        """Return whether a compute of ours can have this size, as far as the service says."""
        kinds = {fold_name(kind) for kind in self.compute_types}
        return not kinds or fold_name(AML_COMPUTE) in kinds

    @classmethod
    def read(cls, listed: Mapping[str, Any]) -> Size:
        """Return a size as the service lists it."""
        return cls(
            sku=str(listed["name"]),
            family=str(listed.get("family") or ""),
            vcpus=int(listed.get("vCPUs") or 0),
            gpus=int(listed.get("gpus") or 0),
            low_priority_capable=bool(listed.get("lowPriorityCapable")),
            compute_types=tuple(listed.get("supportedComputeTypes") or ()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Cores of one family, or of a whole tier. ``limit`` below 0: none is set."""

    name: str
    used: int
    limit: int
    kind: str = ""
    """The service's type of it: the same family is listed twice, with its dedicated and its Spot cores, under one name,
    and only the type tells them apart. "" where it is not known."""

    @property
    def is_spot(self) -> bool:
        """Return whether it counts the cores of Spot nodes, by either of their names: Azure ML says ``low-priority
        cores``, virtual machines have ``lowPriorityCores`` or ``Total Regional Spot vCPUs``."""
        words = fold_name(self.kind) + fold_name(self.name)
        return "lowpriority" in words or "spot" in words

    @classmethod
    def read(cls, listed: Mapping[str, Any]) -> Quota | None:
        """Return a usage as the service lists it; None for one that counts no cores."""
        name, limit = (listed.get("name") or {}).get("value"), listed.get("limit")
        if not name or limit is None:
            return None
        used, kind = int(listed.get("currentValue") or 0), str(listed.get("type") or "")
        return cls(name=str(name), used=used, limit=int(limit), kind=kind)


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
        kind = SkuChoice(sku=self.sku, tier=self.tier)
        return f"{self.node_count} x {kind}: {self.decision}: {self.code}" + (
            f", {self.message}" if self.message else ""
        )


def chain(
    wanted: str, order: Sequence[str], tiers: Sequence[str], excluded: Collection[SkuChoice] = ()
) -> list[SkuChoice]:
    """Return the choices to try, in order: the wanted size first, then the others; all in the first tier, then all in
    the second."""
    skus = dict.fromkeys([wanted, *order])
    choices = [SkuChoice(sku=sku, tier=tier) for tier in tiers for sku in skus]
    return [choice for choice in dict.fromkeys(choices) if choice not in excluded]


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
        return skip_choice("SkuNotListed", f"{choice.sku} is not among the {len(sizes)} sizes of the region")
    if not size.is_for_clusters:
        kinds = ", ".join(size.compute_types)
        return skip_choice("NotForClusters", f"{choice.sku} is offered to {kinds} only, not to computes for training")
    if choice.tier == "spot" and not size.low_priority_capable:
        return skip_choice("NoLowPriority", f"{choice.sku} is not offered as Spot nodes (lowPriorityCapable is false)")
    if 0 < size.gpus < processes_per_node:
        words = f"{choice.sku} has {size.gpus} GPUs, but {processes_per_node} processes are to run on each node"
        return skip_choice("TooFewGpus", words)
    needed = node_count * size.vcpus
    limited, words = (
        [quota for quota in quotas_of(choice, size, quotas) if quota.limit >= 0],
        f"{node_count} nodes need",
    )
    # What a person has to raise is told before what passes by itself, and decides when to ask again.
    for quota in limited:
        if needed > quota.limit:
            words += f" {needed} cores, and the quota {quota.name} is {quota.limit}"
            return skip_choice("QuotaTooSmall", words)
    for quota in limited:
        free = quota.limit - quota.used + nodes_there * size.vcpus
        if needed > free:
            words += f" {needed} cores, and of the quota {quota.name} ({quota.limit}) {free} are free"
            return skip_choice("QuotaInUse", words, IN_USE_SECONDS)
    return None


def skip_choice(code: str, message: str, retry_seconds: float = NO_QUOTA_SECONDS) -> SkuRefusal:
    """Return the refusal of a choice for which the service is not asked."""
    return SkuRefusal(code=code, message=message, verdict="next", retry_seconds=retry_seconds)


_TOTALS = {
    *("totaldedicatedcores", "totalclusterdedicatedregionalvcpus", "totallowprioritycores"),
    *("totalclusterlowpriorityregionalvcpus", "lowprioritycores", "totalregionalspotvcpus"),
}


def quotas_of(choice: SkuChoice, size: Size, quotas: Sequence[Quota]) -> list[Quota]:
    """Return the quotas that count: of the family and of all families, on the tier of the choice.

    Names of families are irregular (``standardNCSv3Family``, ``Standard NCASv3_T4 Family``), so only letters and digits
    are compared. A family that is not listed has no known quota: the service decides.
    """
    own = {fold_name(size.family), *_TOTALS}
    spot = choice.tier == "spot"
    return [quota for quota in quotas if fold_name(quota.name) in own and quota.is_spot == spot]


def fold_name(name: str) -> str:
    """Return the letters and digits of a name, in small letters: the service spells one name in several ways."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def compute_name(cluster_name: str, choice: SkuChoice) -> str:
    """Return the name of the compute for one kind of node: ``dtrain-nc24adsa100v4``, with ``-lp`` for Spot, as such
    computes have always been called. 3 to 24 small letters, digits and hyphens, a letter first and no number after the
    last hyphen: the service's rule."""
    short = re.sub(r"[^a-z0-9]", "", choice.sku.casefold().removeprefix("standard_"))
    tail = "-lp" if choice.tier == "spot" else ""
    room = 24 - len(cluster_name) - 1 - len(tail)
    if len(short) > room:
        short = short[: room - 4] + hashlib.sha256(choice.sku.encode()).hexdigest()[:4]
    return f"{cluster_name}-{short}{tail}".lower()


def retry_at(refusals: Sequence[SkuRefusal], now: float) -> float:
    """Return the earliest time at which a new request for the whole chain makes sense, in Unix seconds."""
    return now + min((refusal.retry_seconds for refusal in refusals), default=SCARCE_SECONDS)


def no_capacity(node_count: int, attempts: Sequence[Attempt], refusals: Sequence[SkuRefusal]) -> NoCapacityError:
    """Return the refusal of the whole chain, in words, with all attempts."""
    lines = "\n".join(f"  {attempt}" for attempt in attempts)
    return NoCapacityError(
        f"no capacity for {node_count} nodes, after {len(attempts)} attempts:\n{lines}\nRaise a quota, add sizes to "
        f"the chain or Spot to the tiers (its quota: {SPOT_QUOTA}), or wait",
        attempts=tuple(asdict(attempt) for attempt in attempts),
        retry_at=retry_at(refusals, time.time()),
    )


def default_chain(ranks: int, tiers: Sequence[str]) -> tuple[str, ...]:
    """Return the sizes to try where none are set: those with a GPU for each rank of a node that have a known price in
    the region (``DTRAIN_REGION``) on each of these tiers. What has no price is not bought."""

    def has_price(sku: str) -> bool:
        try:
            return all(price_of(sku).figure(tier_of(tier)) for tier in tiers)
        except PriceError:
            return False

    return tuple(filter(has_price, DEFAULT_CHAINS.get(ranks, DEFAULT_CHAIN)))


def _known(sku: str) -> SkuPrice | None:
    """Return the price table's entry of a size, None for one that it does not have."""
    try:
        return hardware_of(sku)
    except PriceError:
        return None


def node_environment_of(sku: str) -> dict[str, str]:
    """Return the variables that NCCL needs on nodes of this size: over InfiniBand where it has it, else over Ethernet
    without a search for it. Nothing for one that the price table does not know: NCCL finds its own way there."""
    known = _known(sku)
    if known is None:
        return {}
    return {"NCCL_IB_DISABLE": "0" if known.infiniband else "1", "NCCL_SOCKET_IFNAME": INTERFACES}


def spell_sku(name: str) -> str:
    """Return a size as the price table spells it: the service answers ``STANDARD_NC6S_V3``. Unknown ones stay as they
    are."""
    known = _known(name)
    return name if known is None else known.sku


def explain_shared_gpu(sku: str, ranks: int) -> str:
    """Return why this size cannot train with that many ranks, "" if it can: NCCL sums between whole GPUs only."""
    if ranks < 2 or not _SHARED.fullmatch(sku):
        return ""
    return (
        f"{sku} has a part of a GPU (a vGPU or a MIG instance), which NCCL cannot connect, but {ranks} ranks are to "
        "train together: take a size with whole GPUs"
    )


def explain_retired(sku: str, today: date) -> str:
    """Return a sentence on a size that Azure has retired, with one to take instead; "" for any other."""
    known = _known(sku)
    retired_on = None if known is None else known.retired_on
    if retired_on is None or date.fromisoformat(retired_on) > today:
        return ""
    return (
        f"Azure retired {sku} on {retired_on}, so it can hardly be bought, even where it is listed: set "
        f"DTRAIN_GPU_TYPE={BUYABLE_GPU_TYPE}, or another of `dtrain cost`"
    )
