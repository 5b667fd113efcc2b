"""The scaling of a training with ranks: measured where there are some, modelled beyond, and never mixed up.

The model of a step of W ranks:

    step = (local work + start of sums) x slowdown + noise x sqrt(2 ln W) + exposed
    exposed = last bucket + commit + what the other buckets take beyond the backward pass
    all-reduce of b bytes = min(2 (W-1) a + 2 (W-1)/W b/B, 2 ceil(log2 W) (a + b/B)), a ring or a tree

with a, the seconds that one message takes however small, and B, bytes per second. The local work (all of a step but
communication and waiting), its noise and the buckets are measured; a and B are fitted to measured all-reduces, or
stated for a link that is not here. The slowdown, and what ranks spend on starting sums beyond their time on the link,
come from the smaller of the measured worlds. Nothing is said of worlds beyond the measured ones unless the model
meets one that it has not seen: see `Study.withheld`. Pure functions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.scaling_figures import Mode, ScalingPoint, efficiency
from trainer.performance.link import Link, bytes_carried, exposed_seconds, fit_link, ring_messages

TOLERANCE = 0.2
"""The largest relative error on a world that the model has not seen with which it is shown beyond the measured ones."""
COMMIT_BYTES = 176
"""Bytes of the small all-reduce with which a step of the default model is committed
(`trainer.engine.step.TrainingStep`). Others have eight for each parameter more or less, which is little beside its
latency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingLink:
    """A link with its name. ``inner``: a faster one among ``group`` ranks of one machine; the sums of machines then go
    over this one."""

    name: str
    message: Link
    """The time that one message takes."""
    source: str
    inner: ScalingLink | None = None
    group: int = 1


def _stated(latency_seconds: float, bytes_per_second: float) -> Link:
    return Link(latency_seconds=latency_seconds, seconds_per_byte=1 / bytes_per_second)


LINKS = (
    ScalingLink(
        name="Ethernet, 24 Gbit/s",
        message=_stated(30e-6, 24e9 / 8),
        source="bandwidth that Azure states for NC24s_v3; 30 us is usual for TCP with accelerated networking",
    ),
    ScalingLink(
        name="InfiniBand EDR, 100 Gbit/s",
        message=_stated(5e-6, 100e9 / 8),
        source="NC24rs_v3; nominal",
    ),
    ScalingLink(
        name="NVLink of 8, InfiniBand HDR 200 Gbit/s between",
        message=_stated(5e-6, 200e9 / 8),
        source="nominal",
        inner=ScalingLink(name="NVLink 2", message=_stated(3e-6, 150e9), source="V100: 300 GB/s, both ways together"),
        group=8,
    ),
)
"""Links that are stated, not measured, with nominal bandwidths; the lower bound of a model takes `WORST_BANDWIDTH` of
them."""
WORST_BANDWIDTH = 0.5
WORST_NOISE = 2.0
"""The factor of the lower bound on the measured noise; the upper bound has no noise."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def fit_scaling_link(observed: Sequence[tuple[int, int, float]], name: str) -> ScalingLink:
    """Return the link fitted to measured all-reduces, which are taken for rings: (world size, bytes, seconds on the
    network). Raise ValueError if there are none."""
    rows = [
        (ring_messages(world), bytes_carried(world) * size, seconds)
        for world, size, seconds in observed
        if world > 1 and seconds > 0
    ]
    if not rows:
        raise ValueError("no all-reduce was measured: a link can only be fitted to runs of two ranks or more")
    return ScalingLink(name=name, message=fit_link(rows), source=f"fitted to {len(rows)} measured all-reduces")


def all_reduce_seconds(size: float, world: int, link: ScalingLink) -> float:
    """Return the seconds of one all-reduce of ``size`` bytes over ``world`` ranks: by ring or tree, whichever is
    faster."""
    if world < 2:
        return 0.0
    if link.inner is not None and link.group > 1:
        group = min(link.group, world)
        within = link.inner.message.over_ring(group).seconds(size)
        return within + all_reduce_seconds(-(-size // group), -(-world // group), replace(link, inner=None))
    return min(way.seconds(size) for way in (link.message.over_ring(world), link.message.over_tree(world)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingModel:
    """The parts of a step, from one measured point of one rank."""

    micro_batch_seconds: float
    """The local work of one micro-batch: forward and backward, its part of the update, and all around them."""
    backward_share: float
    noise_seconds: float
    """Standard deviation of one micro-batch."""
    buckets: tuple[int, ...]
    """Bytes of each gradient bucket, in the order in which they are summed."""
    cores: float | None = None
    """If all ranks share one machine: how many of them it can run at full speed. None: each has its own cores."""
    slowdown: float = 1.0
    """The factor of the local work of ranks with cores of their own, in a world of several."""
    summing_seconds: float = 0.0
    """What a rank spends on sums itself, however long they take on the link: their start, and copies."""

    def crowding(self, world: int) -> float:
        """Return the factor of the local work in a world of this many ranks."""
        if self.cores:
            return max(1.0, world / self.cores)
        return self.slowdown if world > 1 else 1.0


def model_of(single: ScalingPoint, seen: Sequence[ScalingPoint], cores: float | None = None) -> ScalingModel:
    """Return the model from measured points of one rank and of several. ``cores``: of the machine that all ranks share;
    how many ranks it runs at full speed may be fewer, as the points with several show: cores share caches, memory and
    often the units that compute. Without ``cores`` they show by how much a rank is slower in a world of several."""
    ratios = [point.local_share_seconds / single.local_share_seconds for point in seen]
    if cores is not None:
        fewer = [point.world_size / ratio for point, ratio in zip(seen, ratios, strict=True) if ratio > 1]
        cores = min([cores, *([statistics.median(fewer)] if fewer else [])])
    return ScalingModel(
        micro_batch_seconds=single.local_seconds / single.micro_batches,
        backward_share=single.backward_seconds / single.local_seconds,
        noise_seconds=single.noise_seconds / math.sqrt(single.micro_batches),
        buckets=seen[0].buckets,
        cores=cores,
        slowdown=max(1.0, statistics.median(ratios)) if cores is None else 1.0,
    )


def predict(model: ScalingModel, world: int, link: ScalingLink, micro_batches: int, noise_factor: float = 1.0) -> float:
    """Return the seconds of a step of ``micro_batches`` micro-batches, divided among ``world`` ranks."""
    each = math.ceil(micro_batches / world)
    computing = model.micro_batch_seconds * each * model.crowding(world)
    noise = noise_factor * model.noise_seconds * math.sqrt(each) * math.sqrt(2 * math.log(world))
    return computing + noise + predict_communication(model, world, link)


def predict_communication(model: ScalingModel, world: int, link: ScalingLink) -> float:
    """Return the seconds for which communication holds a step of ``world`` ranks up."""
    if world < 2:
        return 0.0
    crowding = model.crowding(world)
    backward = model.micro_batch_seconds * crowding * model.backward_share  # only the last micro-batch's has buckets
    exposed = exposed_seconds([all_reduce_seconds(size, world, link) for size in model.buckets], backward)
    return exposed + all_reduce_seconds(COMMIT_BYTES, world, link) + model.summing_seconds * crowding


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Modelled efficiency over world sizes: (ranks, lower bound, expected, upper bound)."""

    link: ScalingLink
    mode: Mode
    rows: tuple[tuple[int, float, float, float], ...]


