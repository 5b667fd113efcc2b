"""Faults as values: a tape says what happens, to whom and when. Pure, and the same for ever from its seed.

A fault happens at an exact point of a step (``at``, ``step``: `trainer.runtime.fault_injection` does it, inside the
node), or so many seconds ``after`` the first generation was formed (the harness does it, from outside).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal, get_args

Kind = Literal[
    "kill",  # SIGKILL to a whole node
    "stop",  # SIGSTOP, and SIGCONT after ``seconds``
    "evict",  # SIGTERM
    "oom",  # out of memory, as torch raises it
    "supervisor",  # SIGKILL to the supervisor: all nodes die with it
    "storage",  # the checkpoints' folder cannot be written for ``seconds``
    "cut",  # the link from ``node`` to ``other``: nothing passes; restored after ``seconds``, as the next three
    "delay",  # … every frame comes ``amount`` seconds later
    "throttle",  # … ``amount`` bytes per second at most
    "partition",  # ``node`` is cut off from all others
]
KINDS: tuple[Kind, ...] = get_args(Kind)
NETWORK_KINDS = ("cut", "delay", "throttle", "partition")
NODES = 3
STEPS_PER_EPOCH = 19
EPOCHS = 5
STEPS = EPOCHS * STEPS_PER_EPOCH
CHECKPOINT_FREQUENCY = 10
MOST_OOM = 3
"""Memory may run out so often, with 16 samples at once and a floor of 4; then there is nothing smaller to try."""
SPAN_SECONDS = 3.5
"""What an undisturbed training takes at least, from the first generation on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    node: int = 0
    at: str | None = None
    """A point of a step, see `trainer.runtime.fault_injection`; None: ``after`` says when."""
    step: int | None = None
    """The step being done, from 0; None: the first time that the point is reached."""
    after: float | None = None
    seconds: float | None = None
    other: int | None = None
    one_way: bool = False
    amount: float | None = None

    def for_trainer(self) -> dict[str, Any] | None:
        """As an entry of DTRAIN_FAULTS; None where the harness does it."""
        if self.at is None:
            return None
        kind = "sigterm" if self.kind == "evict" else self.kind
        return {"kind": kind, "at": self.at, "node": self.node} | ({} if self.step is None else {"step": self.step})


@dataclass(frozen=True, kw_only=True, slots=True)
class Tape:
    """What happens in one run."""

    seed: int
    faults: tuple[Fault, ...]
    hosts: Literal["processes", "network"] = "processes"
    replacement_delay: float | None = 0.3
    """Seconds until a lost node is replaced; None: never."""

    @property
    def dropout(self) -> float:
        """Smaller parts of a micro-batch have dropout masks of their own, so memory that runs out needs none."""
        return 0.0 if any(fault.kind == "oom" for fault in self.faults) else 0.1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Tape:
        data = json.loads(text)
        return cls(**{**data, "faults": tuple(Fault(**fault) for fault in data["faults"])})


def make(seed: int) -> Tape:
    """The tape of a seed: one to three scenes."""
    random = Random(f"tape {seed}")  # text is hashed the same everywhere
    hosts: Literal["processes", "network"] = "network" if seed % 3 == 2 else "processes"
    first, second = (NETWORK_SCENES, PROCESS_SCENES) if hosts == "network" else (PROCESS_SCENES, PROCESS_SCENES)
    faults = list(random.choice(first)(random))
    while random.random() < 0.4 and len(faults) < 6:
        faults += random.choice(second)(random)
    memory = [fault for fault in faults if fault.kind == "oom"]
    faults = [fault for fault in faults if fault not in memory[MOST_OOM:]]
    delay = None if random.random() < 0.2 else round(random.uniform(0.1, 1.5), 2)
    return Tape(seed=seed, faults=tuple(_in_order(faults)), hosts=hosts, replacement_delay=delay)


