"""Late ranks, since when they are late, and why, from windows of one world. Pure.

Lateness is the time that the others wait. It is judged window by window against the other ranks, so that a cause which
slows all of them, and noise that hits now this one and now that one, is blamed on none. Nor is a rank blamed that
shares cores with other ranks, unless its computation takes far longer than sharing can explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from dtrain_dagster.monitoring.windows import NOISE_FACTOR, ranks_that_share_cores, seconds_of
from trainer.documents.events import TimingEvent

LATE_SHARE = 0.03
"""Share of the step: a rank that is later, and well above noise, is called a straggler."""
USUAL_NOISE, USUAL_WEIGHT = 0.02, 3
"""Noise from window to window on a shared machine, as a share of the step, and the number of windows that it weighs as
much as: a few windows may agree by chance better than any machine does."""
LEAST_LATENESS = 0.0005
"""Least seconds of a lateness: to wake a thread on another core takes nearly as long, for one rank more than others."""
DEAL_ERROR = 0.10
"""Relative error of the assumption that a rank's time is proportional to its samples."""
FEWEST_WINDOWS, FEWEST_AT_THE_END, FEWEST_OF_MEANS = 3, 5, 8
"""Windows that a lateness must have lasted: at least, where it began within the run, and where it is not typical of
steps but a mean, which one long step spoils."""
LEAST_SECONDS = 2.0
"""Least wall seconds of a lateness: where steps are short, many windows pass while a machine is held up once, and
nobody replaces it for that."""
SHARING_MARGIN = 2.0
"""A rank that shares cores is blamed only if its computation takes this many times what sharing can explain."""
MEANS_NOISE = 2.0
"""Noise of means relative to that of medians."""

