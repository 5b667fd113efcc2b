"""The purchase of nodes: down the fallback chain, with checks before buying, no leftovers, and every step on record.

The service's view of a compute decides, not what a request returned: an answer may be lost, another process may use the
same compute, and a refusal may come only after the compute exists, which is then deleted.
"""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from dtrain_dagster.clusters.azure_ml.client import (
    ROLE_REMEDY,
    NotFound,
    Service,
    ServiceError,
    ServiceRefused,
    ServiceUnreachable,
    request_note,
)
from dtrain_dagster.clusters.azure_ml.refusals import classify_refusal, read_late_refusal
from dtrain_dagster.clusters.azure_ml.sku_chain import (
    AML_COMPUTE,
    Attempt,
    Quota,
    Size,
    SkuChoice,
    SkuRefusal,
    chain,
    compute_name,
    examine,
    explain_retired,
    explain_shared_gpu,
    fold_name,
    no_capacity,
    skip_choice,
)
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.submission import Request, yaml_text
from dtrain_dagster.costs.prices import region_of
from dtrain_dagster.settings.azure import AzureMLOptions
from dtrain_dagster.settings.cluster_kinds import OLD_SPOT
from dtrain_dagster.support.audit import AuditLog, noted_request_id
from dtrain_dagster.support.secrets import redact

if TYPE_CHECKING:
    from azure.ai.ml.entities import AmlCompute
    from azure.ai.ml.operations import ComputeOperations

TAG, CLUSTER_TAG = "dtrain", "dtrain_cluster"
MOVING = {"Creating", "Updating", "Deleting"}
BROKEN = {"Failed", "Canceled"}
NODES_THERE = {"idle", "running", "preparing"}
LOOK_SECONDS = 1.0
TIMED_OUT = "OperationTimedOut"
WAITS = 3
"""Requests for a choice with the verdict ``wait``, the first included, before the next choice is tried."""
_DURATION = TypeAdapter(timedelta)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A compute, as the service shows it."""

    name: str
    state: str
    size: str
    tier: str
    min_nodes: int
    max_nodes: int
    idle_seconds: float | None
    has_public_ip: bool
    tags: Mapping[str, str]
    errors: tuple[Any, ...]
    """Of its nodes and of its making."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioned:
    """The nodes that were bought, and the attempts."""

    compute: str
    sku: str
    tier: str
    node_count: int
    max_nodes: int
    attempts: tuple[Attempt, ...]


