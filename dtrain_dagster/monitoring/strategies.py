"""Changes of a training that would make it faster or cheaper, ranked by what its own figures predict. Pure.

Every figure is a prediction from a simple model of a step: its segments, and latency + bytes / bandwidth for the
network. It holds as long as the rest stays as it is; what it leaves out is said in the change's ``why``. What changes
of the nodes do to the dollars of a job is in `planning.optimizer`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.monitoring.diagnosis import INPUT_SHARE
from dtrain_dagster.monitoring.stragglers import Straggler, stragglers
from dtrain_dagster.monitoring.windows import (
    COMMUNICATION_LIMIT,
    collective_link,
    exceeds_limit,
    latency_share,
    median_error,
    ranks_that_share_cores,
    seconds_of,
    typical_collectives,
    worlds,
)
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.events import TimingEvent
from trainer.performance.link import Link, bytes_carried, ring_messages

KEPT = 0.01
"""Share of a gradient's entries that top-k compression sends, where the configuration does not say."""
WORTH_IT = 0.01
"""A gain below this counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a training, with the time and the dollars that the same work takes with it."""

    name: str
    setting: str
    """What to do, with the setting if there is one."""
    time: float
    """Its time as a multiple of the present one: 0.8 takes a fifth less."""
    cost: float
    """Its dollars, likewise."""
    why: str = ""
    noise: float = 0.0
    """The gain that chance alone shows in the measurements that this one is predicted from."""
    run_seconds: float = 0.0
    run_usd: float = 0.0
    """The time and the dollars of the run as it is; 0 where they are not known."""

    @property
    def gain(self) -> float:
        """The change of samples per second as a fraction: 0.25 is a quarter more."""
        return 1 / self.time - 1

    @property
    def cost_gain(self) -> float:
        """The change of samples per dollar, likewise."""
        return 1 / self.cost - 1

    @property
    def saved_usd(self) -> float:
        """Dollars saved; negative where it is dearer."""
        return self.run_usd * (1 - self.cost)

    @property
    def lost_seconds(self) -> float:
        """Seconds lost; negative where it is quicker."""
        return self.run_seconds * (self.time - 1)

    @property
    def sort_key(self) -> tuple[bool, float]:
        """The key to sort by: changes that are faster, by how much; then those that are cheaper."""
        return (True, self.gain) if self.gain >= WORTH_IT else (False, self.cost_gain)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is faster or cheaper by `WORTH_IT` at least, and by more than noise."""
        return max(self.gain, self.cost_gain) >= max(WORTH_IT, self.noise)

    @property
    def text(self) -> str:
        """Return the change in a line: ``more accumulation: … = 4 (now 2): +35% samples/s``, or what it saves."""
        if self.run_usd:
            said = f"saves {dollars(self.saved_usd)}"
        elif self.gain >= 0.005:
            said = f"{self.gain:+.0%} samples/s"
        else:
            said = f"{self.cost_gain:+.0%} samples per dollar"
            said += f", {self.gain:+.0%} samples/s" if self.gain < -0.005 else ""
        return f"{self.name}: {self.setting}: {said}" + (f" ({self.why})" if self.why else "")

    def document(self) -> dict[str, Any]:
        """Return it for JSON: seconds and dollars of the run with it, and the difference to now."""
        return {
            "name": self.name,
            "setting": self.setting,
            "seconds": self.run_seconds * self.time,
            "usd": self.run_usd * self.cost,
            "saved_usd": self.saved_usd,
            "lost_seconds": self.lost_seconds,
            "why": self.why,
        }


def change_table(found: Iterable[Change]) -> str:
    """Return the changes as a Markdown table, in the order given: in dollars and time where those of the run are known,
    else in percent."""
    rows = ["| what | change | dollars | time | why |", "|---|---|---|---|---|"]
    for item in found:
        cost, time = f"{item.cost - 1:+.0%}", f"{item.time - 1:+.0%}"
        if item.run_usd:
            cost = f"saves {dollars(item.saved_usd)}"
            time = f"{format_duration(abs(item.lost_seconds))} {'more' if item.lost_seconds >= 0 else 'less'}"
        rows.append(f"| **{item.name}** | {item.setting} | {cost} | {time} | {item.why} |")
    return "\n".join(rows) if len(rows) > 2 else "These figures do not suggest any change."


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """The parts of a step, in seconds, mean over ranks. A prediction is a `StepModel` as well."""

    input: float
    computing: float
    """Forward and backward computation."""
    communication: float
    waiting: float
    fixed: float
    """Update, saves and bookkeeping: the same for any number of samples."""
    samples: float
    nodes: int
    noise: float = 0.0
    """Twice the standard error of the step's seconds, as a share of them."""

    @property
    def seconds(self) -> float:
        return self.input + self.computing + self.communication + self.waiting + self.fixed

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds

    def with_work(self, factor: float) -> StepModel:
        """Return the step with ``factor`` times the work for each rank."""
        return replace(
            self, input=factor * self.input, computing=factor * self.computing, waiting=factor * self.waiting
        )

    def with_batch(self, factor: float) -> StepModel:
        """Return the step with ``factor`` times the samples, and as much more work."""
        return replace(self.with_work(factor), samples=factor * self.samples)

    def to(self, other: StepModel, name: str, setting: str, why: str = "") -> Change:
        time = self.samples_per_second / other.samples_per_second
        cost = time * other.nodes / self.nodes
        return Change(name=name, setting=setting, time=time, cost=cost, why=why, noise=self.noise)


