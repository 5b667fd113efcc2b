"""The estimated time and cost of a training, from what is known of it: pure arithmetic.

    seconds = start-up + warm-up + steps x seconds per step + evaluations x seconds per evaluation
              + saves x what a save holds up + finish (test split, baselines, the end of the processes)
    dollars = nodes x seconds / 3600 x price of a node-hour

Spot nodes may be evicted: what that costs is not known and not in it, and every plan on Spot says so.

What is known is `Measured`: a probe or a past run of the same training on some node counts. On others, figures are
those of the nearest one, where communication grows with the logarithm of the ranks. Each rank keeps its batch: more
nodes make larger and fewer steps of the same epochs.

The 90 % interval has the spread of past estimates (`planning.scoring`) or, if that is more, of past runs among each
other; that of the measured steps; and more for a node count or GPU that was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.settings.cluster_kinds import Tier

Basis = Literal["history", "probe", "table"]
"""What an estimate rests on. Plans of older versions alone rest on a ``table`` of speeds; they are still read."""
CONFIDENCE_90 = 1.645
"""Standard deviations to either side that hold 90 % of a normal distribution."""
PRIOR_SPREAD = 0.12
"""Standard deviation of log(actual / estimated) before anything has been scored."""
MINIMUM_MARGIN = 0.07
"""However well it went so far, no interval is narrower to either side."""
DOUBLING_SPREAD, SHARED_DOUBLING_SPREAD = 0.10, 0.25
"""Added to the spread for each doubling of the nodes away from a measured count; the second if they share one machine,
whose cores slow each other down by more than their number says (docs/performance.md)."""
SPEED_SPREAD = 0.25
"""Added to the spread for another GPU, whose speed is a guess of the price table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure and the range in which it is expected."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)

    def range_in(self, write: Callable[[float], str]) -> str:
        """Return ``$2.00 to $4.00``, of figures that ``write`` puts into words."""
        return f"{write(self.low)} to {write(self.high)}"

    def told(self, write: Callable[[float], str]) -> str:
        """Return ``$3.00 ($2.00 to $4.00)``."""
        return f"{write(self.expected)} ({self.range_in(write)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The expected time and cost of a training, before it is bought."""

    seconds: Interval
    usd: Interval
    usd_per_node_hour: float
    node_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The amount of work of a training."""

    steps: int
    evaluations: int
    checkpoints: int
    """Saves: as often as the configuration says, and one after each evaluation, any of which may be the best."""
    samples: int = 0
    """Samples over all steps: the last batch of an epoch is not a full one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The figures that decide how much work there is, on any number of nodes."""

    train_samples: int
    valid_samples: int
    test_samples: int
    batch_size_per_rank: int
    micro_batches_per_rank: int
    processes_per_node: int
    epochs: int
    max_steps: int | None
    eval_frequency: int | None
    checkpoint_frequency: int
    early_stopping_patience: int | None = None
    cores: int | None = None
    """Cores of the one machine that runs all nodes; None where each node is a machine of its own."""
    stated_ranks: int | None = None
    """Ranks that the global batch is made for, where that is stated; None: as many as there are."""

    def ranks(self, node_count: int) -> int:
        """Return the number of ranks that the global batch is made for."""
        return self.stated_ranks or node_count * self.processes_per_node

    def crowding(self, node_count: int) -> float:
        """Return how many times slower a rank is because it shares its cores with the others."""
        ranks = node_count * self.processes_per_node
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def work(self, node_count: int) -> Work:
        """Return all of the work, as the trainer's loop does it. Early stopping is not counted on."""
        ranks = self.ranks(node_count)
        per_epoch = self._steps_per_epoch(ranks)
        steps = per_epoch * self.epochs
        if self.max_steps is not None:
            steps = min(steps, self.max_steps)
        frequency = self.eval_frequency or per_epoch
        whole, rest = divmod(steps, per_epoch)
        return Work(
            steps=steps,
            evaluations=-(-steps // frequency),
            checkpoints=_due(steps, frequency, self.checkpoint_frequency),
            samples=whole * self.train_samples + rest * ranks * self.batch_size_per_rank,
        )

    def least_work(self, node_count: int) -> Work:
        """Return the work if the training stops as early as ``early_stopping_patience`` allows."""
        if self.early_stopping_patience is None:
            return self.work(node_count)
        frequency = self.eval_frequency or self._steps_per_epoch(self.ranks(node_count))
        soonest = (1 + self.early_stopping_patience) * frequency
        return replace(self, max_steps=min(soonest, self.max_steps or soonest)).work(node_count)

    def _steps_per_epoch(self, ranks: int) -> int:
        from trainer.data.sampler import steps_per_epoch  # numpy, which the code location does not need to load

        micro_batches = ranks * self.micro_batches_per_rank
        if self.train_samples < micro_batches:
            return 1  # the trainer refuses this number of ranks; here it is a row of a table
        return steps_per_epoch(self.train_samples, ranks * self.batch_size_per_rank, micro_batches)


def _due(steps: int, first: int, second: int) -> int:
    """Steps after which one thing or the other is due: multiples of either, and the last."""
    count = steps // first + steps // second - steps // math.lcm(first, second)
    return count + (steps % first != 0 and steps % second != 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The duration of one run on ``node_count`` nodes, in parts that sum to its wall time, unless its first steps were
    its fastest. Shares are of a step."""

    node_count: int
    startup_seconds: float
    """Seconds from the first node's presence until the group is formed and the model is loaded."""
    warm_up_seconds: float = 0.0
    """Seconds that steps and evaluations took once beyond the typical ones: caches, buckets, a link probe."""
    step_seconds: float
    """Seconds of a typical step with a full batch."""
    step_spread: float = 0.0
    """Relative standard deviation of ``step_seconds``: what a few steps cannot tell, and slow changes among them."""
    sample_share: float = 1.0
    """Share that grows with the samples of a step: input, forward and backward pass."""
    compute_share: float = 1.0
    """Share that a faster GPU shortens: forward, backward and update."""
    communication_share: float = 0.0
    """Share of exposed communication and of waiting for slower ranks."""
    evaluation_seconds: float = 0.0
    """Seconds of one evaluation of the validation split, after the first."""
    checkpoint_seconds: float = 0.0
    """Seconds for which one save holds up training."""
    finish_seconds: float = 0.0
    """Seconds of the test split, baselines, final weights, the trackers' last writes, and the end of the processes."""

    def step_with(self, fill: float, speed: float) -> float:
        """Return the seconds of a step with this share of a full batch, on a GPU of that relative speed."""
        slower = 1 / speed - 1
        share = 1 + self.compute_share * slower
        growing = min(self.sample_share, 1.0) * (1 + min(self.compute_share, self.sample_share) * slower)
        return self.step_seconds * max(0.0, share - (1 - fill) * min(growing, share))

    def test_seconds(self, sizes: Sizes) -> float:
        """Return the part of the finish in which the test split is judged, as fast as the validation split."""
        return min(self.finish_seconds, self.evaluation_seconds * sizes.test_samples / max(1, sizes.valid_samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedCorrection:
    """The correction that past estimates of this instance have taught, see `planning.scoring.learn`."""

    factor: float = 1.0
    """Typical actual / estimated, as far as past errors support it; 1 where they support nothing."""
    spread: float = PRIOR_SPREAD
    """Standard deviation of the logarithm of what remains, widened where past intervals were too narrow."""
    runs: int = 0


def interval_margin(spread: float) -> float:
    """Return the logarithm of high / expected, and of expected / low, of a 90 % interval with that spread."""
    return max(math.log(1 + MINIMUM_MARGIN), CONFIDENCE_90 * spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """An estimate, or a run, phase by phase, in seconds."""

    startup: float
    steps: float
    """Seconds of all steps, with their warm-up."""
    evaluation: float
    checkpoint: float
    finish: float

    @property
    def total(self) -> float:
        return self.startup + self.steps + self.evaluation + self.checkpoint + self.finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The expected time for any number of nodes."""

    measured: tuple[Measured, ...]
    sizes: Sizes
    basis: Basis
    basis_words: str
    learned: LearnedCorrection = field(default_factory=LearnedCorrection)
    rests_on: tuple[str, ...] = ()
    run_spread: float = 0.0
    """Standard deviation of the logarithm of time between past runs alike; 0 where there are not two."""

    def seconds_at(self, node_count: int, speed: float = 1.0) -> Interval:
        """Return the wall seconds of the whole training. ``speed``: of its GPUs relative to those measured."""
        expected = self.learned.factor * self.parts(node_count, speed).total
        factor = math.exp(interval_margin(self._spread(node_count, speed)))
        low = expected
        if self.sizes.early_stopping_patience is not None:
            least = self._parts(node_count, self.sizes.least_work(node_count), speed).total
            low = min(expected, self.learned.factor * least)
        return Interval(low=low / factor, expected=expected, high=expected * factor)

    def parts(self, node_count: int, speed: float = 1.0) -> Parts:
        return self._parts(node_count, self.sizes.work(node_count), speed)

    def _parts(self, node_count: int, work: Work, speed: float) -> Parts:
        at = figures_on(self.measured, node_count, self.sizes)
        batch = self.sizes.ranks(node_count) * self.sizes.batch_size_per_rank
        fill = work.samples / (work.steps * batch) if work.samples else 1.0
        test = at.test_seconds(self.sizes)
        return Parts(
            startup=at.startup_seconds,
            steps=at.warm_up_seconds + work.steps * at.step_with(fill, speed),
            evaluation=work.evaluations * at.evaluation_seconds / speed,
            checkpoint=work.checkpoints * at.checkpoint_seconds,
            finish=at.finish_seconds - test + test / speed,
        )

    def _spread(self, node_count: int, speed: float) -> float:
        near = _nearest(self.measured, node_count)
        each_doubling = SHARED_DOUBLING_SPREAD if self.sizes.cores else DOUBLING_SPREAD
        guesses = (
            max(self.learned.spread, self.run_spread),
            near.step_spread,
            each_doubling * abs(math.log2(node_count / near.node_count)),
            SPEED_SPREAD if speed != 1 else 0.0,
        )
        return math.sqrt(sum(guess**2 for guess in guesses))


def figures_on(measured: Sequence[Measured], node_count: int, sizes: Sizes) -> Measured:
    """Return the figures expected on ``node_count`` nodes, from the nearest number of nodes that was measured."""
    near = _nearest(measured, node_count)
    return near if near.node_count == node_count else _extrapolated(near, node_count, sizes)


def _extrapolated(from_: Measured, node_count: int, sizes: Sizes) -> Measured:
    before, ranks = (count * sizes.processes_per_node for count in (from_.node_count, node_count))
    crowding = sizes.crowding(node_count) / sizes.crowding(from_.node_count)
    growth = math.log2(ranks) / math.log2(before) if before > 1 else 1.0
    step = from_.step_seconds * crowding * (1 + from_.communication_share * (growth - 1))
    shrunk = from_.step_seconds * crowding / step if step else 1.0
    share = crowding * before / ranks  # ranks share a split
    test = from_.test_seconds(sizes)
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
    return min(measured, key=lambda item: distance(item, node_count))


def distance(measured: Measured, node_count: int) -> float:
    """Return how far so many nodes are from those of a run: doubling and halving are as far."""
    return abs(math.log(measured.node_count / node_count))


def estimate_forecast(forecast: Forecast, price: SkuPrice, tier: Tier, node_count: int) -> Estimate:
    """Return the time and dollars of a forecast. Raise `PriceError` where the SKU has no price on that tier."""
    return estimate_cost(forecast.seconds_at(node_count), price, tier, node_count)


def estimate_cost(seconds: Interval, price: SkuPrice, tier: Tier, node_count: int) -> Estimate:
    """Return time and dollars of nodes for that long. The interval of dollars ends at the ends of the price's range."""
    usd_per_hour, (low, high) = price.usd_per_hour(tier), price.range_of(tier)
    hours = seconds.scaled(node_count / 3600)
    return Estimate(
        seconds=seconds,
        usd=Interval(low=hours.low * low, expected=hours.expected * usd_per_hour, high=hours.high * high),
        usd_per_node_hour=usd_per_hour,
        node_count=node_count,
    )
