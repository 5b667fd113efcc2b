"""How long a training will take and what it will cost, from what is known of it: pure arithmetic.

    seconds = start-up + warm-up + steps x seconds per step + evaluations x seconds per evaluation
              + saves x what a save holds up + finish (test split, baselines, the end of the processes)
    dollars = nodes x seconds / 3600 x price of a node-hour

What is known is `Measured`: a probe or a past run of the same training on some node counts. Between two node counts
that were measured, figures are interpolated; beyond them communication grows with the logarithm of the ranks. Each
rank keeps its batch: more nodes make larger and fewer steps of the same epochs.

The 90 % interval has the spread that past estimates of this instance had (`planning.scoring`), that of the measured
steps, and what is added for every guess: a node count or a GPU that was not measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from dtrain_dagster.costs.prices import SkuPrice, Tier

Basis = Literal["history", "probe", "table"]
CONFIDENCE_90 = 1.645
"""Standard deviations to either side that hold 90 % of a normal distribution."""
PRIOR_SPREAD = 0.12
"""Standard deviation of log(actual / estimated) before anything has been scored: shared machines and clouds vary by
more than a short probe can see."""
MINIMUM_MARGIN = 0.07
"""However well it went so far, no interval is narrower to either side."""
DOUBLING_SPREAD = 0.10
"""Added to the spread for each doubling of the nodes away from what was measured…"""
SPEED_SPREAD = 0.25
"""…and for another GPU, whose speed is a guess of the price table."""


EVICTIONS_PER_NODE_HOUR = 0.10
"""Assumed of nodes that can be taken away, not measured: the upper edge of the second of the bands (0–5, 5–10, 10–15,
15–20, over 20 % per hour) in which Azure publishes the eviction rates of its sizes."""
EVICTION_SECONDS = 600.0
"""Assumed: until a node that was taken away is replaced, its start-up and the steps that are lost included. The others
count as standing still, though they go on, and are paid for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure and the range that it is expected in."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is expected before anything is bought."""

    seconds: Interval
    usd: Interval
    usd_per_node_hour: float
    node_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How much a training has to do."""

    steps: int
    evaluations: int
    checkpoints: int
    """Saves: as often as the configuration says, and one after each evaluation, any of which may be the best."""
    samples: int = 0
    """Over all steps: the last batch of an epoch is not a full one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What decides how much there is to do, on any number of nodes."""

    train_samples: int
    valid_samples: int
    test_samples: int
    batch_size_per_rank: int
    """Samples of one rank in one optimizer step."""
    micro_batches_per_rank: int
    processes_per_node: int
    epochs: int
    max_steps: int | None
    eval_frequency: int | None
    checkpoint_frequency: int
    early_stopping_patience: int | None = None
    cores: int | None = None
    """Of the one machine whose processes all nodes are; None where each node is a machine of its own."""
    stated_ranks: int | None = None
    """Ranks that the global batch is made for, where that is stated; None: as many as there are."""

    def ranks(self, node_count: int) -> int:
        """That the global batch is made for."""
        return self.stated_ranks or node_count * self.processes_per_node

    def crowding(self, node_count: int) -> float:
        """How much slower a rank is for sharing its cores with the others."""
        ranks = node_count * self.processes_per_node
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def work(self, node_count: int) -> Work:
        """All of it. Early stopping is not counted on: it can only make it cheaper."""
        ranks = self.ranks(node_count)
        return work_of(
            steps_per_epoch=self._steps_per_epoch(ranks),
            epochs=self.epochs,
            max_steps=self.max_steps,
            eval_frequency=self.eval_frequency,
            checkpoint_frequency=self.checkpoint_frequency,
            samples_per_epoch=self.train_samples,
            batch_size=ranks * self.batch_size_per_rank,
        )

    def least_work(self, node_count: int) -> Work:
        """Where it stops as early as ``early_stopping_patience`` lets it: the first evaluation is the best one."""
        if self.early_stopping_patience is None:
            return self.work(node_count)
        frequency = self.eval_frequency or self._steps_per_epoch(self.ranks(node_count))
        soonest = (1 + self.early_stopping_patience) * frequency
        return replace(self, max_steps=min(soonest, self.max_steps or soonest)).work(node_count)

    def _steps_per_epoch(self, ranks: int) -> int:
        from trainer.data.sampler import steps_per_epoch  # numpy, which the code location does not need to load

        micro_batches = ranks * self.micro_batches_per_rank
        if self.train_samples < micro_batches:
            return 1  # the trainer refuses so many ranks; here it is a row of a table
        return steps_per_epoch(self.train_samples, ranks * self.batch_size_per_rank, micro_batches)


def work_of(
    steps_per_epoch: int,
    epochs: int,
    max_steps: int | None,
    eval_frequency: int | None,
    checkpoint_frequency: int,
    samples_per_epoch: int = 0,
    batch_size: int = 0,
) -> Work:
    """What a training has to do, as the trainer's loop does it."""
    steps = steps_per_epoch * epochs
    if max_steps is not None:
        steps = min(steps, max_steps)
    frequency = eval_frequency or steps_per_epoch
    whole, rest = divmod(steps, steps_per_epoch)
    return Work(
        steps=steps,
        evaluations=-(-steps // frequency),
        checkpoints=_due(steps, frequency, checkpoint_frequency),
        samples=whole * samples_per_epoch + rest * batch_size,
    )


def _due(steps: int, first: int, second: int) -> int:
    """Steps after which one thing or the other is due: multiples of either, and the last."""
    count = steps // first + steps // second - steps // math.lcm(first, second)
    return count + (steps % first != 0 and steps % second != 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one run on so many nodes took, in parts that sum to its wall time, unless its first steps were its fastest.
    Shares are of a step."""

    node_count: int
    startup_seconds: float
    """From the first node's presence until the group is formed and the model is there."""
    warm_up_seconds: float = 0.0
    """What steps and evaluations took beyond the typical ones, once: caches, buckets, a look at the links."""
    step_seconds: float
    """A typical step with a full batch."""
    step_spread: float = 0.0
    """Standard error of it, relative."""
    sample_share: float = 1.0
    """What grows with the samples of a step: input, forward and backward pass."""
    compute_share: float = 1.0
    """What a faster GPU shortens: forward, backward and update."""
    communication_share: float = 0.0
    """Communication that nothing hides, and waiting for slower ranks."""
    evaluation_seconds: float = 0.0
    """One evaluation of the validation split, after the first."""
    checkpoint_seconds: float = 0.0
    """What one save holds up."""
    finish_seconds: float = 0.0
    """Test split, baselines, final weights, what trackers still have to write, the end of the processes."""

    def step_with(self, fill: float, speed: float) -> float:
        """Seconds of a step whose batch is so full, on a GPU of that speed."""
        slower = 1 / speed - 1
        share = 1 + self.compute_share * slower
        growing = min(self.sample_share, 1.0) * (1 + min(self.compute_share, self.sample_share) * slower)
        return self.step_seconds * max(0.0, share - (1 - fill) * min(growing, share))


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What past estimates of this instance have taught, see `planning.scoring.learn`."""

    factor: float = 1.0
    """Typical actual / estimated, shrunk towards 1."""
    spread: float = PRIOR_SPREAD
    """Standard deviation of the logarithm of what remains."""
    runs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """An estimate, or a run, phase by phase. Seconds."""

    startup: float
    steps: float
    """With their warm-up."""
    evaluation: float
    checkpoint: float
    finish: float

    @property
    def total(self) -> float:
        return self.startup + self.steps + self.evaluation + self.checkpoint + self.finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Time for any number of nodes."""

    measured: tuple[Measured, ...]
    sizes: Sizes
    basis: Basis
    basis_words: str
    learned: Learned = field(default_factory=Learned)
    measured_speed: float = 1.0
    """Of the GPUs that the figures come from, to those that the estimate is for: not 1 where the table was asked."""
    rests_on: tuple[str, ...] = ()
    """Ids of the jobs that ``measured`` comes from."""
    totals: tuple[float, ...] = ()
    """Wall seconds of past runs of exactly this training, on the nodes of the first of ``measured``."""

    def seconds_at(self, node_count: int, speed: float = 1.0) -> Interval:
        """Wall seconds of the whole training on so many nodes, whose GPUs are ``speed`` times those of the estimate."""
        speed /= self.measured_speed
        known = speed == 1 and node_count == self.measured[0].node_count
        if self.totals and known:
            expected = self.learned.factor * statistics.median(self.totals)
        else:
            expected = self.learned.factor * self.parts(node_count, speed).total
        factor = max(1 + MINIMUM_MARGIN, math.exp(CONFIDENCE_90 * self._spread(node_count, speed)))
        low = expected
        if self.sizes.early_stopping_patience is not None:
            least = self._parts(node_count, self.sizes.least_work(node_count), speed).total
            low = min(expected, self.learned.factor * least)
        return Interval(low=low / factor, expected=expected, high=expected * factor)

    def parts(self, node_count: int, speed: float = 1.0) -> Parts:
        """The same phase by phase, before anything that was learned."""
        return self._parts(node_count, self.sizes.work(node_count), speed)

    def _parts(self, node_count: int, work: Work, speed: float) -> Parts:
        at = interpolated(self.measured, node_count, self.sizes)
        batch = self.sizes.ranks(node_count) * self.sizes.batch_size_per_rank
        fill = work.samples / (work.steps * batch) if work.samples else 1.0
        test = at.evaluation_seconds * self.sizes.test_samples / max(1, self.sizes.valid_samples)
        test = min(test, at.finish_seconds)
        return Parts(
            startup=at.startup_seconds,
            steps=at.warm_up_seconds + work.steps * at.step_with(fill, speed),
            evaluation=work.evaluations * at.evaluation_seconds / speed,
            checkpoint=work.checkpoints * at.checkpoint_seconds,
            finish=at.finish_seconds - test + test / speed,
        )

    def _spread(self, node_count: int, speed: float) -> float:
        near = _nearest(self.measured, node_count)
        guesses = (
            self.learned.spread,
            near.step_spread,
            DOUBLING_SPREAD * abs(math.log2(node_count / near.node_count)),
            SPEED_SPREAD if speed != 1 else 0.0,
        )
        return math.sqrt(sum(guess**2 for guess in guesses))


def interpolated(measured: Sequence[Measured], node_count: int, sizes: Sizes) -> Measured:
    """What so many nodes would have been measured to take."""
    for item in measured:
        if item.node_count == node_count:
            return item
    below = [item for item in measured if item.node_count < node_count]
    above = [item for item in measured if item.node_count > node_count]
    if not below or not above:
        return _extrapolated(_nearest(measured, node_count), node_count, sizes)
    first, last = max(below, key=_nodes), min(above, key=_nodes)
    part = (node_count - first.node_count) / (last.node_count - first.node_count)
    values = {
        item.name: (1 - part) * getattr(first, item.name) + part * getattr(last, item.name) for item in fields(Measured)
    }
    return Measured(**{**values, "node_count": node_count})


def _extrapolated(from_: Measured, node_count: int, sizes: Sizes) -> Measured:
    before, ranks = (count * sizes.processes_per_node for count in (from_.node_count, node_count))
    crowding = sizes.crowding(node_count) / sizes.crowding(from_.node_count)
    growth = math.log2(ranks) / math.log2(before) if before > 1 else 1.0
    step = from_.step_seconds * crowding * (1 + from_.communication_share * (growth - 1))
    shrunk = from_.step_seconds * crowding / step if step else 1.0
    share = crowding * before / ranks  # ranks share a split
    test = from_.evaluation_seconds * sizes.test_samples / max(1, sizes.valid_samples)
    test = min(test, from_.finish_seconds)
    return replace(
        from_,
        node_count=node_count,
        startup_seconds=from_.startup_seconds * crowding,
        step_seconds=step,
        sample_share=from_.sample_share * shrunk,
        compute_share=from_.compute_share * shrunk,
        communication_share=from_.communication_share * growth * shrunk,
        evaluation_seconds=from_.evaluation_seconds * share,
        finish_seconds=from_.finish_seconds - test + test * share,
    )


def _nearest(measured: Sequence[Measured], node_count: int) -> Measured:
    return min(measured, key=lambda item: abs(math.log(item.node_count / node_count)))


def _nodes(item: Measured) -> int:
    return item.node_count


def with_evictions(seconds: Interval, node_count: int) -> Interval:
    """The time on nodes that can be taken away: without an eviction, with as many as are assumed, and with two standard
    deviations more (evictions are taken to be independent of each other: a Poisson process)."""

    def evictions(busy: float) -> float:
        return EVICTIONS_PER_NODE_HOUR * node_count * busy / 3600

    most = evictions(seconds.high)
    return Interval(
        low=seconds.low,
        expected=seconds.expected * expected_slowdown("low_priority", node_count),
        high=seconds.high + EVICTION_SECONDS * (most + 2 * math.sqrt(most)),
    )


def expected_slowdown(tier: Tier, node_count: int) -> float:
    """Returns how many times as long a training is expected to take for evictions: 1 on dedicated nodes."""
    return 1.0 if tier == "dedicated" else 1 + EVICTION_SECONDS * EVICTIONS_PER_NODE_HOUR * node_count / 3600


def without_evictions(seconds: Interval, tier: Tier, node_count: int) -> Interval:
    """Returns the time of an estimate without the evictions that are in it, to be priced on other nodes: the expected
    one exactly, the upper end without the expected share of them. The lower end has none."""
    slower = expected_slowdown(tier, node_count)
    return Interval(low=seconds.low, expected=seconds.expected / slower, high=seconds.high / slower)


def estimate_cost(seconds: Interval, price: SkuPrice, tier: Tier, node_count: int) -> Estimate:
    """Time and dollars of ``node_count`` nodes for that long, and for as long as replacing those takes that such a tier
    loses."""
    if tier != "dedicated":
        seconds = with_evictions(seconds, node_count)
    usd_per_hour = price.usd_per_hour(tier)
    return Estimate(
        seconds=seconds,
        usd=seconds.scaled(node_count * usd_per_hour / 3600),
        usd_per_node_hour=usd_per_hour,
        node_count=node_count,
    )
