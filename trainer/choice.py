"""What ``training.communication = "auto"`` sums gradients by: a decision from measured times, the same on all ranks.

What ranks know of a window is the same on each (`trainer.communication.Window`), and so is what they decide from it.
`link_of`, `exposed`, `expect` and `choose` are pure; `Automatic` remembers, and tries what compressing takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.compression import Echo, Scheme, Wire, make_scheme
from trainer.world import World

if TYPE_CHECKING:
    from trainer.communication import Window

PLAIN = "allreduce"
GENTLE_FIRST = (PLAIN, "hierarchical", "fp16", "topk")
"""In order of how much each changes about a training."""
NEARLY, CLEARLY = 1.05, 1.15
"""The gentlest is taken whose step is expected to be at most so many times as long as the best one's: less for others
than for the present one, so that who has just been chosen is not given up for a trifle."""
HANDICAP = {"topk": 1.25}
"""It sends another gradient, not only a rounded one, and must gain more for that."""
WORTH_A_LOOK = 0.1
"""Share of a step that plain communication must expose for compressing to be tried."""
LEAST_STEPS, AGREEING = 5, 2
"""A window of fewer steps decides nothing; so many windows in a row must come to the same."""
BY_NODE_LATENCIES = 2.0
TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a sum takes: ``latency_seconds + bytes * seconds_per_byte``."""

    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """One way to sum: what it sends for each byte of gradients, and how long it computes for that."""

    bytes_share: float = 1.0
    latencies: float = 1.0
    cost_per_byte: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What was measured of a step with the present means."""

    computing_seconds: float
    exposed_seconds: float
    """Of wire; with what the present means compute after the backward pass."""
    hiding_seconds: float
    """Of wire that the backward pass hid when all was sent as it is."""
    buckets: tuple[int, ...]
    """Bytes of gradients, in order of sending."""


def link_of(times: Sequence[tuple[int, float]]) -> Link:
    """From (bytes, wire seconds) of collectives of several sizes: the smallest tells the latency, the others the
    rest."""
    least, latency = min(times)
    moved = sum(bytes_ - least for bytes_, _ in times)
    took = sum(max(0.0, seconds - latency) for _, seconds in times)
    return Link(latency_seconds=latency, seconds_per_byte=took / moved if moved else 0.0)


def exposed(step: Step, link: Link, means: Means) -> float:
    """Seconds that sums are expected to hold up a step. Compressing hides behind nothing: it comes after the backward
    pass, or takes its time from it. The last bucket's wire never hides either."""
    wires = [
        means.latencies * link.latency_seconds + means.bytes_share * size * link.seconds_per_byte
        for size in step.buckets
    ]
    hidden = min(step.hiding_seconds, sum(wires[:-1]))
    return sum(wires) - hidden + means.cost_per_byte * sum(step.buckets)