class Provisioner:
    """The maker of computes, which also changes and deletes them. Only those of one cluster, which its tag marks."""

    def __init__(self, service: Service, audit: AuditLog) -> None:
        self.service, self.options, self.audit = service, service.options, audit

    @property
    def _api(self) -> ComputeOperations:
        return self.service.ml.compute

    def provision(self, node_count: int, wanted: str, excluded: Collection[SkuChoice] = ()) -> Provisioned:
        """Return a compute that may grow to ``node_count`` nodes, of the wanted size or the next available one.

        Raise `NoCapacityError`, with all attempts, where none is; `ClusterError` for a refusal that no other size
        changes.
        """
        computes = self.computes()
        for name in [name for name, compute in computes.items() if compute.state in BROKEN]:
            _log.warning("deleting %s, which an earlier attempt has left Failed", name)
            self.delete(name)
            del computes[name]
        attempts, refusals = list[Attempt](), list[SkuRefusal]()
        if retired := explain_retired(wanted, datetime.now(UTC).date()):
            _log.warning("%s", retired)

        def note(choice: SkuChoice, decision: Any, code: str, message: str = "") -> None:
            attempt = Attempt(
                sku=choice.sku,
                tier=choice.tier,
                code=code,
                message=redact(message),
                decision=decision,
                at=time.time(),
                node_count=node_count,
                compute=compute_name(self.options.cluster_name, choice),
            )
            attempts.append(attempt)
            _log.log(logging.INFO if decision in ("created", "reused") else logging.WARNING, "%s", attempt)

        for choice, there, skipped in self.choices(node_count, wanted, computes, excluded):
            outcome = skipped or self._get(choice, there, node_count, note)
            if isinstance(outcome, int):
                return self._provisioned(choice, node_count, outcome, attempts)
            retired = explain_retired(choice.sku, datetime.now(UTC).date())
            note(choice, outcome.verdict, outcome.code, ". ".join(filter(None, (outcome.message, retired))))
            if outcome.verdict == "fatal":
                remedy = f". {ROLE_REMEDY}" if outcome.code == "AuthorizationFailed" else ""
                why = f"{outcome.code}): {outcome.message}{remedy}"
                raise ClusterError(f"{choice} was refused for a reason that another size would not change ({why}")
            refusals.append(outcome)
        raise no_capacity(node_count, attempts, refusals)

    def preview(self, node_count: int, wanted: str) -> tuple[Provisioned, Request]:
        """Return the nodes that `provision` would ask for first, and their compute. Raise as it does where none can be
        asked for."""
        refusals = []
        computes = {name: it for name, it in self.computes().items() if it.state not in BROKEN}
        for choice, there, refusal in self.choices(node_count, wanted, computes):
            if refusal is not None:
                refusals.append(refusal)
                continue
            is_used = there is not None and self.fits(there, choice, node_count)
            done = "is there already, and is used as it is" if is_used else "is made, or changed to this"
            title = f"the compute, which {done}; if it is refused, the next size of the chain is asked for"
            got = self._provisioned(choice, node_count, _most(there, node_count), ())
            text = entity_text(describe_compute(self.options, choice, got.compute, got.max_nodes))
            return got, Request(title=title, form="yaml", text=text)
        raise no_capacity(node_count, [], refusals)

    def _provisioned(self, choice: SkuChoice, node_count: int, most: int, attempts: Sequence[Attempt]) -> Provisioned:
        return Provisioned(
            compute=compute_name(self.options.cluster_name, choice), sku=choice.sku, tier=choice.tier,
            node_count=node_count, max_nodes=most, attempts=tuple(attempts),
        )  # fmt: skip

    def choices(
        self,
        node_count: int,
        wanted: str,
        computes: Mapping[str, Compute],
        excluded: Collection[SkuChoice] = (),
    ) -> Iterator[tuple[SkuChoice, Compute | None, SkuRefusal | None]]:
        """Yield the choices in order, each with the compute that is there, and why it cannot be asked for."""
        options, sizes, quotas = self.options, self.sizes(), self.quotas()
        per_node = options.processes_per_node
        for choice in chain(wanted, options.chain, options.tiers, excluded):
            there = computes.get(compute_name(options.cluster_name, choice))
            nodes = len(self.nodes(there.name)) if there is not None else 0
            refusal = examine(choice, sizes, quotas, node_count, nodes, per_node)
            if refusal is None and (shared := explain_shared_gpu(choice.sku, node_count * per_node)):
                refusal = skip_choice("SharedGpu", shared)
            yield choice, there, refusal

    def _get(self, choice: SkuChoice, there: Compute | None, node_count: int, note: Any) -> int | SkuRefusal:
        """Make or reuse this compute; return the nodes that it may grow to, or the refusal."""
        name = compute_name(self.options.cluster_name, choice)
        if (seen := self.settled(name)) is not None:  # lists lag, by as long as the choices before this one took
            there = seen if seen.tags.get(CLUSTER_TAG) == self.options.cluster_name else None
        turn = 0
        while True:
            if there is not None and self.fits(there, choice, node_count):
                if late := self._late_refusal(there, is_new=False):
                    return late
                note(choice, "reused", "Succeeded")
                return there.max_nodes
            most = _most(there, node_count)
            refusal = self.put(choice, name, most)
            if refusal is None:
                note(choice, "created" if there is None else "reused", "Succeeded")
                return most
            if refusal.verdict != "wait" or turn == WAITS - 1:
                return refusal
            note(choice, "wait", refusal.code, refusal.message)
            time.sleep(min(2.0**turn, self.options.operation_seconds))
            there, turn = self.settled(name), turn + 1

    def fits(self, compute: Compute, choice: SkuChoice, node_count: int) -> bool:
        """Return whether the compute can be used as it is. Raise `ClusterError` where it is open to the internet and
        must not be."""
        if compute.state != "Succeeded":
            return False
        if not self.options.public_ip and compute.has_public_ip:
            raise ClusterError(
                f"compute {compute.name} gives its nodes public addresses, which the settings forbid: delete it "
                f"(`az ml compute delete -n {compute.name}`), and it is made again without them"
            )
        return (
            (compute.size.casefold(), compute.tier) == (choice.sku.casefold(), choice.tier)
            and compute.max_nodes >= node_count
            and compute.min_nodes == 0
            and compute.idle_seconds == self.options.idle_seconds
        )

    def put(self, choice: SkuChoice, name: str, most: int) -> SkuRefusal | None:
        """Make or change a compute (the service takes the whole description either way); return the refusal, if any.
        The leftovers of a refusal are deleted."""
        failure: ServiceError | None = None
        before = self.settled(name)
        is_new = before is None and name not in self.computes()  # a 404 alone may be wrong
        if before is not None and CLUSTER_TAG not in before.tags:
            message = f"compute {name} is somebody else's: give this cluster another name (DTRAIN_CLUSTER_NAME)"
            return skip_choice("NameTaken", message)
        try:
            with self.audit.operation("compute.put", name, sku=choice.sku, tier=choice.tier, max_nodes=most):
                body = describe_compute(self.options, choice, name, most)
                self._run(f"make compute {name}", lambda: self._api.begin_create_or_update(body))
        except ServiceError as error:
            failure = error
        timed_out = failure is not None and failure.code == TIMED_OUT
        compute = self.settled(name, 0.0 if timed_out else None)
        if compute is None and (failure is None or isinstance(failure, NotFound)):
            failure, compute = None, self._await_made(name)
        elif compute is None and is_new and failure is not None and (failure.status or 400) < 400:
            compute = self._await_made(name)  # begun and then refused, so it exists: the 404 is wrong
        state = compute.state if compute is not None else ""
        if compute is not None and state == "Succeeded" and compute.max_nodes == most:
            return self._late_refusal(compute, is_new)  # whatever became of the answer
        shown = compute.errors if compute is not None and state in BROKEN else ()
        # One that hangs while it is changed may have a job at work; one that hangs while it is made has none.
        if compute is not None and TAG in compute.tags and (state in BROKEN or (state in MOVING and is_new)):
            self.delete(name)
        if failure is None:
            code = TIMED_OUT if state else "Gone"
            gone = {"code": code, "message": f"the compute was {state or 'gone'} after it was asked for"}
            return classify_refusal([gone, shown], 200)
        if isinstance(failure, ServiceUnreachable):
            raise failure
        told = failure.body or {"code": failure.code, "message": failure.reason}
        refusal = classify_refusal([told, shown], failure.status)
        return replace(refusal, message=refusal.message + request_note(failure.request_id))

    def _await_made(self, name: str) -> Compute | None:
        """Return a compute that was asked for, as soon as the service knows it; None if it says 404 for too long."""
        deadline = time.monotonic() + self.options.start_seconds
        while (compute := self.settled(name)) is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return compute

    def _run(self, what: str, begin: Any, patience_seconds: float | None = None) -> None:
        """Run a long-running operation to its end. Its state is in the compute; here only errors matter."""
        patience = self.options.operation_seconds if patience_seconds is None else patience_seconds
        poller = self.service.call(what, begin)
        deadline = time.monotonic() + patience

        def wait() -> None:
            poller.wait(max(0.1, deadline - time.monotonic()))
            if not poller.done():
                message = f"{what}: not done after {patience:.0f} s"
                raise ServiceRefused(message, TIMED_OUT, 200, noted_request_id(), "it does not end")

        try:
            with self.service.patience(0.0):
                self.service.call(what, wait)
        except ServiceUnreachable as error:  # of the questions about it, not of the operation
            _log.warning("%s: %s; looking at the compute itself", what, error)

    def settled(self, name: str, patience_seconds: float | None = None) -> Compute | None:
        """Return the compute as soon as nothing changes it any more, or when patience (None: that for operations) is
        over; None where there is none."""
        patience = self.options.operation_seconds if patience_seconds is None else patience_seconds
        deadline = time.monotonic() + patience
        while True:
            try:
                path = f"{self.options.workspace_id}/computes/{name}"
                compute = read_compute(self.service.read(f"look at compute {name}", path))
            except NotFound:
                return None
            if compute.state not in MOVING or time.monotonic() > deadline:
                return compute
            time.sleep(LOOK_SECONDS)

    def delete(self, name: str, patience_seconds: float | None = None) -> None:
        """Delete a compute with its jobs; nothing happens where there is none. Raise `ServiceError` if it still exists
        afterwards, with the code `TIMED_OUT` if that takes longer than the patience for it (None: that for
        operations)."""
        with self.audit.operation("compute.delete", name):
            try:
                self._run(f"delete compute {name}", lambda: self._api.begin_delete(name), patience_seconds)
            except NotFound:
                return
            left = self.settled(name, patience_seconds)
            if left is not None:
                raise ServiceError(
                    f"compute {name} is still there ({left.state}) after it was deleted: look at "
                    f"{self.options.studio_url}, it may cost money",
                    "NotDeleted",
                )

    def computes(self) -> dict[str, Compute]:
        """Return the computes of this cluster, by name."""
        listed = self.service.read_all("list the computes", f"{self.options.workspace_id}/computes")
        own = [item for item in listed if is_own_compute(item, self.options.cluster_name)]
        return {compute.name: compute for compute in map(read_compute, own)}

    def nodes(self, name: str) -> list[tuple[str, str, str | None]]:
        """Return (node, state, job) of each node of a compute; none where there is no such compute."""
        path = f"{self.options.workspace_id}/computes/{name}/listNodes"
        try:
            listed = list(self.service.read_all(f"list the nodes of {name}", path, method="POST"))
        except NotFound:
            return []
        return [(str(node["nodeId"]), str(node.get("nodeState") or "unknown"), node.get("runId")) for node in listed]

    def sizes(self) -> dict[str, Size]:
        """Return the sizes that the region lists, by name in lower case."""
        listed = map(Size.read, self.service.read_all("list the sizes", f"{self._region_id}/vmSizes"))
        return {size.sku.casefold(): size for size in listed}

    def quotas(self) -> list[Quota]:
        """Return the core quotas of the region."""
        listed = map(Quota.read, self.service.read_all("list the quotas", f"{self._region_id}/usages"))
        return [quota for quota in listed if quota is not None]

    def allocation_error(self, name: str) -> str:
        """Return why a compute has not more nodes, as the service says; "" where it says nothing."""
        compute = self.settled(name, 0.0)
        read = [classify_refusal(error, 200) for error in (compute.errors if compute is not None else ())]
        return "; ".join(f"{refusal.code}: {refusal.message}" for refusal in read)

    def _late_refusal(self, compute: Compute, is_new: bool) -> SkuRefusal | None:
        """Return the refusal that a compute shows though it was made; it is deleted then, as it never gets a node."""
        refusal = read_late_refusal(compute.errors, is_new)
        if refusal is not None and not self.nodes(compute.name):
            _log.warning("deleting %s, which never gets a node: %s: %s", compute.name, refusal.code, refusal.message)
            self.delete(compute.name)
        return refusal

    def require_region(self) -> None:
        """Raise `ClusterError` where the workspace, and with it its nodes, is not in the region whose prices count."""
        location, ours = region_of(self._location), region_of()
        if location != ours:
            raise ClusterError(
                f"workspace {self.options.workspace} is in {location}, and prices would be those of "
                f"{ours}: set DTRAIN_REGION={location}"
            )

    @cached_property
    def _location(self) -> str:
        return str(self.service.read("look at the workspace", self.options.workspace_id)["location"])

    @property
    def _region_id(self) -> str:
        provider = "Microsoft.MachineLearningServices"
        return f"/subscriptions/{self.options.subscription_id}/providers/{provider}/locations/{self._location}"


