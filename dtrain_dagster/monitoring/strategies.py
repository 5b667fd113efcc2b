"""Strategies against a slow training, ranked by the gain that this run's own figures predict. Pure.

Every figure is a prediction from a simple model of a step: its segments, and latency + bytes / bandwidth for the
network. It holds as long as the rest stays as it is; what it leaves out is said in the strategy's note. What changes do
to the dollars of a job is in `planning.optimizer`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
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
from trainer.documents.events import CheckpointEvent, TimingEvent, read_events
from trainer.performance.link import Link, bytes_carried, ring_messages

CHECKPOINT_BUDGET = 0.01
"""Share of training time that checkpoints may cost."""
KEPT = 0.01
"""Share of a gradient's entries that top-k compression sends, where the configuration does not say."""
WORTH_IT = 0.01
"""A gain below this counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A change of the training, with its expected gain."""

    name: str
    change: str
    """What to do, with the setting if there is one."""
    gain: float
    """Expected change of samples per second as a fraction: 0.25 is a quarter more."""
    step_seconds: float
    samples_per_second: float
    communication_share: float
    cost_gain: float
    """Expected change of samples per node-second, that is, per dollar."""
    note: str = ""
    noise: float = 0.0
    """The gain that chance alone shows in the measurements that this one is predicted from."""

    @property
    def sort_key(self) -> tuple[bool, float]:
        """The key to sort by: strategies that are faster, by how much; then those that are cheaper."""
        return (True, self.gain) if self.gain >= WORTH_IT else (False, self.cost_gain)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is faster or cheaper by `WORTH_IT` at least, and by more than noise."""
        return max(self.gain, self.cost_gain) >= max(WORTH_IT, self.noise)


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

    def to(self, other: StepModel, name: str, change: str, note: str = "") -> Strategy:
        gain = other.samples_per_second / self.samples_per_second
        return Strategy(
            name=name,
            change=change,
            gain=gain - 1,
            step_seconds=other.seconds,
            samples_per_second=other.samples_per_second,
            communication_share=other.communication / other.seconds,
            cost_gain=gain * self.nodes / other.nodes - 1,
            note=note,
            noise=self.noise,
        )


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


def strategies(
    found: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]] = (), training: Mapping[str, Any] | None = None
) -> list[Strategy]:
    """Return what would help the world that trained longest in these windows, the largest gain first; strategies
    without a gain come last. ``training``: the trainer's configuration, for the present values of settings."""
    world, training = longest_world(found), training or {}
    if not world:
        return []
    ranked = [*waiting_strategies(world), *_input(world), *_checkpoint(world, events, training)]
    if exceeds_limit(world, ("communication",)) and not ranks_that_share_cores(world[-1]):
        ranked += communication_strategies(world, training)
    return sorted(ranked, key=lambda item: item.sort_key, reverse=True)


def communication_strategies(world: Sequence[TimingEvent], training: Mapping[str, Any]) -> list[Strategy]:
    """Return strategies against communication time; none of them helps against waiting for a slow rank."""
    now = step_model(world)
    if not now.samples:
        return []
    fit = collective_link(typical_collectives(world))
    ranked = [*_more_work(now, training), *_fewer_nodes(now, world)]
    if fit:
        ranked += _compression(now, world, fit, training) + _hierarchy(now, world, fit, training)
    return ranked


def _more_work(now: StepModel, training: Mapping[str, Any]) -> list[Strategy]:
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