def expect(step: Step, link: Link, known: Mapping[str, Means], off: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step with each of the known means. ``off``: what was measured beyond `exposed` with those that have
    been used; of others the same is expected as of the plain ones."""
    usual = max(0.0, off.get(PLAIN, 0.0))
    return {
        name: step.computing_seconds + max(0.0, exposed(step, link, means) + off.get(name, usual))
        for name, means in known.items()
    }


def choose(present: str, expected: Mapping[str, float]) -> str:
    """The gentlest whose step is expected to take about as long as the best one's."""
    seconds = {name: HANDICAP.get(name, 1.0) * value for name, value in expected.items()}
    best = min(seconds.values())
    names = [name for name in GENTLE_FIRST if name in seconds]
    return next(name for name in names if seconds[name] <= best * (CLEARLY if name == present else NEARLY))


class Automatic:
    """The present choice of a world, reviewed at the end of each of its windows."""

    def __init__(self, world: World, nodes: Sequence[int], fraction: float, may_drop: bool) -> None:
        """``nodes``: of each rank. ``may_drop``: may top-k be chosen?"""
        self.world, self.nodes, self.fraction, self.may_drop = world, nodes, fraction, may_drop
        self.present = PLAIN
        self._known: dict[str, Means] = {PLAIN: Means()}
        self._off: dict[str, float] = {}
        self._hiding = 0.0
        self._windows, self._told = 0, False
        self._verdicts: deque[str] = deque(maxlen=AGREEING)

    def review(self, window: Window, buckets: Sequence[Tensor]) -> dict[str, Any] | None:
        """What a ``communication`` event says, where there is something to say; `present` is what to do from now on.
        ``buckets``: such as those of the gradients. At times a collective: all ranks have the same windows."""
        self._windows += 1
        if self._windows == 1 or window.values.shape[1] < LEAST_STEPS or not buckets:
            return None  # the first steps of a world are like no others
        held_up = float(np.median(window.wire))
        seconds = window.typical_seconds
        if len(self._known) == 1 and held_up > WORTH_A_LOOK * seconds:
            self._known |= self._try(max(buckets, key=Tensor.numel), link_of(window.wires))
        if self.present == PLAIN:
            self._hiding = max(0.0, sum(took for _, took in window.wires) - held_up)
        step = Step(
            computing_seconds=seconds - held_up,
            exposed_seconds=held_up,
            hiding_seconds=self._hiding,
            buckets=tuple(bucket.nbytes for bucket in buckets),
        )
        link = link_of(window.wires)
        self._off[self.present] = held_up - exposed(step, link, self._known[self.present])
        expected = expect(step, link, self._known, self._off)
        self._verdicts.append(choose(self.present, expected))
        before, agreed = self.present, set(self._verdicts)
        if len(self._verdicts) < AGREEING or len(agreed) > 1:
            return None
        [self.present] = agreed
        if self._told and self.present == before:
            return None
        self._told = True
        return {
            "choice": self.present,
            "before": before,
            "reason": _reason(self.present, step, expected),
            "step_seconds": expected,
            "latency_seconds": link.latency_seconds,
            "bandwidth_bytes_per_second": carried(len(self.nodes)) / link.seconds_per_byte
            if link.seconds_per_byte
            else None,
        }

    def _try(self, bucket: Tensor, link: Link) -> dict[str, Means]:
        """What the other means take, tried on something like this bucket on all ranks at once."""
        names = [name for name in GENTLE_FIRST[1:] if name != "topk" or self.may_drop]
        if not 1 < len(set(self.nodes)) < len(self.nodes):
            names.remove("hierarchical")
        schemes = {name: make_scheme(name, self.nodes, self.fraction) for name in names}
        assert self.world.group is not None
        took = self.world.group.run("trial of compression", partial(_time, schemes, bucket))
        slowest = [max(values) for values in zip(*self.world.gather(took), strict=True)]
        found: dict[str, Means] = {}
        for (name, scheme), seconds in zip(schemes.items(), slowest, strict=True):
            share, latencies = scheme.bytes_of(bucket) / bucket.nbytes, 1.0
            if name == "hierarchical":  # what it took beyond the wire between nodes is what it takes within them
                latencies = BY_NODE_LATENCIES
                seconds -= latencies * link.latency_seconds + share * bucket.nbytes * link.seconds_per_byte
            cost = max(0.0, seconds) / bucket.nbytes
            found[name] = Means(bytes_share=share, latencies=latencies, cost_per_byte=cost)
        return found


def carried(ranks: int) -> float:
    """Of each byte that is all-reduced, how many each rank's link carries."""
    return 2 * (ranks - 1) / ranks


def _time(schemes: Mapping[str, Scheme], bucket: Tensor, transport: Any) -> list[float]:
    """Seconds of each: of computing alone, but for sums by node, which are made in earnest."""
    found = []
    for name, scheme in schemes.items():
        wire: Wire = transport if name == "hierarchical" else Echo()
        seconds = []
        for step in range(TRIALS):
            tensor = torch.randn_like(bucket)
            _finish(tensor)
            began = time.monotonic()
            scheme.sum(tensor, 0, step, wire, nullcontext)
            _finish(tensor)
            seconds.append(time.monotonic() - began)
        found.append(min(seconds))
    return found


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _reason(choice: str, step: Step, expected: Mapping[str, float]) -> str:
    share = step.exposed_seconds / (step.computing_seconds + step.exposed_seconds)
    others = ", ".join(
        f"{1000 * seconds:.3g} ms with {name}"
        for name, seconds in sorted(expected.items(), key=lambda item: item[1])
        if name != choice
    )
    text = f"communication holds up {share:.0%} of a step; with {choice} one takes {1000 * expected[choice]:.3g} ms"
    return f"{text}, and would take {others}" if others else f"{text}: nothing to gain"
