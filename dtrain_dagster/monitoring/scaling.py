"""The scaling of a training with ranks: measured where there are some, modelled beyond, and never mixed up.

The model of a step of W ranks:

    step = compute + noise x sqrt(2 ln W) + exposed communication (`trainer.performance.step`)
    exposed = last bucket + commit + what the other buckets take beyond the backward pass
    all-reduce of b bytes = min(2 (W-1) a + 2 (W-1)/W b/B, 2 ceil(log2 W) (a + b/B)), a ring or a tree

with a, the seconds that one message takes however small, and B, bytes per second. Compute, its noise and the buckets
are measured; a and B are fitted to measured all-reduces, or stated for a link that is not here. Pure functions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dtrain_dagster.monitoring.windows import typical_collectives, windows
from trainer.documents.events import StepEvent, read_events
from trainer.performance.link import Link, bytes_carried, fit_link, ring_messages
from trainer.performance.step import StepParts

Mode = Literal["weak", "strong"]
WARM_UP = 1
"""Logged windows of a short run that are left out: the first steps warm caches up."""
COMMIT_BYTES = 176
"""Bytes of the small all-reduce with which a step of the default model is committed
(`trainer.engine.step.TrainingStep`). Others have eight for each parameter more or less, which is little beside its
latency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One short run. Seconds are medians over its logged windows, per optimizer step."""

    mode: Mode
    nodes: int
    world_size: int
    micro_batches: int
    """Micro-batches of a step, over all ranks."""
    global_batch: int
    step_seconds: float
    step_seconds_low: float
    """The fastest logged window; `step_seconds_high` is the slowest."""
    step_seconds_high: float
    compute_seconds: float
    """Forward, backward and update of a rank, mean over ranks."""
    backward_seconds: float
    network_seconds: float
    """Exposed communication; waiting for slower ranks is not in it."""
    waiting_seconds: float
    """Waiting for slower ranks, mean over ranks."""
    noise_seconds: float
    """Standard deviation of one rank's compute from step to step, as far as the windows show it."""
    all_reduces: tuple[tuple[int, float], ...]
    """(bytes, seconds on the network) of each collective of a step: buckets in order, then the commit."""
    buckets: tuple[int, ...]
    """Bytes of each gradient bucket, in the order in which they are summed; none in a world of one."""
    usd_per_epoch: float

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.global_batch / self.step_seconds

    @property
    def communication_to_compute(self) -> float:
        """The exposed communication as a share of the computation."""
        return self.network_seconds / self.compute_seconds if self.compute_seconds else 0.0


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

CLAIMED = {1: 1.0, 2: 0.98, 4: 0.95, 8: 0.93, 16: 0.89, 32: 0.84, 64: 0.78, 128: 0.72, 256: 0.63}
"""Efficiencies that the framework's checklist claims for up to 256 GPUs, of unknown origin: drawn for comparison."""


def read_point(
    events: Sequence[Mapping[str, Any]], mode: Mode, nodes: int, training: Mapping[str, Any], samples: int,
    usd_per_node_hour: float,
) -> ScalingPoint:  # fmt: skip
    """Return the figures of a short run. ``training``: the job's section of that name; ``samples``: the samples of an
    epoch. Raise ValueError if the run has no figures."""
    told = [item.step_seconds for item in read_events(StepEvent, events) if item.step_seconds is not None]
    seconds, timings = told[WARM_UP:], windows(events)[WARM_UP:]
    if not seconds or not timings:
        raise ValueError("the run is too short: it has logged no step after its warm-up")
    step = statistics.median(seconds)
    world = timings[0].world_size
    micro_batches = training["gradient_accumulation_steps"] * training["world_size"]
    batch = training["batch_size_per_gpu"] * micro_batches
    compute = [item.mean("forward", "backward", "optimizer") for item in timings]
    collectives = typical_collectives(timings)
    return ScalingPoint(
        mode=mode,
        nodes=nodes,
        world_size=world,
        micro_batches=micro_batches,
        global_batch=batch,
        step_seconds=step,
        step_seconds_low=min(seconds),
        step_seconds_high=max(seconds),
        compute_seconds=statistics.median(compute),
        backward_seconds=statistics.median(item.mean("backward") for item in timings),
        network_seconds=statistics.median(item.mean("communication") for item in timings),
        waiting_seconds=statistics.median(item.mean("waiting") for item in timings),
        noise_seconds=_spread(compute) * math.sqrt(timings[0].steps * world),
        all_reduces=tuple((item.bytes, item.network_seconds) for item in collectives),
        buckets=tuple(item.bytes for item in collectives if "bucket" in item.name),
        usd_per_epoch=nodes * usd_per_node_hour / 3600 * step * math.ceil(samples / batch),
    )


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation as estimated from the median of absolute deviations: one window with a hiccup does
    not count."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def efficiency(points: Iterable[ScalingPoint], mode: Mode) -> dict[int, float]:
    """Return for each world size the samples per second per rank, as a share of those of the smallest world; 1 is
    perfect."""
    mine = sorted((point for point in points if point.mode == mode), key=lambda point: point.world_size)
    if not mine:
        return {}
    base = mine[0].samples_per_second / mine[0].world_size
    return {point.world_size: point.samples_per_second / point.world_size / base for point in mine}


