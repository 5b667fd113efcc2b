"""The choice of a communication hook for ``training.communication = "auto"``, from measured times, the same on all
ranks.

All ranks hold the same measurements of a window (`trainer.observability.comm_profiler.TimingWindow`), so they decide
alike. `exposed`, `expect`, `choose`, `is_settled` and `rest_of` are pure; `AutoCompression` keeps the history, times
the compression and probes the link. The hooks themselves belong to `trainer.parallel.compression`.

Small messages do not predict large ones: what top-k sends takes one latency, and passes within the burst that many
links allow. So the time of larger messages is never extrapolated from them. It is what plain sums took when they were
last seen, in steps or in a bandwidth probe, which sums one bucket uncompressed beside the training.
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
"""The hooks, ordered by how much each changes the gradient; the least first."""
NEARLY, CLEARLY = 1.05, 1.15
"""Factors of the best expected step time. The gentlest hook within its factor is taken: `CLEARLY` for the present hook,
`NEARLY` for the others, so that the present choice is not given up for a small gain."""
HANDICAP = {"topk": 1.25}
"""Factors on the expected step time of a hook. Top-k changes the gradient by more than rounding, so it must gain
more."""
WORTH_A_LOOK = 0.1
"""The share of a step that plain communication must expose before compression is tried."""
LEAST_STEPS, AGREEING, AT_ONCE = 5, 2, 2.0
"""A window of fewer than `LEAST_STEPS` steps decides nothing, and `AGREEING` windows in a row must come to the same
choice. One window is enough where steps with plain sums are expected to take more than `AT_ONCE` times as long as the
best: there each window costs most."""
SUMS = 2
"""Sums of each size in a bandwidth probe. The last one counts: by then the burst that a link allows is used up."""
PROBED_FIRST, GROWTH, PROBE_SECONDS = 16384, 8, 1.0
"""A bandwidth probe begins with `PROBED_FIRST` numbers of a bucket and grows by `GROWTH` while the next sum is expected
to take at most `PROBE_SECONDS`: a link that has become slower must not hold up the training, and fewer bytes show it as
well."""
REST, SHORTEST_REST, LONGEST_REST = 100, 10.0, 600.0
"""The pause before the next look at all hooks: `REST` times the duration of a bandwidth probe, at least `SHORTEST_REST`
seconds, twice as long after each look, at most `LONGEST_REST` seconds."""
BY_NODE_LATENCIES = 2.0
TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCost:
    """The costs of one hook: what it sends for each byte of gradients, and how long it computes for that."""

    bytes_share: float = 1.0
    latencies: float = 1.0
    cost_per_byte: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep(StepParts):
    """The measured parts of a step with the present hook. `hiding_seconds` is that of the plain sums."""

    exposed_seconds: float
    """Seconds of communication that nothing hides, with what the present hook computes after the backward pass."""


def exposed(step: MeasuredStep, link: Link, means: CommCost) -> float:
    """Return the seconds for which sums are expected to hold up a step. The computation of compression is never hidden:
    it comes after the backward pass, or takes its time from it."""
    network = step.predict_exposed(lambda size: link.seconds(means.bytes_share * size, means.latencies))
    return network + means.cost_per_byte * sum(step.buckets)


def expect(step: MeasuredStep, link: Link, known: Mapping[str, CommCost], off: Mapping[str, float]) -> dict[str, float]:
    """Return the expected seconds of a step with each known hook. ``off`` holds what was measured beyond `exposed` with
    the hooks that have been used; the others are expected to be off by as much as plain sums."""
    usual = max(0.0, off.get(PLAIN, 0.0))
    return {
        name: step.computing_seconds + max(0.0, exposed(step, link, means) + off.get(name, usual))
        for name, means in known.items()
    }


def choose(present: str, expected: Mapping[str, float]) -> str:
    """Return the gentlest hook whose step is expected to take about as long as the best one's."""
    seconds = {name: HANDICAP.get(name, 1.0) * value for name, value in expected.items()}
    best = min(seconds.values())
    names = [name for name in GENTLE_FIRST if name in seconds]
    return next(name for name in names if seconds[name] <= best * (CLEARLY if name == present else NEARLY))


def is_settled(present: str, verdicts: Sequence[str], expected: Mapping[str, float]) -> bool:
    """Return whether to act on the last verdict. ``verdicts`` are those of the latest windows, at most `AGREEING`."""
    if present == PLAIN and expected[present] > AT_ONCE * expected[verdicts[-1]]:
        return True
    return len(verdicts) == AGREEING and len(set(verdicts)) == 1


def rest_of(link: Link, bytes_: int, looks: int) -> float:
    """Return the seconds until the next look at all hooks, after this many looks; a bandwidth probe sums ``bytes_``."""
    first = max(SHORTEST_REST, REST * SUMS * link.seconds(bytes_))
    return max(first, min(LONGEST_REST, first * 2.0 ** min(looks, 20)))