def _most(there: Compute | None, node_count: int) -> int:
    """Return the nodes that a compute may grow to: no fewer than it may already."""
    return max(node_count, there.max_nodes if there is not None else 0)


def describe_compute(options: AzureMLOptions, choice: SkuChoice, name: str, most: int) -> AmlCompute:
    """Return the whole description of a compute with up to ``most`` nodes, as it is asked for and changed."""
    from azure.ai.ml.entities import AmlCompute, IdentityConfiguration, ManagedIdentityConfiguration, NetworkSettings

    network = NetworkSettings(subnet=options.subnet) if options.subnet else None
    if options.identity:
        user = ManagedIdentityConfiguration(client_id=options.identity_client_id, resource_id=options.identity)
        identity = IdentityConfiguration(type="user_assigned", user_assigned_identities=[user])
    else:
        identity = IdentityConfiguration(type="system_assigned")
    return AmlCompute(
        name=name,
        size=choice.sku,
        # The spelling that the client passes on: "LowPriority" would go out as a word that the service does not know.
        tier=OLD_SPOT if choice.tier == "spot" else choice.tier,
        min_instances=0,
        max_instances=most,
        idle_time_before_scale_down=options.idle_seconds,
        ssh_public_access_enabled=False,
        enable_node_public_ip=options.public_ip,
        network_settings=network,
        identity=identity,
        tags={TAG: "1", CLUSTER_TAG: options.cluster_name},
    )


