"""Reads the micro-batches of a stream, in a rank's process or in a worker of it.

Which samples they consist of is `trainer.data.stream_sampler`; one sub-stream is `trainer.data.stream`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from trainer.data.coverage import substream_samples
from trainer.data.loader import MANY
from trainer.data.random_state import seed_all
from trainer.data.sampler import SMALLEST, cut_evenly, micro_batch_seed
from trainer.data.stream import Stream, StreamState, SubStream, SubStreamEndedError
from trainer.data.stream_sampler import order_of_draws

States = Mapping[int, list[StreamState]]
"""States of each sub-stream, the newest last."""


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """One micro-batch that is to be read."""

    step: int
    """The steps done by then, over all passes."""
    number: int
    """Its place among those of the step."""
    epoch: int
    seed: int
    """The seed of the training."""
    size: int
    """The samples that are wanted."""
    at_most: int | None
    at_least: int
    takes_states: bool = False
    """Whether the states of its sub-streams are wanted, as they are before it is read."""
    start: Mapping[int, int] | None = None
    """The samples drawn from each of its sub-streams that has not ended; None: what the order before it has left."""
    states: States = field(default_factory=dict)
    """Known states of those, with `start`."""
    wanted: frozenset[int] = frozenset()
    """All sub-streams that this rank reads, with `start`."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a micro-batch consists of, beside its data."""

    number: int
    samples: NDArray[np.int64]
    """Its samples (n,), see `trainer.data.coverage.substream_samples`."""
    sizes: list[int]
    """The samples of each part that goes through the model at once."""
    ended: list[int]
    """Its sub-streams that have ended, and of which all samples are drawn."""
    states: dict[int, StreamState]


class StreamReads(Dataset[tuple[list[Any], Drawn]]):
    """Reads whole micro-batches of a stream, in this process or in a worker. It keeps the samples of the latest orders,
    so that a discarded step does not open its sub-streams anew."""

    def __init__(self, stream: Stream, collate: Callable[[list[Any]], Any], kept_orders: int) -> None:
        self._stream, self._collate, self._kept_orders = stream, collate, kept_orders
        self._open: dict[int, SubStream] = {}
        self._at: dict[int, dict[int, int]] = {}
        """Of each micro-batch, the samples drawn from each of its sub-streams that has not ended."""
        self._before: dict[int, deque[dict[int, int]]] = {}
        """The same before each of its latest orders."""

    def __getitems__(self, orders: list[StreamOrder]) -> list[tuple[list[Any], Drawn]]:
        return [self[order] for order in orders]

    def __getitem__(self, order: StreamOrder) -> tuple[list[Any], Drawn]:
        if order.start is not None:
            self._begin(order)
        at = self._at[order.number]
        before = self._before[order.number]
        before.append(dict(at))
        taken = {number: self._open[number] for number in at} if order.takes_states else {}
        texts = {number: (opened.read, opened.state()) for number, opened in taken.items()}
        coming = order_of_draws(at, self._has)
        drawn = list(itertools.islice(coming, order.size))
        rest = list(itertools.islice(coming, SMALLEST))
        if len(rest) < SMALLEST:  # too few for a micro-batch of their own
            drawn += rest
        samples = [self._open[number].get(sample) for number, sample in drawn]
        for number, sample in drawn:
            at[number] = sample + 1
        states = {number: found for number, text in texts.items() if (found := self._state_of(number, *text))}
        ended = [number for number in at if self._open[number].ends_at(at[number])]
        for number in ended:
            del at[number]
        if len(before) > self._kept_orders:
            for number, first in before.popleft().items():
                if number in before[0]:
                    self._open[number].forget(first)
                else:  # it has ended, and its samples will not be asked for again
                    del self._open[number]
        cuts = cut_evenly(len(drawn), order.at_most, order.at_least) if drawn else []
        data = []
        for place, (first, last) in enumerate(cuts):
            seed_all(micro_batch_seed(order.seed, order.step, order.number, place))
            data.append(self._collate(samples[first:last]))
        numbers = [substream_samples(number, sample, 1) for number, sample in drawn]
        ids = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int64)
        return data, Drawn(order.number, ids, [last - first for first, last in cuts], ended, states)

    def __len__(self) -> int:
        return MANY

    def _begin(self, order: StreamOrder) -> None:
        """Put the sub-streams of a micro-batch where an order begins, and close those that other ranks read now."""
        assert order.start is not None
        for number in [each for each in self._open if each not in order.wanted]:
            del self._open[number]
        for number, sample in order.start.items():
            opened = self._open.get(number)
            if opened is None or opened.epoch != order.epoch or not opened.holds(sample):
                states = order.states.get(number, ())
                opened = SubStream(self._stream, number, order.epoch, order.seed, sample, states)
                self._open[number] = opened
            opened.skip_to(sample)
        self._at[order.number], self._before[order.number] = dict(order.start), deque()

    def _has(self, number: int, sample: int) -> bool:
        try:
            self._open[number].get(sample)
        except SubStreamEndedError:
            return False
        return True

    def _state_of(self, number: int, read: int, text: str | None) -> StreamState | None:
        """Return a state with a digest of what was read since; None where it could not be verified."""
        opened = self._open[number]
        count = opened.read - read
        digest = opened.digest(read, count) if count and text is not None else ""
        return StreamState(read, text, count, digest) if digest and text is not None else None