class AutoCompression:
    """The present choice of hook for a world, reviewed at the end of each of its windows."""

    def __init__(self, world: World, nodes: Sequence[int], fraction: float, may_drop: bool) -> None:
        """``nodes`` holds the node of each rank; ``may_drop`` allows top-k."""
        self.world, self.nodes, self.fraction, self.may_drop = world, nodes, fraction, may_drop
        self.present = PLAIN
        self._known: dict[str, CommCost] = {PLAIN: CommCost()}
        self._off: dict[str, float] = {}
        self._hiding = 0.0
        self._link = Link(latency_seconds=0.0, seconds_per_byte=0.0)
        """The link as plain sums last measured it."""
        self._age, self._looks = 0.0, 0
        """Seconds of training since the last change or look, and the number of looks."""
        self._windows, self._told = 0, False
        self._verdicts: deque[str] = deque(maxlen=AGREEING)

    def review(self, window: TimingWindow, buckets: Sequence[Tensor]) -> dict[str, Any] | None:
        """Review the choice after a window, and return the fields of a ``communication`` event, None where there is
        nothing to report; `present` is the hook to use from now on. ``buckets`` are like those of the gradients. At
        times this is a collective, on all ranks alike, since all have the same windows."""
        self._windows += 1
        if self._windows == 1 or window.values.shape[1] < LEAST_STEPS or not buckets:
            return None  # the first steps of a world are like no others
        held_up, seconds = float(np.median(window.network)), window.typical_seconds
        largest = max(buckets, key=Tensor.numel)
        if self.present == PLAIN:
            self._link = link_of(window.network_times)
            self._hiding = max(0.0, sum(took for _, took in window.network_times) - held_up)
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
                self._link = link_of(self._probe_link(largest))
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
        """Return the expected seconds of a step with each hook; for the present one they are the measured ones."""
        self._off[self.present] = step.exposed_seconds - exposed(step, self._link, self._known[self.present])
        return expect(step, self._link, self._known, self._off)

    def _is_look_due(self, expected: Mapping[str, float], bytes_: int) -> bool:
        """Return whether to forget the measurements of other hooks, and to probe the link where steps do not show it.
        That is due now and then, and sooner where old measurements say that the present hook should be given up."""
        if self.present == PLAIN:
            return len(self._off) > 1 and self._age >= rest_of(self._link, bytes_, self._looks)
        is_doubted = choose(self.present, expected) != self.present
        return self._age >= rest_of(self._link, bytes_, 0 if is_doubted else self._looks)

    def _probe_link(self, bucket: Tensor) -> list[tuple[int, float]]:
        """Return (bytes, seconds) of two plain sums without waiting for ranks: of one number, and of a tensor like this
        bucket, or like a part of it where the whole would take too long."""
        assert self.world.group is not None
        numbers, *took = self.world.group.run("bandwidth probe", partial(_time_plain, bucket))
        quickest = [min(values) for values in zip(*self.world.all_gather_object(took), strict=True)]
        return list(zip((bucket.itemsize, int(numbers) * bucket.itemsize), quickest, strict=True))

    def _try(self, bucket: Tensor, link: Link) -> dict[str, CommCost]:
        """Return the costs of the other hooks, timed on a tensor like this bucket on all ranks at once."""
        names = [name for name in GENTLE_FIRST[1:] if name != "topk" or self.may_drop]
        if not 1 < len(set(self.nodes)) < len(self.nodes):
            names.remove("hierarchical")
        hooks = {name: make_comm_hook(name, self.nodes, self.fraction) for name in names}
        assert self.world.group is not None
        took = self.world.group.run("trial of compression", partial(_time, hooks, bucket))
        slowest = [max(values) for values in zip(*self.world.all_gather_object(took), strict=True)]
        found: dict[str, CommCost] = {}
        for (name, hook), seconds in zip(hooks.items(), slowest, strict=True):
            share, latencies = hook.bytes_of(bucket) / bucket.nbytes, 1.0
            if name == "hierarchical":  # the time beyond that between nodes is spent within them
                latencies = BY_NODE_LATENCIES
                seconds -= link.seconds(share * bucket.nbytes, latencies)
            cost = max(0.0, seconds) / bucket.nbytes
            found[name] = CommCost(bytes_share=share, latencies=latencies, cost_per_byte=cost)
        return found


def _time(hooks: Mapping[str, CommHook], bucket: Tensor, transport: Any) -> list[float]:
    """Return the seconds of each hook: of computing alone, except for sums by node, which go over the network."""
    found = []
    for name, hook in hooks.items():
        taken: CompressionTransport = transport if name == "hierarchical" else LoopbackTransport()
        seconds = []
        for step in range(TRIALS):
            tensor = torch.randn_like(bucket)
            _finish(tensor)
            began = time.monotonic()
            hook.all_reduce(tensor, 0, step, taken, nullcontext)
            _finish(tensor)
            seconds.append(time.monotonic() - began)
        found.append(min(seconds))
    return found


def _time_plain(bucket: Tensor, transport: Transport) -> list[float]:
    """Return how many numbers of this bucket were summed in the end, the same on all ranks; the seconds of a sum of one
    number, after which all ranks are there; and the seconds of that last sum."""

    def seconds_of(like: Tensor) -> float:
        tensor = torch.randn_like(like)
        _finish(tensor)
        began = time.monotonic()
        transport.all_reduce(tensor)
        _finish(tensor)
        return time.monotonic() - began

    latency = min(seconds_of(bucket[:1]) for _ in range(TRIALS))
    numbers = min(PROBED_FIRST, bucket.numel())
    while True:
        seconds = [seconds_of(bucket[:numbers]) for _ in range(SUMS)][-1]
        longest = torch.tensor([seconds], dtype=torch.float64)
        transport.all_reduce(longest)  # so that all ranks end alike: no less than any of them has measured
        if numbers == bucket.numel() or GROWTH * longest.item() > PROBE_SECONDS:
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
    text = f"communication takes up {share:.0%} of a step; with {choice} one takes {1000 * expected[choice]:.3g} ms"
    return f"{text}, and would take {others}" if others else f"{text}: nothing to gain"