def fit_scaling_link(observed: Sequence[tuple[int, int, float]], name: str) -> ScalingLink:
    """Return the link fitted to measured all-reduces, which are taken for rings: (world size, bytes, seconds on the
    network). Raise ValueError if there are none."""
    rows = [
        (ring_messages(world), bytes_carried(world) * size, seconds) for world, size, seconds in observed
        if world > 1 and seconds > 0
    ]  # fmt: skip
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
    """Forward and backward of one micro-batch, and its part of the update."""
    backward_share: float
    noise_seconds: float
    """Standard deviation of one micro-batch."""
    buckets: tuple[int, ...]
    """Bytes of each gradient bucket, in the order in which they are summed."""
    cores: float | None = None
    """If all ranks share one machine: how many of them it can run at full speed. None: each has its own cores."""


def model_of(single: ScalingPoint, buckets: Sequence[int], cores: float | None = None) -> ScalingModel:
    """Return the model from a measured point of one rank. ``buckets`` come from a point with several: one rank sums
    nothing."""
    return ScalingModel(
        micro_batch_seconds=single.compute_seconds / single.micro_batches,
        backward_share=single.backward_seconds / single.compute_seconds,
        noise_seconds=single.noise_seconds / math.sqrt(single.micro_batches),
        buckets=tuple(buckets),
        cores=cores,
    )


def predict(model: ScalingModel, world: int, link: ScalingLink, micro_batches: int, noise_factor: float = 1.0) -> float:
    """Return the seconds of a step of ``micro_batches`` micro-batches, divided among ``world`` ranks."""
    each = math.ceil(micro_batches / world)
    crowded = max(1.0, world / model.cores) if model.cores else 1.0
    compute = model.micro_batch_seconds * each * crowded
    noise = noise_factor * model.noise_seconds * math.sqrt(each) * math.sqrt(2 * math.log(world))
    step = StepParts(
        computing_seconds=compute + noise,
        hiding_seconds=compute / each * model.backward_share,  # only the last micro-batch's backward pass has buckets
        buckets=model.buckets,
    )
    seconds = step.predict_seconds(lambda size: all_reduce_seconds(size, world, link))
    return seconds + all_reduce_seconds(COMMIT_BYTES, world, link)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Modelled efficiency over world sizes: (ranks, lower bound, expected, upper bound)."""

    link: ScalingLink
    mode: Mode
    rows: tuple[tuple[int, float, float, float], ...]


def modelled(
    model: ScalingModel, link: ScalingLink, mode: Mode, micro_batches_per_rank: int, sizes: Sequence[int] = SIZES
) -> Curve:
    """Return the efficiency against one rank. Weak: each rank keeps its micro-batches. Strong: the largest world has
    one micro-batch for each rank, smaller ones do the same step with more each."""
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
        rows.append((world, low, mid, high))
    return Curve(link=link, mode=mode, rows=tuple(rows))


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
    model = model_of(single, seen[0].buckets, cores)
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


def study(points: Sequence[ScalingPoint], cores: float | None) -> Study:
    """Return the results of measured points. ``cores``: see `ScalingModel`; the modelled worlds have their own
    cores."""
    checked = check_prediction(points, cores)
    fitted, checks = checked if checked else (None, ())
    links = (*([fitted] if fitted else []), *LINKS)
    single = next((point for point in points if point.world_size == 1), None)
    several = next((point for point in points if point.world_size > 1), None)
    curves: tuple[Curve, ...] = ()
    if single and several:
        model = model_of(single, several.buckets)
        curves = tuple(
            modelled(model, link, mode, single.micro_batches) for mode in ("weak", "strong") for link in links
        )
    return Study(
        verdict=summarize_scaling(points, checks, cores),
        points=tuple(points),
        checks=checks,
        links=links,
        curves=curves,
    )


def scaling_document(result: Study) -> dict[str, Any]:
    """Return the study for JSON: null for the bandwidth of a link that bytes do not slow down."""

    def written(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in fields:
            if name == "message":  # the document has said it so from the first
                rate = Link(**value).bytes_per_second
                found |= {"latency_seconds": value["latency_seconds"], "bytes_per_second": _or_none(rate)}
            else:
                found[name] = _or_none(value)
        return found

    return asdict(result, dict_factory=written)


def _or_none(value: Any) -> Any:
    return None if value == math.inf else value


def summarize_scaling(points: Sequence[ScalingPoint], checks: Sequence[Check], cores: float | None) -> str:
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
    if checks:
        worst = max(checks, key=lambda item: abs(item.error))
        said += f" The model, fitted without {worst.world_size} ranks, misses their step by {worst.error:+.0%} at most."
    return said