def modelled(
    model: ScalingModel,
    link: ScalingLink,
    mode: Mode,
    micro_batches_per_rank: int,
    sizes: Sequence[int] = SIZES,
    missed: float = 0.0,
) -> Curve:
    """Return the efficiency against one rank. Weak: each rank keeps its micro-batches. Strong: the largest world has
    one micro-batch for each rank, smaller ones do the same step with more each. ``missed``: the relative error of the
    model where it was checked; the range is wider by it."""
    rows = []
    per_byte = link.message.seconds_per_byte / WORST_BANDWIDTH
    slow = replace(link, message=replace(link.message, seconds_per_byte=per_byte))
    for world in sizes:
        total = micro_batches_per_rank * world if mode == "weak" else max(sizes)
        alone = model.micro_batch_seconds * total
        low, mid, high = (
            min(1.0, alone / world / predict(model, world, by, total, factor))
            for by, factor in ((slow, WORST_NOISE), (link, 1.0), (link, 0.0))
        )
        rows.append((world, low / (1 + missed), mid, min(1.0, high * (1 + missed))))
    return Curve(link=link, mode=mode, rows=tuple(rows))


def with_summing(model: ScalingModel, link: ScalingLink, seen: Sequence[ScalingPoint]) -> ScalingModel:
    """Return the model with what ranks spent on sums in these points beyond what the link explains."""
    beyond = []
    for point in seen:
        rest = point.network_seconds - predict_communication(model, point.world_size, link)
        beyond.append(rest / model.crowding(point.world_size))
    return replace(model, summing_seconds=max(0.0, statistics.median(beyond)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A test of the model, fitted on the smaller worlds, against a larger one that it has not seen."""

    fitted_on: tuple[int, ...]
    """World sizes."""
    world_size: int
    mode: Mode
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """The relative error; above 0 the model is too slow."""
        return self.predicted_seconds / self.measured_seconds - 1


def check_prediction(
    points: Sequence[ScalingPoint], cores: float | None
) -> tuple[ScalingLink, tuple[Check, ...]] | None:
    """Fit the link on all worlds but the largest and predict the largest; return the link and the checks, None if there
    are not enough worlds."""
    worlds = sorted({point.world_size for point in points})
    single = next((point for point in points if point.world_size == 1), None)
    if single is None or len(worlds) < 3:
        return None
    seen = [point for point in points if 1 < point.world_size < worlds[-1]]
    observed = [(point.world_size, size, seconds) for point in seen for size, seconds in point.all_reduces]
    link = fit_scaling_link(observed, "the link here")
    model = with_summing(model_of(single, seen, cores), link, seen)
    checks = tuple(
        Check(
            fitted_on=tuple(worlds[:-1]),
            world_size=point.world_size,
            mode=point.mode,
            measured_seconds=point.step_seconds,
            predicted_seconds=predict(model, point.world_size, link, point.micro_batches),
        )
        for point in points
        if point.world_size == worlds[-1]
    )
    return link, checks


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The results on a training's scaling."""

    verdict: str
    points: tuple[ScalingPoint, ...]
    checks: tuple[Check, ...]
    links: tuple[ScalingLink, ...]
    """The fitted one first, if there is one; then those that are stated."""
    curves: tuple[Curve, ...]
    """None where the model has not proved itself, see ``withheld``."""
    withheld: str
    """Why no world beyond the measured ones is shown; "" where the model is shown."""

    @property
    def error(self) -> float | None:
        """The error of the check that the model met worst; None without a check."""
        return max((item.error for item in self.checks), key=abs, default=None)


def explain_withheld(checks: Sequence[Check], largest: int) -> str:
    """Return why nothing beyond ``largest`` ranks can be said, "" where the model met all checks."""
    said = f"No figures are given for more than {largest} rank(s): "
    if not checks:
        return said + "the model cannot be checked without runs of one rank and of two other world sizes."
    worst = max(checks, key=lambda item: abs(item.error))
    if abs(worst.error) <= TOLERANCE:
        return ""
    seen = " and ".join(map(str, worst.fitted_on))
    return said + (
        f"the model, fitted on {seen} rank(s), misses the step of {worst.world_size}"
        f", which it had not seen, by {worst.error:+.0%}; its limit is {TOLERANCE:.0%}."
    )


def study(points: Sequence[ScalingPoint], cores: float | None) -> Study:
    """Return the results of measured points. ``cores``: see `ScalingModel`; the modelled worlds have their own
    cores."""
    checked = check_prediction(points, cores)
    fitted, checks = checked if checked else (None, ())
    links = (*([fitted] if fitted else []), *LINKS)
    withheld = explain_withheld(checks, max(point.world_size for point in points))
    curves: tuple[Curve, ...] = ()
    if not withheld:
        [single] = [point for point in points if point.world_size == 1][:1]
        several = [point for point in points if point.world_size > 1]
        # What ranks that share a machine cost each other says nothing of ranks with cores of their own.
        model = model_of(single, several, cores)
        alone = replace(with_summing(model, fitted, several) if fitted else model, cores=None)
        missed = max(abs(item.error) for item in checks)
        curves = tuple(
            modelled(alone, link, mode, single.micro_batches, missed=missed)
            for mode in ("weak", "strong")
            for link in links
        )
    return Study(
        verdict=summarize_scaling(points, checks, cores, withheld),
        points=tuple(points),
        checks=checks,
        links=links,
        curves=curves,
        withheld=withheld,
    )


def summarize_scaling(
    points: Sequence[ScalingPoint], checks: Sequence[Check], cores: float | None, withheld: str
) -> str:
    """Return in a few sentences how well the training scales here, what limits it, and how far the model can be
    trusted."""
    weak = efficiency(points, "weak")
    base, largest = min(weak), max(weak)
    if largest == base:
        return f"{'One rank' if base == 1 else f'{base} ranks'} only: there is nothing to compare with."
    point = next(item for item in points if item.world_size == largest)
    said = f"{largest} ranks work at {weak[largest]:.0%} of the pace of {base} rank(s) each (weak scaling)"
    causes = {
        "communication": point.network_seconds,
        "waiting for slower ranks": point.waiting_seconds,
    }
    if cores is not None and largest > cores:
        crowded = 1 - cores / largest / min(1.0, cores / base)
        said += f"; they share {cores:g} core(s), which alone can cost up to {crowded:.0%} of that pace"
    name, seconds = max(causes.items(), key=lambda item: item[1])
    said += f"; {name} takes {seconds / point.step_seconds:.0%} of a step."
    if checks and not withheld:
        worst = max(checks, key=lambda item: abs(item.error))
        said += f" The model, fitted without {worst.world_size} ranks, misses their step by {worst.error:+.0%} at most."
    return f"{said} {withheld}".rstrip()