def _compression(
    now: StepModel, world: Sequence[TimingEvent], fit: Link, training: Mapping[str, Any]
) -> list[Strategy]:
    """Return fewer bytes: it gains on the part that bandwidth decides, and only on what the backward pass does not
    hide. Modes that the run has already are left out, and all where gradients go through one host, or ranks share the
    model: neither compresses."""
    if training.get("strategy", "ddp") != "ddp":
        return []
    present = training.get("communication", "allreduce")
    if world[-1].facts.get("topology") == "star" or present not in ("allreduce", "hierarchical"):
        return []
    takes_topk = training.get("precision") != "fp16"  # see `trainer.strategies.explain_strategy`
    size, kept = world[-1].world_size, float(training.get("topk_fraction", KEPT))
    found = []
    for name, setting, left, note in (
        ("fp16 compression", "fp16", 0.5, "rounds gradients to 11 bits"),
        (
            "top-k compression",
            "topk",
            min(1.0, kept * size),
            f"sends the largest {kept:.2g} of each gradient, the rest later: check the loss curve; choosing them "
            "takes time that is not counted here (`dtrain tune` measures it)",
        ),
    ):
        if setting == "topk" and not takes_topk:
            continue
        saved = sum((1 - left) * item.bytes * fit.seconds_per_byte for item in _buckets_of(world))
        change = f"training.communication = {setting} (now {present})"
        found.append(now.to(_less_communication(now, world, saved), name, change, note))
    return found


def _hierarchy(now: StepModel, world: Sequence[TimingEvent], fit: Link, training: Mapping[str, Any]) -> list[Strategy]:
    """Return the sum within nodes first: only one rank of each node then talks to other nodes."""
    size, nodes = world[-1].world_size, now.nodes
    present = training.get("communication", "allreduce")
    if nodes in (1, size) or present != "allreduce" or world[-1].facts.get("topology") == "star":
        return []
    between = fit.message_of_ring(size).over_ring(nodes)
    saved = sum(fit.seconds(item.bytes) - between.seconds(item.bytes) for item in _buckets_of(world))
    change = f"training.communication = hierarchical (now {present})"
    note = f"sums within each of the {nodes} nodes, then between them; at best: sums within a node are free"
    return [now.to(_less_communication(now, world, saved), "hierarchical all-reduce", change, note)]


def on_fewer_nodes(world: Sequence[TimingEvent]) -> list[StepModel]:
    """Return the step with the same global batch on one node, two and so on."""
    now = step_model(world)
    if now.nodes < 2 or world[-1].world_size % now.nodes:
        return []
    per_node, fit = world[-1].world_size // now.nodes, collective_link(typical_collectives(world))
    return [_with_ranks(now, world, fit, count * per_node, count) for count in range(1, now.nodes)]


def _fewer_nodes(now: StepModel, world: Sequence[TimingEvent]) -> list[Strategy]:
    """Return the best smaller number of nodes."""
    options = on_fewer_nodes(world)
    if not options:
        return []
    best = max(options, key=lambda model: (model.samples_per_second, -model.nodes))
    cheapest = max(options, key=lambda model: model.samples_per_second / model.nodes)
    note = "the global batch stays: planned micro-batches are divided among the nodes that are there"
    found = [now.to(best, "fewer nodes", f"{best.nodes} node(s) instead of {now.nodes} (DTRAIN_NODES)", note)]
    if found[0].gain < WORTH_IT:  # not faster: then as cheap as possible
        found = [
            now.to(cheapest, "fewer nodes", f"{cheapest.nodes} node(s) instead of {now.nodes} (DTRAIN_NODES)", note)
        ]
    return found


def _with_ranks(now: StepModel, world: Sequence[TimingEvent], fit: Link | None, ranks: int, nodes: int) -> StepModel:
    size = world[-1].world_size
    work = size / ranks
    collectives = typical_collectives(world)
    latency = latency_share(fit, collectives, now.communication) if fit else 0.0
    moving = (1 - latency) * bytes_carried(ranks) / bytes_carried(size)
    ratio = latency * ring_messages(ranks) / ring_messages(size) + moving
    then = replace(now.with_work(work), communication=now.communication * ratio, nodes=nodes)
    return replace(then, waiting=0.0) if ranks == 1 else then