def is_own_compute(listed: Mapping[str, Any], cluster_name: str) -> bool:
    """Return whether a compute, as the service lists it, is one of this cluster. Those of others may be of any kind and
    lack any field."""
    kind = str((listed.get("properties") or {}).get("computeType"))
    return fold_name(kind) == fold_name(AML_COMPUTE) and (listed.get("tags") or {}).get(CLUSTER_TAG) == cluster_name


def read_compute(found: Mapping[str, Any]) -> Compute:
    """Return a compute as the service sends it."""
    properties: Mapping[str, Any] = found.get("properties") or {}
    own: Mapping[str, Any] = properties.get("properties") or {}
    scale: Mapping[str, Any] = own.get("scaleSettings") or {}
    idle = scale.get("nodeIdleTimeBeforeScaleDown")
    return Compute(
        name=str(found["name"]),
        state=str(properties.get("provisioningState") or ""),
        size=str(own.get("vmSize") or ""),
        tier="spot" if re.search("low|spot", str(own.get("vmPriority")).casefold()) else "dedicated",
        min_nodes=int(scale.get("minNodeCount") or 0),
        max_nodes=int(scale.get("maxNodeCount") or 0),
        idle_seconds=_DURATION.validate_python(idle).total_seconds() if idle else None,
        has_public_ip=own.get("enableNodePublicIp") is not False,
        tags=found.get("tags") or {},
        errors=(*(own.get("errors") or ()), *(properties.get("provisioningErrors") or ())),
    )


def entity_text(entity: Any) -> str:
    """Return a compute or a job as its client writes it down."""
    import yaml  # not above: loading the code location does without

    written = io.StringIO()
    entity.dump(written)
    document = yaml.safe_load(written.getvalue())
    if "component" in document:
        document["component"]["code"] = "the folder of these files"
    return yaml_text(document)
