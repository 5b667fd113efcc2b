"""What ``training.communication = "auto"`` sums gradients by: a decision from measured times, the same on all ranks.

What ranks know of a window is the same on each (`trainer.observability.comm_profiler.TimingWindow`), and so is what
they decide from it. `exposed`, `expect`, `choose`, `is_settled` and `rest_of` are pure; `Automatic` remembers, tries
what compressing takes, and sounds the link.

Small messages say nothing of large ones: what is left of a gradient by top-k takes a latency, and passes within the
burst that many links allow. So what larger messages would take is never taken from them: it is what plain sums took
when they were last seen, in steps or in a sounding, which sums one bucket as it is beside the training.
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

from trainer.comm.torch_transport import Transport
from trainer.comm.world import World
from trainer.parallel.compression import CommHook, CompressionTransport, LoopbackTransport, make_comm_hook
from trainer.performance.link import Link, bytes_carried, link_of
from trainer.performance.step import StepParts

if TYPE_CHECKING:
    from trainer.observability.comm_profiler import TimingWindow

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
LEAST_STEPS, AGREEING, AT_ONCE = 5, 2, 2.0
"""A window of fewer steps decides nothing; so many windows in a row must come to the same. One is enough where steps
with plain sums are expected to take more than so many times as long: there a window costs most."""
SUMS = 2
"""Of each size, in a sounding. The last counts: by then what a link allows as a burst is used up."""
SOUNDED_FIRST, GROWTH, SOUNDING_SECONDS = 16384, 8, 1.0
"""A sounding begins with so many numbers of a bucket, and goes on with so many times as many where that is expected to
take no longer than this: a link that has got worse must not hold the training up, and fewer bytes show it as well."""
REST, SHORTEST_REST, LONGEST_REST = 100, 10.0, 600.0
"""Until all is looked at anew: so many times as long as a sounding takes, and at least so many seconds; twice as long
after each look, up to so many seconds."""
BY_NODE_LATENCIES = 2.0
TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """One way to sum: what it sends for each byte of gradients, and how long it computes for that."""

    bytes_share: float = 1.0
    latencies: float = 1.0
    cost_per_byte: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep(StepParts):
    """What was measured of a step with the present means. What it hides is that of when all was sent as it is."""

    exposed_seconds: float
    """Of wire; with what the present means compute after the backward pass."""


def exposed(step: MeasuredStep, link: Link, means: Means) -> float:
    """Seconds that sums are expected to hold up a step. Compressing hides behind nothing: it comes after the backward
    pass, or takes its time from it."""
    wire = step.predict_exposed(lambda size: link.seconds(means.bytes_share * size, means.latencies))
    return wire + means.cost_per_byte * sum(step.buckets)


def expect(step: MeasuredStep, link: Link, known: Mapping[str, Means], off: Mapping[str, float]) -> dict[str, float]:
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


def is_settled(present: str, verdicts: Sequence[str], expected: Mapping[str, float]) -> bool:
    """Is the last verdict one to act on? ``verdicts``: of the latest `AGREEING` windows, or fewer."""
    if present == PLAIN and expected[present] > AT_ONCE * expected[verdicts[-1]]:
        return True
    return len(verdicts) == AGREEING and len(set(verdicts)) == 1


def rest_of(link: Link, bytes_: int, looks: int) -> float:
    """Seconds until all is looked at anew, after so many looks. ``bytes_``: what a sounding sums."""
    first = max(SHORTEST_REST, REST * SUMS * link.seconds(bytes_))
    return max(first, min(LONGEST_REST, first * 2.0 ** min(looks, 20)))


class Automatic:
    """The present choice of a world, reviewed at the end of each of its windows."""

    def __init__(self, world: World, nodes: Sequence[int], fraction: float, may_drop: bool) -> None:
        """``nodes``: of each rank. ``may_drop``: may top-k be chosen?"""
        self.world, self.nodes, self.fraction, self.may_drop = world, nodes, fraction, may_drop
        self.present = PLAIN
        self._known: dict[str, Means] = {PLAIN: Means()}
        self._off: dict[str, float] = {}
        self._hiding = 0.0
        self._link = Link(latency_seconds=0.0, seconds_per_byte=0.0)
        """As plain sums saw it last."""
        self._age, self._looks = 0.0, 0
        """Seconds of training since the last change or look, and how often all was looked at anew."""
        self._windows, self._told = 0, False
        self._verdicts: deque[str] = deque(maxlen=AGREEING)

    def review(self, window: TimingWindow, buckets: Sequence[Tensor]) -> dict[str, Any] | None:
        """What a ``communication`` event says, where there is something to say; `present` is what to do from now on.
        ``buckets``: such as those of the gradients. At times a collective: all ranks have the same windows."""
        self._windows += 1
        if self._windows == 1 or window.values.shape[1] < LEAST_STEPS or not buckets:
            return None  # the first steps of a world are like no others
        held_up, seconds = float(np.median(window.wire)), window.typical_seconds
        largest = max(buckets, key=Tensor.numel)
        if self.present == PLAIN:
            self._link = link_of(window.wires)
            self._hiding = max(0.0, sum(took for _, took in window.wires) - held_up)
            if len(self._known) == 1 and held_up > WORTH_A_LOOK * seconds:
                self._known |= self._try(largest, self._link)
        self._age += window.seconds * window.values.shape[1]
        step = MeasuredStep(
            computing_seconds=seconds - held_up,
            exposed_seconds=held_up,
            hiding_seconds=self._hiding,
            buckets=tuple(bucket.nbytes for bucket in buckets),
        )
        expected = self._expect(step)
        if self._is_look_due(expected, largest.nbytes):
            if self.present != PLAIN:
                self._link = link_of(self._sound(largest))
            self._off, self._age, self._looks = {}, 0.0, self._looks + 1
            expected = self._expect(step)
        self._verdicts.append(choose(self.present, expected))
        if not is_settled(self.present, self._verdicts, expected):
            return None
        before, self.present = self.present, self._verdicts[-1]
        if self.present != before:
            self._age = 0.0
        elif self._told:
            return None
        self._told = True
        return {
            "choice": self.present,
            "before": before,
            "reason": _reason(self.present, step, expected),
            "step_seconds": expected,
            "latency_seconds": self._link.latency_seconds,
            "bandwidth_bytes_per_second": bytes_carried(len(self.nodes)) / self._link.seconds_per_byte
            if self._link.seconds_per_byte
            else None,
        }

    def _expect(self, step: MeasuredStep) -> dict[str, float]:
        """Seconds of a step with each; with the present one, what was measured."""
        self._off[self.present] = step.exposed_seconds - exposed(step, self._link, self._known[self.present])
        return expect(step, self._link, self._known, self._off)

    def _is_look_due(self, expected: Mapping[str, float], bytes_: int) -> bool:
        """Shall what was measured of others be forgotten, and the link be sounded where steps do not show it? Now and
        then; and sooner where old knowledge says that the present one should be given up."""
        if self.present == PLAIN:
            return len(self._off) > 1 and self._age >= rest_of(self._link, bytes_, self._looks)
        is_doubted = choose(self.present, expected) != self.present
        return self._age >= rest_of(self._link, bytes_, 0 if is_doubted else self._looks)

    def _sound(self, bucket: Tensor) -> list[tuple[int, float]]:
        """(bytes, seconds) of plain sums, of one number and of something like this bucket or, where that would take too
        long, like a part of it; without waiting."""
        assert self.world.group is not None
        numbers, *took = self.world.group.run("sounding of the link", partial(_time_plain, bucket))
        quickest = [min(values) for values in zip(*self.world.all_gather_object(took), strict=True)]
        return list(zip((bucket.itemsize, int(numbers) * bucket.itemsize), quickest, strict=True))

    def _try(self, bucket: Tensor, link: Link) -> dict[str, Means]:
        """What the other means take, tried on something like this bucket on all ranks at once."""
        names = [name for name in GENTLE_FIRST[1:] if name != "topk" or self.may_drop]
        if not 1 < len(set(self.nodes)) < len(self.nodes):
            names.remove("hierarchical")
        hooks = {name: make_comm_hook(name, self.nodes, self.fraction) for name in names}
        assert self.world.group is not None
        took = self.world.group.run("trial of compression", partial(_time, hooks, bucket))
        slowest = [max(values) for values in zip(*self.world.all_gather_object(took), strict=True)]
        found: dict[str, Means] = {}
        for (name, hook), seconds in zip(hooks.items(), slowest, strict=True):
            share, latencies = hook.bytes_of(bucket) / bucket.nbytes, 1.0
            if name == "hierarchical":  # what it took beyond the wire between nodes is what it takes within them
                latencies = BY_NODE_LATENCIES
                seconds -= link.seconds(share * bucket.nbytes, latencies)
            cost = max(0.0, seconds) / bucket.nbytes
            found[name] = Means(bytes_share=share, latencies=latencies, cost_per_byte=cost)
        return found


def _time(hooks: Mapping[str, CommHook], bucket: Tensor, transport: Any) -> list[float]:
    """Seconds of each: of computing alone, but for sums by node, which are made in earnest."""
    found = []
    for name, hook in hooks.items():
        wire: CompressionTransport = transport if name == "hierarchical" else LoopbackTransport()
        seconds = []
        for step in range(TRIALS):
            tensor = torch.randn_like(bucket)
            _finish(tensor)
            began = time.monotonic()
            hook.all_reduce(tensor, 0, step, wire, nullcontext)
            _finish(tensor)
            seconds.append(time.monotonic() - began)
        found.append(min(seconds))
    return found


def _time_plain(bucket: Tensor, transport: Transport) -> list[float]:
    """How many numbers of this bucket were summed in the end, the same on all ranks; seconds of a sum of one number,
    after which all ranks are there, and of that."""

    def seconds_of(like: Tensor) -> float:
        tensor = torch.randn_like(like)
        _finish(tensor)
        began = time.monotonic()
        transport.all_reduce(tensor)
        _finish(tensor)
        return time.monotonic() - began

    latency = min(seconds_of(bucket[:1]) for _ in range(TRIALS))
    numbers = min(SOUNDED_FIRST, bucket.numel())
    while True:
        seconds = [seconds_of(bucket[:numbers]) for _ in range(SUMS)][-1]
        longest = torch.tensor([seconds], dtype=torch.float64)
        transport.all_reduce(longest)  # so that all ranks end alike: no less than any of them has measured
        if numbers == bucket.numel() or GROWTH * longest.item() > SOUNDING_SECONDS:
            return [numbers, latency, seconds]
        numbers = min(GROWTH * numbers, bucket.numel())


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _reason(choice: str, step: MeasuredStep, expected: Mapping[str, float]) -> str:
    share = step.exposed_seconds / (step.computing_seconds + step.exposed_seconds)
    others = ", ".join(
        f"{1000 * seconds:.3g} ms with {name}"
        for name, seconds in sorted(expected.items(), key=lambda item: item[1])
        if name != choice
    )
    text = f"communication holds up {share:.0%} of a step; with {choice} one takes {1000 * expected[choice]:.3g} ms"
    return f"{text}, and would take {others}" if others else f"{text}: nothing to gain"