def _in_order(faults: list[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: (fault.after or 0.0, fault.node))


def _some_time(random: Random, until: float = 1.0) -> float:
    return round(random.uniform(0.0, until * SPAN_SECONDS), 2)


def _some_point(random: Random, node: int, kind: Kind = "kill", **more: Any) -> Fault:
    at = random.choice(["forward", "backward", "all_reduce", "optimizer", "evaluate", "save", "finish"])
    step: int | None = random.randrange(1, STEPS)
    if at == "evaluate":
        step = STEPS_PER_EPOCH * random.randrange(1, EPOCHS)
    elif at == "save":  # rank 0 does that, which node 0 is until something happens
        node, step = 0, CHECKPOINT_FREQUENCY * random.randrange(1, STEPS // CHECKPOINT_FREQUENCY)
    elif at == "finish":
        step = None
    return Fault(kind=kind, node=node, at=at, step=step, **more)


def _kill_at_a_point(random: Random) -> list[Fault]:
    return [_some_point(random, random.randrange(NODES))]


def _kill_some_time(random: Random) -> list[Fault]:
    return [Fault(kind="kill", node=random.randrange(NODES), after=_some_time(random))]


def _kill_rank_0_and_its_successor(random: Random) -> list[Fault]:
    first = _some_time(random, 0.7)
    return [
        Fault(kind="kill", node=0, after=first),
        Fault(kind="kill", node=1, after=round(first + random.uniform(0.0, 2.0), 2)),
    ]


def _kill_two_at_once(random: Random) -> list[Fault]:
    spared, when = random.randrange(NODES), _some_time(random)
    gap = random.choice([0.0, 0.02, 0.1, 0.3])
    nodes = [node for node in range(NODES) if node != spared]
    random.shuffle(nodes)
    return [
        Fault(kind="kill", node=nodes[0], after=when),
        Fault(kind="kill", node=nodes[1], after=round(when + gap, 2)),
    ]


def _kill_while_they_regroup(random: Random) -> list[Fault]:
    first, second = random.sample(range(NODES), 2)
    return [
        Fault(kind="kill", node=first, after=_some_time(random)),
        Fault(kind=random.choice(["kill", "stop"]), node=second, at="regroup", seconds=random.choice([0.5, 3.0])),
    ]


def _kill_again_and_again(random: Random) -> list[Fault]:
    return [Fault(kind="kill", node=random.randrange(NODES), after=_some_time(random)) for _ in range(4)]


def _kill_all(random: Random) -> list[Fault]:
    when = _some_time(random)
    return [Fault(kind="kill", node=node, after=when) for node in range(NODES)]


def _freeze(random: Random) -> list[Fault]:
    seconds, node = random.choice([0.4, 1.0, 2.5, 4.0]), random.randrange(NODES)
    if random.random() < 0.5:
        return [_some_point(random, node, "stop", seconds=seconds)]
    return [Fault(kind="stop", node=node, after=_some_time(random), seconds=seconds)]


def _evict(random: Random) -> list[Fault]:
    node = random.randrange(NODES)
    if random.random() < 0.5:
        return [_some_point(random, node, "evict")]
    return [Fault(kind="evict", node=node, after=_some_time(random))]


def _evict_all(random: Random) -> list[Fault]:
    when = _some_time(random, 0.8)
    gap = random.choice([0.0, 0.0, 0.05, 0.5])
    return [Fault(kind="evict", node=node, after=round(when + node * gap, 2)) for node in range(NODES)]


def _run_out_of_memory(random: Random) -> list[Fault]:
    at = random.choice(["forward", "backward"])
    return [
        Fault(kind="oom", node=random.randrange(NODES), at=at, step=random.randrange(1, STEPS))
        for _ in range(random.randrange(1, 4))
    ]


def _kill_the_supervisor(random: Random) -> list[Fault]:
    return [Fault(kind="supervisor", after=_some_time(random, 0.8))]


def _lose_the_storage(random: Random) -> list[Fault]:
    return [Fault(kind="storage", after=_some_time(random, 0.8), seconds=random.choice([0.5, 2.0, 6.0]))]


def _cut_a_link(random: Random) -> list[Fault]:
    one, other = random.sample(range(NODES), 2)
    seconds = random.choice([0.5, 2.5, 5.0])
    return [
        Fault(
            kind="cut", node=one, other=other, after=_some_time(random, 0.8), seconds=seconds,
            one_way=random.random() < 0.4,
        )
    ]  # fmt: skip


def _cut_off_a_host(random: Random) -> list[Fault]:
    seconds = random.choice([0.5, 2.5, 5.0])
    return [Fault(kind="partition", node=random.randrange(NODES), after=_some_time(random, 0.8), seconds=seconds)]


def _cut_off_all(random: Random) -> list[Fault]:
    when, seconds = _some_time(random, 0.8), random.choice([0.5, 3.0])
    return [Fault(kind="partition", node=node, after=when, seconds=seconds) for node in range(NODES)]


def _slow_down(random: Random) -> list[Fault]:
    one, other = random.sample(range(NODES), 2)
    kind, amount = random.choice(
        [("delay", 0.01), ("delay", 0.1), ("delay", 0.5), ("throttle", 2e6), ("throttle", 3e5)]
    )
    return [
        Fault(
            kind=kind, node=one, other=other, amount=amount, after=_some_time(random, 0.8),
            seconds=random.choice([0.5, 2.0]), one_way=random.random() < 0.4,
        )
    ]  # fmt: skip


def _kill_in_a_slow_network(random: Random) -> list[Fault]:
    return _slow_down(random) + _kill_some_time(random)


Scene = Callable[[Random], list[Fault]]
PROCESS_SCENES: tuple[Scene, ...] = (
    _kill_at_a_point, _kill_at_a_point, _kill_at_a_point, _kill_at_a_point, _kill_at_a_point,
    _kill_some_time, _kill_some_time, _kill_rank_0_and_its_successor, _kill_two_at_once,
    _kill_while_they_regroup, _kill_again_and_again, _kill_all,
    _freeze, _freeze, _evict, _evict_all, _run_out_of_memory, _kill_the_supervisor, _lose_the_storage,
)  # fmt: skip
NETWORK_SCENES: tuple[Scene, ...] = (
    _cut_a_link, _cut_a_link, _cut_a_link, _cut_a_link, _cut_off_a_host, _cut_off_a_host, _cut_off_all,
    _slow_down, _kill_in_a_slow_network,
)  # fmt: skip