def longest_world(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Return the windows of the world that trained longest; none where nobody counted their samples."""
    groups = worlds(found)
    return groups[0] if groups and step_model(groups[0]).samples else []


def step_model(world: Sequence[TimingEvent]) -> StepModel:
    """Return the mean step of windows of one world."""
    steps = sum(window.steps for window in world)

    def mean(*segments: str) -> float:
        return sum(window.mean(segment) * window.steps for window in world for segment in segments) / steps

    return StepModel(
        input=mean("input"),
        computing=mean("forward", "backward"),
        communication=mean("communication"),
        waiting=mean("waiting"),
        fixed=mean("optimizer", "checkpoint", "other"),
        samples=sum(sum(window.samples) for window in world) / steps,
        nodes=len(set(world[-1].nodes)),
        noise=2 * median_error([window.seconds for window in world]) / (seconds_of(world) / steps),
    )


def best(ranked: Iterable[Change], most: int | None = None) -> tuple[Change, ...]:
    """Return the changes that are worth it, at most so many, the largest gain first."""
    return tuple(sorted((item for item in ranked if item.is_worth_it), key=lambda item: item.sort_key, reverse=True))[
        :most
    ]


def strategies(found: Sequence[TimingEvent], training: Mapping[str, Any] | None = None) -> tuple[Change, ...]:
    """Return what would help the world that trained longest in these windows, the largest gain first. ``training``: the
    trainer's configuration, for the present values of settings."""
    world, training = longest_world(found), training or {}
    if not world:
        return ()
    ranked = [*waiting_strategies(world), *_input(world)]
    if exceeds_limit(world, ("communication",)) and not ranks_that_share_cores(world[-1]):
        ranked += communication_strategies(world, training)
    return best(ranked)


def communication_strategies(world: Sequence[TimingEvent], training: Mapping[str, Any]) -> list[Change]:
    """Return changes against communication time; none of them helps against waiting for a slow rank."""
    now = step_model(world)
    if not now.samples:
        return []
    return [*_more_work(now, training), *_fewer_nodes(now, world), *_less_traffic(now, world, training)]


def _more_work(now: StepModel, training: Mapping[str, Any]) -> list[Change]:
    """Return fewer all-reduces for each sample: the smallest factor that brings communication below the limit."""
    for factor in (2, 4, 8):
        then = now.with_batch(factor)
        if then.communication / then.seconds <= COMMUNICATION_LIMIT:
            break
    steps, batch = (_setting(name, training, factor) for name in ("gradient_accumulation_steps", "batch_size_per_gpu"))
    larger = f"the global batch grows {factor}-fold: check the learning rate (training.lr_scaling)"
    fuller = f"at least as much, since larger operations are more efficient; needs memory; {larger}"
    return [
        now.to(then, "more accumulation", steps, f"needs no memory; {larger}"),
        now.to(then, "larger micro-batch", batch, fuller),
    ]


def _less_traffic(now: StepModel, world: Sequence[TimingEvent], training: Mapping[str, Any]) -> list[Change]:
    """Return fewer bytes, or sums within nodes first. Compression gains on the part that bandwidth decides. Nothing for
    a training that does so already, whose gradients go through one host, or whose ranks share the model."""
    fit, present = collective_link(typical_collectives(world)), training.get("communication", "allreduce")
    is_plain = present in ("allreduce", "hierarchical") and training.get("strategy", "ddp") == "ddp"
    if fit is None or not is_plain or world[-1].facts.get("topology") == "star":
        return []
    size, kept = world[-1].world_size, float(training.get("topk_fraction", KEPT))
    buckets = [item for item in typical_collectives(world) if "bucket" in item.name]
    found = []

    def add(name: str, mode: str, why: str, saved: float) -> None:
        """``saved``: seconds of exposed communication; a last bucket stays exposed."""
        network = sum(item.wire_seconds for item in buckets)
        last = (1 - saved / network) * buckets[-1].wire_seconds if network else 0.0
        floor = min(now.communication, max(0.0, last))
        then = replace(now, communication=max(floor, now.communication - saved))
        found.append(now.to(then, name, f"training.communication = {mode} (now {present})", why))

    moving = sum(item.bytes * fit.seconds_per_byte for item in buckets)
    add("fp16 compression", "fp16", "rounds gradients to 11 bits", 0.5 * moving)
    if training.get("precision") != "fp16":  # see `trainer.strategies.explain_strategy`
        why = (
            f"sends the largest {kept:.2g} of each gradient, the rest later: check the loss curve; choosing them takes "
        )
        why += "time that is not counted here (`dtrain tune` measures it)"
        add("top-k compression", "topk", why, max(0.0, 1 - kept * size) * moving)
    if now.nodes not in (1, size) and present == "allreduce":
        between = fit.message_of_ring(size).over_ring(now.nodes)
        why = f"sums within each of the {now.nodes} nodes, then between them; at best: sums within a node are free"
        saved = sum(fit.seconds(item.bytes) - between.seconds(item.bytes) for item in buckets)
        add("hierarchical all-reduce", "hierarchical", why, saved)
    return found


def on_fewer_nodes(world: Sequence[TimingEvent]) -> list[StepModel]:
    """Return the step with the same global batch on one node, two and so on."""
    now = step_model(world)
    if now.nodes < 2 or world[-1].world_size % now.nodes:
        return []
    per_node, fit = world[-1].world_size // now.nodes, collective_link(typical_collectives(world))
    return [_with_ranks(now, world, fit, count * per_node, count) for count in range(1, now.nodes)]


def _fewer_nodes(now: StepModel, world: Sequence[TimingEvent]) -> list[Change]:
    """Return the best smaller number of nodes: the fastest, or where none is faster, the cheapest."""
    why = "the global batch stays: planned micro-batches are divided among the nodes that are there"
    options = [
        now.to(then, "fewer nodes", f"{then.nodes} node(s) instead of {now.nodes} (DTRAIN_NODES)", why)
        for then in on_fewer_nodes(world)
    ]
    return [max(options, key=lambda item: item.sort_key)] if options else []


def _with_ranks(now: StepModel, world: Sequence[TimingEvent], fit: Link | None, ranks: int, nodes: int) -> StepModel:
    size = world[-1].world_size
    work = size / ranks
    collectives = typical_collectives(world)
    latency = latency_share(fit, collectives, now.communication) if fit else 0.0
    moving = (1 - latency) * bytes_carried(ranks) / bytes_carried(size)
    ratio = latency * ring_messages(ranks) / ring_messages(size) + moving
    then = replace(now.with_work(work), communication=now.communication * ratio, nodes=nodes)
    return replace(then, waiting=0.0) if ranks == 1 else then


def waiting_strategies(world: Sequence[TimingEvent]) -> list[Change]:
    """Return changes against the costliest straggler: while it is there, those against others gain nothing."""
    late, now = stragglers(world), step_model(world)
    if not late or not now.samples:
        return []
    item, size = late[0], world[-1].world_size
    ready = _on_time(now, item, item.lost_seconds * now.seconds / seconds_of(world), size)
    what = {"input": "check its disk and what else runs there, or "}.get(item.why, "")
    change = f"{what}let another node take the place of node {item.node_id}"
    why = f"rank {item.rank} would be as fast as the others"
    found = [now.to(ready, f"replace node {item.node_id}", change, why)]
    if size > 2:
        without = replace(ready.with_work(size / (size - 1)), nodes=max(1, now.nodes - 1))
        found.append(now.to(without, f"go on without node {item.node_id}", "its work goes to the others"))
    return found


def _on_time(now: StepModel, item: Straggler, saved: float, size: int) -> StepModel:
    """Return the step when a straggler is ``saved`` seconds less late. In means over ranks: a W-th of the lateness is
    the late rank's own time, the rest is waiting of the others (less of it, where others are late as well)."""
    waited = min(now.waiting, saved * (size - 1) / size)
    now, own = replace(now, waiting=now.waiting - waited), saved - waited
    if item.why == "input":
        return replace(now, input=max(0.0, now.input - own))
    return replace(now, computing=max(0.0, now.computing - own))


def _input(world: Sequence[TimingEvent]) -> list[Change]:
    now = step_model(world)
    common = statistics.median(min(window.segments.get("input") or (0.0,)) for window in world)
    if common / now.seconds < INPUT_SHARE:  # what one rank waits for beyond that is this rank's matter
        return []
    change = "put the dataset on a local disk of each node; fewer processes per node share a disk and processors"
    note = "the next batch is gathered during a step, on one thread: input that is quicker than a step costs nothing"
    return [now.to(replace(now, input=now.input - common), "quicker input", change, note)]


def _setting(name: str, training: Mapping[str, Any], factor: int) -> str:
    now = training.get(name)
    return f"training.{name} = {factor * int(now)} (now {now})" if now else f"{factor} times training.{name}"