Why = Literal["input", "compute", "outside input and compute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    node_id: int
    why: Why
    typically: bool
    """Whether it is late in most steps; False: on average, by pauses in some."""
    late_seconds: float
    """Lateness in seconds per step, against the median of the other ranks."""
    late_share: float
    """Lateness as a share of the step."""
    own_seconds: float
    other_seconds: float
    """Seconds of its input or computation, and those of the others."""
    since_step: int
    from_the_start: bool
    windows: int
    of_windows: int
    lost_seconds: float
    """Wall seconds that its lateness has cost."""


def stragglers(windows: Sequence[TimingEvent]) -> list[Straggler]:
    """Return the ranks that hold the others up, the costliest first. ``windows`` of one world, in order of time."""
    if len(windows) < FEWEST_WINDOWS or windows[0].world_size < 2:
        return []
    sharing = ranks_that_share_cores(windows[-1])
    found: dict[int, Straggler] = {}
    for typically, lateness in ((True, _typically_late), (False, _late_on_average)):
        rows = [_against_others(lateness(window)) for window in windows]
        noise = _noise([[value / window.seconds for value in row] for row, window in zip(rows, windows, strict=True)])
        for rank in range(windows[0].world_size):
            series = [row[rank] for row in rows]
            straggler = _judge(windows, rank, series, noise if typically else MEANS_NOISE * noise, typically)
            if straggler and (rank not in sharing or _is_beyond_sharing(straggler, windows[-1])):
                found.setdefault(rank, straggler)
    return sorted(found.values(), key=lambda item: item.lost_seconds, reverse=True)


def _is_beyond_sharing(straggler: Straggler, window: TimingEvent) -> bool:
    """Return whether a rank's computation takes far longer than it would if it always had to share its core."""
    ranks, cores = window.machines.count(window.machines[straggler.rank]), window.cores[straggler.rank]
    most = SHARING_MARGIN * math.ceil(ranks / cores) * straggler.other_seconds
    return straggler.typically and straggler.why == "compute" and straggler.own_seconds > most


def dealt_seconds(window: TimingEvent) -> list[float]:
    """Return by how many seconds per step each rank is later, for its samples, than the one with least work."""
    if len(window.samples) != window.world_size or len(set(window.samples)) == 1:
        return [0.0] * window.world_size
    computing = _segments(window, "forward", "backward")
    rates = [seconds / samples for seconds, samples in zip(computing, window.samples, strict=True) if samples]
    rate = statistics.median(rates) if rates else 0.0
    return [rate * (samples - min(window.samples)) for samples in window.samples]


def _judge(
    windows: Sequence[TimingEvent], rank: int, series: Sequence[float], noise: float, typically: bool
) -> Straggler | None:
    """Return the straggler if this rank is late in windows that count. ``series``: its seconds, ``noise`` relative."""
    late = [seconds / window.seconds for seconds, window in zip(series, windows, strict=True)]
    first, last = _interval([value - LATE_SHARE / 2 for value in late])
    count = last - first
    whole = count >= 0.6 * len(late)
    fewest = FEWEST_WINDOWS if typically else FEWEST_OF_MEANS
    if count < fewest or not (whole or (last == len(late) and count >= FEWEST_AT_THE_END)):
        return None
    interval = windows[first:last]
    lasted = seconds_of(interval)
    if lasted < LEAST_SECONDS:
        return None
    share = statistics.median(late[first:last])
    # The standard error of a median; of few values it is uncertain itself, and a search always finds some segment.
    error = 1.2533 * noise / math.sqrt(count) * (1 + 2 / count)
    dealt = statistics.median(max(dealt_seconds(window)) / window.seconds for window in windows)
    least = LATE_SHARE + DEAL_ERROR * dealt
    if share < least or share < NOISE_FACTOR * error or statistics.median(series[first:last]) < LEAST_LATENESS:
        return None
    why, own, others = _reason(interval, rank, statistics.median(series[first:last]), typically)
    return Straggler(
        rank=rank,
        node_id=windows[0].nodes[rank],
        why=why,
        typically=typically,
        late_seconds=statistics.median(series[first:last]),
        late_share=share,
        own_seconds=own,
        other_seconds=others,
        since_step=interval[0].step - interval[0].steps,
        from_the_start=first <= max(1, len(late) // 10),
        windows=sum(value > LATE_SHARE / 2 for value in late),
        of_windows=len(late),
        lost_seconds=share * lasted,
    )


def _reason(windows: Sequence[TimingEvent], rank: int, late: float, typically: bool) -> tuple[Why, float, float]:
    """Return what explains the lateness best, with the rank's own seconds and those of the others."""
    looks: dict[Why, Callable[[TimingEvent], list[float]]] = {"input": _input, "compute": _compute}
    if not typically:
        looks = {
            "input": lambda window: _segments(window, "input"),
            "compute": lambda window: _segments(window, "forward", "backward", "optimizer"),
        }
    best: tuple[Why, float, float] = ("outside input and compute", 0.0, 0.0)
    most = late / 3
    for name, look in looks.items():
        rows = [look(window) for window in windows]
        own = statistics.median(row[rank] for row in rows)
        others = statistics.median(
            statistics.median(value for place, value in enumerate(row) if place != rank) for row in rows
        )
        if own - others > most:
            best, most = (name, own, others), own - others
    return best


def _typically_late(window: TimingEvent) -> list[float]:
    late = window.typical.get("late")
    return _explained(window, late) if late else _late_on_average(window)


def _late_on_average(window: TimingEvent) -> list[float]:
    """Return lateness from means: the rank that waits least is late."""
    waiting = _segments(window, "waiting")
    return _explained(window, [max(waiting) - value for value in waiting])


def _explained(window: TimingEvent, late: Sequence[float]) -> list[float]:
    """Return the lateness without what more samples and saves account for: neither is the rank's fault. Saves that are
    in the mean and not in the median must not make the rank look early, and the others late."""
    late = _without(late, dealt_seconds(window))
    saving = _segments(window, "checkpoint")
    return [value - min(save, max(0.0, value)) for value, save in zip(late, saving, strict=True)]


def _input(window: TimingEvent) -> list[float]:
    return list(window.typical.get("input") or _segments(window, "input"))


def _compute(window: TimingEvent) -> list[float]:
    """Return the computation as if all ranks had the samples of the one with least work."""
    seconds = window.typical.get("compute") or _segments(window, "forward", "backward", "optimizer")
    return _without(seconds, dealt_seconds(window))


def _segments(window: TimingEvent, *names: str) -> list[float]:
    empty = (0.0,) * window.world_size
    return [sum(values) for values in zip(*(window.segments.get(name, empty) for name in names), strict=True)]


def _without(values: Sequence[float], less: Sequence[float]) -> list[float]:
    return [value - minus for value, minus in zip(values, less, strict=True)]


def _against_others(values: Sequence[float]) -> list[float]:
    return [value - statistics.median([*values[:rank], *values[rank + 1 :]]) for rank, value in enumerate(values)]


def _noise(rows: Sequence[Sequence[float]]) -> float:
    """Return the robust standard deviation of one rank's figure from window to window. It uses differences of
    neighbours, so that a lateness that begins within the run does not count as noise."""
    steps = [abs(b - a) for before, after in pairwise(rows) for a, b in zip(before, after, strict=True)]
    measured = 1.4826 * statistics.median(steps) / math.sqrt(2)
    return math.sqrt((len(rows) * measured**2 + USUAL_WEIGHT * USUAL_NOISE**2) / (len(rows) + USUAL_WEIGHT))


def _interval(values: Sequence[float]) -> tuple[int, int]:
    """Return [first, last) of the consecutive values with the largest sum."""
    best, best_sum, first, current = (0, 0), 0.0, 0, 0.0
    for place, value in enumerate(values):
        if current <= 0:
            first, current = place, 0.0
        current += value
        if current > best_sum:
            best, best_sum = (first, place + 1), current
    return best
