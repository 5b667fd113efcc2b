"""Which samples of a stream a micro-batch consists of, and how long a training on a stream is at most.

What is said of samples with positions is `trainer.data.sampler`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.coverage import STREAM
from trainer.data.sampler import Sampler


def longest_stream(training: DistributedTrainingConfig) -> int:
    """Return the samples that a training draws at most from a stream, whose length nobody knows. Raise `ConfigError`
    where nothing says when it ends."""
    if training.max_steps is None:
        raise ConfigError(
            "a stream has no length, so training.max_steps has to say how long the training is at most, and what the "
            "schedule of the learning rate is for: set it"
        )
    return training.max_steps * training.global_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSampler(Sampler):
    """A sampler of a stream of numbered sub-streams. Micro-batch m of a step consists of samples of the sub-streams k
    with k modulo the number of micro-batches = m: so a sub-stream is read by one rank at a time, and which one that is
    follows the micro-batch. ``samples``: those that the training draws at most."""

    substreams: int

    def __post_init__(self) -> None:
        Sampler.__post_init__(self)
        if self.shuffle_block is not None:
            raise ConfigError(
                "training.shuffle_block wants samples with positions, which a stream has not: leave it out"
            )
        if self.substreams % self.micro_batches:
            raise ConfigError(
                f"the stream has {self.substreams} sub-streams, and a global batch {self.micro_batches} micro-batches "
                "(training.world_size x training.gradient_accumulation_steps): each micro-batch draws from as many "
                f"sub-streams, so give Stream(…, count=…) a multiple of {self.micro_batches}"
            )

    @property
    def kind(self) -> str:
        """What is proven of a pass."""
        return STREAM

    def steps_to_do(self, epoch: int, offset: int, epochs: int) -> int:
        """Return the most steps that there may be to the end of ``epochs`` passes."""
        return 0 if epoch >= epochs else self.samples // self.global_batch_size

    @property
    def wanted(self) -> int:
        """The samples of a micro-batch, while there are enough."""
        return self.global_batch_size // self.micro_batches

    @property
    def numbers(self) -> range:
        """This rank's micro-batches, by their numbers."""
        return range(self.rank, self.micro_batches, self.world_size)

    def substreams_of(self, number: int) -> range:
        """Return the sub-streams of a micro-batch."""
        return range(number, self.substreams, self.micro_batches)


def order_of_draws(drawn: Mapping[int, int], has: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    """Yield (sub-stream, sample of it) in the order in which a micro-batch draws them: of the sub-streams that have not
    ended the one of which the fewest samples are drawn, the lowest number first. So the order follows from the numbers
    of samples drawn alone. ``drawn``: these numbers; ``has``: whether a sub-stream has a sample, from 0."""
    waiting = sorted((count, number) for number, count in drawn.items())  # which is a heap
    while waiting:
        sample, number = waiting[0]
        if has(number, sample):
            yield number, sample
            heapq.heapreplace(waiting, (sample + 1, number))
        else:
            heapq.heappop(waiting)
