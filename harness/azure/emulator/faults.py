"""What goes wrong, and when: faults as data, from a script (a JSON list) or one by one over the control port.

Each fault is an object with ``fault`` (its kind), for most of them ``operation`` (a pattern as in file names:
``compute.put``, ``job.*``, ``*``; the names are those that ``control requests`` shows) and ``count`` (how often it
strikes, 1 unless told; null: always).

=============  =====================================================================================================
kind           what it does, and its other fields
=============  =====================================================================================================
``throttle``   429 with Retry-After: ``retry_after_seconds`` (1)
``error``      ``status`` (503), ``code``, ``message``; ``moment``: ``before`` (nothing is done) or ``after`` (done, but
               the caller sees the error)
``drop``       the connection is closed without an answer; ``moment`` as above
``slow``       the answer comes ``seconds`` (2) of the real clock later
``refuse``     a compute is refused: ``vm_size`` and ``tier`` (patterns), ``how``: ``sync`` (``status`` 409), ``async``
               (a Failed compute stays) or ``settled`` (it is Succeeded, ``errors`` hold the refusal, no node comes),
               ``code``, ``message``; ``nesting``: where the code lies (see `harness.azure.emulator.refused`)
``capacity``   a compute has ``nodes`` (0) at most; ``vm_size``, ``tier``, ``compute`` (patterns); for the first
               ``count`` asks (null: always), or until ``until`` (seconds from now on the emulator's clock)
``stuck``      an operation that never ends: ``operation`` is ``compute.create``, ``compute.update``,
               ``compute.delete``, ``endpoint.create``, ``deployment.create``
``fail``       an operation that ends badly, and leaves the compute Failed with the nodes that it has: ``operation`` is
               ``compute.update``
``status``     a job shows ``status`` (NotResponding, Paused…) for ``seconds`` (3600) of the emulator's clock once it
               runs: ``job`` (pattern), ``after_seconds``
``hide``       what is there is answered as if it were not, for ``seconds`` (10) of the emulator's clock:
               ``resource``: ``job`` or ``compute``, ``name`` (pattern), ``by``: ``get`` (404), ``list`` (it is not in
               lists), ``both``, or ``all`` (a job's cancellation and its history are 404, too), ``since``: ``put``
               (from its creation on) or ``now``
``queue``      a job stays Queued whatever nodes there are: ``job`` (pattern), ``seconds`` (null: until it is cancelled)
``preempt``    a node of a job goes, with SIGTERM and grace: ``job``, ``node`` (0…), ``after_seconds`` (0: as soon as it
               runs), ``log`` (a text to wait for in the job's logs), ``policy``: ``fail`` (the job fails), ``survive``
               (the others go on, and the node comes back), ``restart`` (the service queues the job again),
               ``back_after_seconds`` (1; null: it never comes back)
``lose``       the same without a warning: SIGKILL to all of the node
=============  =====================================================================================================

Where ``hide`` comes from: the resource manager's regions are consistent after a while only, so that what exists is
answered 404 (Azure's support in hashicorp/terraform-provider-azurerm#18268, 2024-04-25; #20464; #32535 has it of things
made long before; Azure/terraform-provider-azapi#587). That lists lag as well is assumed; so are the seconds.

Where a lost node's policies come from; none of them is recorded of the service:

- ``fail``: users' jobs on low priority ended so, and did not start again (Azure/MachineLearningNotebooks#1242,
  MicrosoftDocs/azure-docs#66288, microsoft/MLOpsPython#346);
- ``restart``: the documents that these reports cite («restarted, not resumed»), and hi-ml's page on low priority;
- ``survive``: assumed. Pages on batch deployments let the other nodes go on, for a batch's tasks alone. That a node
  which comes back gets its rank again is assumed, too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

FIELDS: dict[str, dict[str, Any]] = {
    "throttle": {"operation": "*", "retry_after_seconds": 1},
    "error": {"operation": "*", "status": 503, "code": "ServiceUnavailable", "message": "", "moment": "before"},
    "drop": {"operation": "*", "moment": "before"},
    "slow": {"operation": "*", "seconds": 2.0},
    "refuse": {"vm_size": "*", "tier": "*", "how": "sync", "status": 409, "code": "", "message": "", "nesting": "flat"},
    "capacity": {"vm_size": "*", "tier": "*", "compute": "*", "nodes": 0, "until": None},
    "stuck": {"operation": "*"},
    "fail": {"operation": "*"},
    "status": {"job": "*", "status": "NotResponding", "after_seconds": 0.0, "seconds": 3600.0},
    "hide": {"resource": "job", "name": "*", "by": "get", "seconds": 10.0, "since": "now"},
    "queue": {"job": "*", "seconds": None},
    "preempt": {
        "job": "*", "node": 0, "after_seconds": 0.0, "log": None, "policy": "fail", "back_after_seconds": 1.0,
    },
}  # fmt: skip
FIELDS["lose"] = dict(FIELDS["preempt"])
SPARED = ("metadata.get",)
"""What a pattern does not reach, only its own name: clients of the public cloud have no need of it."""
CHOICES = {
    "moment": ("before", "after"),
    "how": ("sync", "async", "settled"),
    "nesting": ("flat", "details", "text", "innererror", "info"),
    "policy": ("fail", "survive", "restart"),
    "resource": ("job", "compute"),
    "by": ("get", "list", "both", "all"),
    "since": ("put", "now"),
}


@dataclass(slots=True, kw_only=True)
class Fault:
    id: int
    kind: str
    fields: dict[str, Any]
    left: int | None
    """How often it will still strike; None: always."""
    added: float
    struck: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def strike(self) -> None:
        self.struck += 1
        if self.left is not None:
            self.left -= 1

    def describe(self) -> dict[str, Any]:
        return {"id": self.id, "fault": self.kind, **self.fields, "left": self.left, "struck": self.struck}


@dataclass(slots=True)
class Faults:
    """The faults that are still to come."""

    all: list[Fault] = field(default_factory=list)
    _ids: Any = field(default_factory=itertools.count)

    def add(self, spec: dict[str, Any], now: float) -> Fault:
        """ValueError, which says what there is, for a kind or a field that does not exist."""
        rest = dict(spec)
        kind = rest.pop("fault", None)
        if kind not in FIELDS:
            raise ValueError(f"fault is {kind!r}; there are: {', '.join(FIELDS)}")
        # A node is lost once and a job hangs once; an operation fails once, unless told.
        left = rest.pop("count", None if kind == "capacity" and rest.get("until") is not None else 1)
        if unknown := rest.keys() - FIELDS[kind].keys():
            raise ValueError(f"{kind} has no {', '.join(sorted(unknown))}; it has: {', '.join(FIELDS[kind])}, count")
        for name, choices in CHOICES.items():
            if name in rest and rest[name] not in choices:
                raise ValueError(f"{name} is {rest[name]!r}; there are: {', '.join(choices)}")
        made = Fault(id=next(self._ids), kind=kind, fields=FIELDS[kind] | rest, left=left, added=now)
        self.all.append(made)
        return made

    def clear(self) -> None:
        self.all.clear()

    def pending(self, *kinds: str) -> list[Fault]:
        return [fault for fault in self.all if fault.kind in kinds and fault.left != 0]

    def of_request(self, operation: str) -> Fault | None:
        """What happens to this request, and it counts as having happened."""
        for fault in self.pending("throttle", "error", "drop", "slow"):
            if operation in SPARED and fault["operation"] != operation:
                continue
            if fnmatchcase(operation, fault["operation"]):
                fault.strike()
                return fault
        return None

    def stuck(self, operation: str) -> bool:
        return self._strikes("stuck", operation)

    def fails(self, operation: str) -> bool:
        return self._strikes("fail", operation)

    def _strikes(self, kind: str, operation: str) -> bool:
        for fault in self.pending(kind):
            if fnmatchcase(operation, fault["operation"]):
                fault.strike()
                return True
        return False

    def refusal(self, vm_size: str, tier: str) -> Fault | None:
        for fault in self.pending("refuse"):
            if fnmatchcase(vm_size, fault["vm_size"]) and fnmatchcase(tier, fault["tier"]):
                fault.strike()
                return fault
        return None

    def hides(self, resource: str, name: str, created: float, by: str, now: float) -> bool:
        """Is this one as if it were not there, for this way of asking (``get``, ``list``, ``cancel``, ``history``)?"""
        ways = {"get": ("get",), "list": ("list",), "both": ("get", "list")}
        for fault in self.pending("hide"):
            since = created if fault["since"] == "put" else fault.added
            is_meant = fault["resource"] == resource and fnmatchcase(name, fault["name"])
            if is_meant and by in ways.get(fault["by"], (by,)) and since <= now < since + fault["seconds"]:
                fault.struck += 1  # as often as it is asked: its seconds are its end
                return True
        return False

    def capacity(self, vm_size: str, tier: str, compute: str, now: float) -> int:
        """How many nodes there are to have; an ask, which counts."""
        for fault in self.pending("capacity"):
            if fault["until"] is not None and now >= fault.added + fault["until"]:
                continue
            names = ((vm_size, "vm_size"), (tier, "tier"), (compute, "compute"))
            if all(fnmatchcase(value, fault[name]) for value, name in names):
                fault.strike()
                return int(fault["nodes"])
        return 10**9