def waiting_strategies(world: Sequence[TimingEvent], node_id: int | None = None) -> list[Strategy]:
    """Return strategies against the costliest straggler, or that of ``node_id``."""
    ranked, now = stragglers(world), step_model(world)
    late = [item for item in ranked if node_id in (None, item.node_id)]
    if not late or not now.samples:
        return []
    item, costliest, besides = late[0], ranked[0], ""
    size = world[-1].world_size
    per_step = now.seconds / seconds_of(world)
    if costliest.node_id != item.node_id:  # who is later still holds the step up: the gain is that on top of its end
        now = _on_time(now, costliest, (costliest.lost_seconds - item.lost_seconds) * per_step, size)
        besides = f", besides that of node {costliest.node_id}"
    ready = _on_time(now, item, item.lost_seconds * per_step, size)
    what = {"input": "check its disk and what else runs there, or "}.get(item.why, "")
    found = [
        now.to(
            ready,
            f"replace node {item.node_id}",
            f"{what}let another node take the place of node {item.node_id}{besides}",
            f"rank {item.rank} would be as fast as the others",
        )
    ]
    if size > 2:
        without = replace(ready.with_work(size / (size - 1)), nodes=max(1, now.nodes - 1))
        found.append(now.to(without, f"go on without node {item.node_id}", f"its work goes to the others{besides}"))
    return found


def _on_time(now: StepModel, item: Straggler, saved: float, size: int) -> StepModel:
    """Return the step when a straggler is ``saved`` seconds less late. In means over ranks: a W-th of the lateness is
    the late rank's own time, the rest is waiting of the others (less of it, where others are late as well)."""
    waited = min(now.waiting, saved * (size - 1) / size)
    now, own = replace(now, waiting=now.waiting - waited), saved - waited
    if item.why == "input":
        return replace(now, input=max(0.0, now.input - own))
    return replace(now, computing=max(0.0, now.computing - own))


def _input(world: Sequence[TimingEvent]) -> list[Strategy]:
    now = step_model(world)
    common = statistics.median(min(window.segments.get("input") or (0.0,)) for window in world)
    if common / now.seconds < INPUT_SHARE:  # what one rank waits for beyond that is this rank's matter
        return []
    change = "put the dataset on a local disk of each node; fewer processes per node share a disk and processors"
    note = "the next batch is gathered during a step, on one thread: input that is quicker than a step costs nothing"
    return [now.to(replace(now, input=now.input - common), "quicker input", change, note)]


def _checkpoint(
    world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]
) -> list[Strategy]:
    """Return the checkpoint interval at which saves cost just less than the budget. Their cost and number are those of
    these windows: a job has saves in other worlds as well."""
    stalled = sum(max(window.segments.get("checkpoint") or (0.0,)) * window.steps for window in world)
    began = [save.began_at for save in read_events(CheckpointEvent, events)]
    count = sum(any(window.time - window.total_seconds <= at <= window.time for window in world) for at in began)
    every = training.get("checkpoint_frequency")
    share = stalled / seconds_of(world)
    if share <= CHECKPOINT_BUDGET or not count or not every:
        return []
    now = step_model(world)
    step = now.seconds * (1 - share)
    steps = math.ceil(stalled / count * (1 / CHECKPOINT_BUDGET - 1) / step / 10) * 10
    if steps <= int(every):
        return []
    saved = (share - CHECKPOINT_BUDGET) * now.seconds
    then = replace(now, fixed=max(0.0, now.fixed - saved))
    then = replace(then, waiting=max(0.0, then.waiting - max(0.0, saved - (now.fixed - then.fixed))))
    change = f"training.checkpoint_frequency = {steps} (now {every})"
    note = f"a save holds up for {stalled / count:.2g} s; a lost node then costs up to {steps * step:.0f} s of work"
    return [now.to(then, "checkpoints less often", change, note)]


def _less_communication(now: StepModel, world: Sequence[TimingEvent], saved: float) -> StepModel:
    """Return the step with ``saved`` seconds less of exposed communication; a last bucket stays exposed."""
    buckets = _buckets_of(world)
    network = sum(item.wire_seconds for item in buckets)
    last = (1 - saved / network) * buckets[-1].wire_seconds if network else 0.0
    floor = min(now.communication, max(0.0, last))
    return replace(now, communication=max(floor, now.communication - saved))


def _buckets_of(world: Sequence[TimingEvent]) -> list[Any]:
    return [item for item in typical_collectives(world) if "bucket" in item.name]


def _setting(name: str, training: Mapping[str, Any], factor: int) -> str:
    now = training.get(name)
    return f"training.{name} = {factor * int(now)} (now {now})" if now else f"{factor} times training.{name}"
