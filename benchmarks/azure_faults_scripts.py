"""The kinds of faults that `benchmarks.azure_faults` draws from, and the script that a seed gives. Pure.

A kind is one entry of `KINDS`: its name in the counts, the switch of the emulator that it turns (a kind of
`harness/azure/emulator/faults.py`, or another verb of its control port), and how its fields are drawn. A test holds
the entries against the emulator's own list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NODES, SKU, FAMILY = 2, "Standard_NC6s_v3", "standardNCSv3Family"
OPERATIONS = ("compute.put", "compute.get", "compute.list", "job.put", "job.get", "code.*", "environment.*", "*")
MOST = 4
"""Faults of one script at most."""
LATEST_SECONDS = 10.0
"""Seconds after the submission in which late faults begin: a training takes about as long."""
REFUSALS = (
    ("ClusterCoreQuotaReached", "Operation results in exceeding quota limits of Core."),
    ("JobNodeCountExceedsCoreQuota", "The nodes of the job exceed the quota of cores."),
    ("BadRequest", "The specified subscription has a total vCPU quota of 0."),
)
"""Codes that users of Azure ML report. The words are ours, after theirs."""

NOT_BOUGHT, LOST = ("no_capacity", "refused"), ("failed",)
"""Outcomes of runs whose nodes are not to be had, and of those that lost theirs too often."""

Fields = dict[str, Any]
Draw = Callable[[random.Random], Fields]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault."""

    name: str
    switch: str
    """Kind of fault of the emulator; "" where another verb is asked."""
    draw: Draw
    """Returns the fields of the switch, or of the verb."""
    verb: str = "fault"
    """Verb of the emulator's control port."""
    may_end: tuple[str, ...] = ()
    """Outcomes other than success to which it may lead; (): it passes, and a run has to outlive it."""
    late: float = 0.0
    """Share of these faults that begin while the job runs; the others are there before anything is bought."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """One fault of a script: what is asked of the control port."""

    name: str
    verb: str
    fields: Fields
    may_end: tuple[str, ...] = ()
    after_seconds: float | None = None
    """Seconds from the submission on; None: before anything is bought."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The faults of one run. Seconds are those of the real clock, from the job's submission on."""

    faults: tuple[PlannedFault, ...]
    dies_after: float | None = None
    """Seconds until the orchestrator is replaced by another one, which knows the run directory only; None: never."""
    cancels_after: float | None = None
    """Seconds until a person cancels the job; None: never."""
    cancels_ended: bool = False
    """Whether a person cancels the job once more when it has ended."""

    @property
    def may_end(self) -> frozenset[str]:
        """Return the outcomes that this script may have."""
        cancelled = {"cancelled"} if self.cancels_after is not None else set()
        return frozenset({"succeeded", *cancelled, *(end for fault in self.faults for end in fault.may_end)})


def _count(dice: random.Random, most: int) -> Fields:
    return {"operation": dice.choice(OPERATIONS), "count": dice.randint(1, most)}


def _moment(dice: random.Random) -> Fields:
    return {"moment": dice.choice(("before", "after"))}


def _not_found(dice: random.Random, operation: str) -> Fields:
    return {
        "operation": operation,
        "status": 404,
        "code": dice.choice(("UserError", "ResourceNotFound")),
        "message": "Not found",
        "count": dice.randint(1, 3),
    }


def _hidden(dice: random.Random, resource: str, by: Sequence[str], most: float) -> Fields:
    return {"resource": resource, "by": dice.choice(by), "seconds": dice.uniform(0.5, most)}


def _no_workspace(dice: random.Random) -> Fields:
    words = {"ResourceGroupNotFound": "Resource group 'dtrain-rg' could not be found."}
    words["ParentResourceNotFound"] = "Parent resource 'dtrain-ws' not found."
    code = dice.choice(sorted(words))
    found = {"operation": dice.choice(("job.get", "compute.*", "*")), "status": 404, "count": dice.randint(1, 3)}
    return {**found, "code": code, "message": words[code]}


def _node_loss(dice: random.Random) -> Fields:
    return {
        "node": dice.randrange(NODES),
        "after_seconds": dice.uniform(0, 8),
        "policy": dice.choice(("fail", "survive", "restart")),
    }


def _words(dice: random.Random) -> Fields:
    code, message = dice.choice(REFUSALS)
    return {"code": code, "message": message}


def _size(dice: random.Random, *more: str) -> Fields:
    return {"vm_size": dice.choice((SKU, *more))}


KINDS: tuple[FaultKind, ...] = (
    # The service, and the way to it.
    FaultKind(
        "throttle", "throttle", lambda dice: _count(dice, 4) | {"retry_after_seconds": dice.randint(0, 2)}, late=0.3
    ),
    FaultKind(
        "error", "error", lambda dice: _count(dice, 3) | _moment(dice) | {"status": dice.choice((500, 502, 503))},
        late=0.3,
    ),
    FaultKind("drop", "drop", lambda dice: _count(dice, 3) | _moment(dice), late=0.3),
    FaultKind("slow", "slow", lambda dice: _count(dice, 2) | {"seconds": dice.uniform(0.5, 3)}, late=0.3),
    # 404 for what exists: the resource manager's regions are consistent after a while only (Azure's support in
    # hashicorp/terraform-provider-azurerm, issue 18268, 2024-04-25; Azure/terraform-provider-azapi, issue 587).
    FaultKind("new job not found", "error", lambda dice: _not_found(dice, "job.get")),
    FaultKind("running job not found", "error", lambda dice: _not_found(dice, "job.get"), late=1.0),
    FaultKind("new compute not found", "error", lambda dice: _not_found(dice, "compute.get")),
    FaultKind("used compute not found", "error", lambda dice: _not_found(dice, "compute.get"), late=1.0),
    # The same with the words of the service's own 404s, which name what they miss, and in lists.
    FaultKind("new job hidden", "hide", lambda dice: _hidden(dice, "job", ("get", "both"), 6) | {"since": "put"}),
    FaultKind("running job hidden", "hide", lambda dice: _hidden(dice, "job", ("get", "all"), 8), late=1.0),
    FaultKind(
        "running job hidden for long", "hide", lambda dice: _hidden(dice, "job", ("get",), 8) | {"seconds": 25},
        may_end=LOST, late=1.0,
    ),
    FaultKind(
        "new compute hidden", "hide",
        lambda dice: _hidden(dice, "compute", ("get", "list", "both"), 6) | {"since": "put"},
    ),
    FaultKind("used compute hidden", "hide", lambda dice: _hidden(dice, "compute", ("get", "both"), 8), late=1.0),
    FaultKind(
        "lists lag", "hide",
        lambda dice: _hidden(dice, dice.choice(("job", "compute")), ("list",), 15) | {"since": "put"},
    ),
    FaultKind("workspace not found for a while", "error", _no_workspace, may_end=NOT_BOUGHT, late=0.7),
    # Nodes that are not to be had.
    FaultKind(
        "refuse", "refuse",
        lambda dice: _size(dice, "Standard_N[CV]*", "*")
        | {"how": dice.choice(("sync", "async")), "count": dice.choice((1, 2, None))},
        may_end=NOT_BOUGHT,
    ),
    FaultKind(
        "refused in words of Azure", "refuse",
        lambda dice: _size(dice, "*") | _words(dice) | {"how": dice.choice(("sync", "async"))},
        may_end=NOT_BOUGHT,
    ),
    FaultKind(
        "refused in a nested way", "refuse",
        lambda dice: _size(dice, "*") | _words(dice)
        | {
            "how": dice.choice(("sync", "async")), "status": 400,
            "nesting": dice.choice(("details", "text", "innererror", "info")),
        },
        may_end=NOT_BOUGHT,
    ),
    FaultKind(
        "succeeded with errors", "refuse", lambda dice: _size(dice, "*") | {"how": "settled"}, may_end=NOT_BOUGHT
    ),
    FaultKind(
        "capacity", "capacity",
        lambda dice: _size(dice, "*") | {"nodes": dice.randint(0, 1), "count": dice.choice((2, 5, None))},
        may_end=NOT_BOUGHT + LOST,
    ),
    FaultKind(
        "scarce for a while", "capacity", lambda dice: {"nodes": 1, "until": dice.uniform(3, 12)},
        may_end=NOT_BOUGHT + LOST,
    ),
    FaultKind(
        "quota of less than one node", "", lambda dice: {"family": FAMILY, "cores": dice.choice((0, 4))},
        verb="quota", may_end=NOT_BOUGHT,
    ),
    FaultKind(
        "quota of one node", "", lambda dice: {"family": FAMILY, "cores": 6}, verb="quota", may_end=NOT_BOUGHT
    ),
    FaultKind(
        "stuck", "stuck", lambda dice: {"operation": dice.choice(("compute.create", "compute.delete"))},
        may_end=NOT_BOUGHT + LOST,
    ),
    FaultKind("failed update", "fail", lambda dice: {"operation": "compute.update"}, may_end=NOT_BOUGHT + LOST),
    # Jobs and their nodes.
    FaultKind(
        "status", "status",
        lambda dice: {
            "status": dice.choice(("NotResponding", "Paused")), "after_seconds": dice.uniform(0, 3),
            "seconds": dice.choice((2, 60)),
        },
        may_end=LOST,
    ),
    FaultKind("queue", "queue", lambda dice: {"seconds": dice.choice((3, None)), "job": "*-l1"}, may_end=LOST),
    FaultKind("preempt", "preempt", _node_loss, may_end=LOST),
    FaultKind("lose", "lose", _node_loss, may_end=LOST),
    FaultKind(
        "preempted for good", "preempt",
        lambda dice: _node_loss(dice) | {"policy": "survive", "back_after_seconds": None},
        may_end=LOST,
    ),
)  # fmt: skip


def make_script(seed: int) -> Script:
    """Return the script of a seed: the same seed gives the same script."""
    dice = random.Random(seed)
    chosen = dice.choices(KINDS, k=dice.randint(1, MOST))
    return Script(
        faults=tuple(_planned(kind, dice) for kind in chosen),
        dies_after=dice.uniform(0, 12) if dice.random() < 0.3 else None,
        cancels_after=dice.uniform(0, 12) if dice.random() < 0.15 else None,
        cancels_ended=dice.random() < 0.2,
    )


def ask_for(kind: FaultKind, dice: random.Random) -> Fields:
    """Return what is asked of the control port for one fault of that kind."""
    fields = kind.draw(dice)
    return {"fault": kind.switch, **fields} if kind.switch else fields


def _planned(kind: FaultKind, dice: random.Random) -> PlannedFault:
    fields = ask_for(kind, dice)
    after = dice.uniform(0, LATEST_SECONDS) if dice.random() < kind.late else None
    return PlannedFault(name=kind.name, verb=kind.verb, fields=fields, may_end=kind.may_end, after_seconds=after)
