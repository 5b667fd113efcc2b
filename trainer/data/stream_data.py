"""A stream as training data: its micro-batches, read by the rank that has them, and the batches that ranks agree on.

How many samples a step has is known only once they are read, since nobody knows where sub-streams end. So ranks sum
what they have read before they compute (`StreamLoader`): all know then how many samples the global batch has, and where
the stream is once the step is committed. A step that is discarded changes nothing, and whoever gets the micro-batch
then reads the same samples.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.data.batches import Batch, Samples, move_to
from trainer.data.coverage import (
    STREAM,
    EpochCoverage,
    StreamPlace,
    digest_samples,
    split_substream_sample,
)
from trainer.data.dataset_data import DatasetData
from trainer.data.loader import MANY, copies_to
from trainer.data.sampler import SMALLEST
from trainer.data.stream import Stream, StreamState, try_stream
from trainer.data.stream_reads import Drawn, States, StreamOrder, StreamReads
from trainer.data.stream_sampler import StreamSampler
from trainer.data.torch_loader import LoaderRequest, ReadOptions, WorkerPool
from trainer.errors import ConfigError
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

_STATES_KEPT = 2
"""States of a sub-stream: where one was taken ahead of what is committed, the one before still fits."""
_READ_AHEAD = 2
"""Micro-batches that a worker reads ahead, unless the settings say otherwise."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a micro-batch's samples, as a message says them."""

    samples: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> str:
        number, sample = split_substream_sample(int(self.samples[row]))
        return f"{sample} of sub-stream {number}"


class StreamStates:
    """The states of sub-streams that all ranks know, which are saved in checkpoints and given to newcomers. They say
    where reading on may begin, and not where the training is: without them it takes longer."""

    def __init__(self) -> None:
        self.epoch, self.known = 0, dict[int, list[StreamState]]()

    def add(self, epoch: int, number: int, state: StreamState) -> None:
        """Keep a state of a sub-stream in this pass."""
        if epoch != self.epoch:
            self.epoch, self.known = epoch, {}
        held = self.known.setdefault(number, [])
        held.append(state)
        del held[:-_STATES_KEPT]

    def of_pass(self, epoch: int) -> States:
        """Return the states in this pass."""
        return self.known if epoch == self.epoch else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "epoch": self.epoch,
            "known": {number: [tuple(each) for each in held] for number, held in self.known.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned."""
        self.epoch = state["epoch"]
        self.known = {number: [StreamState(*each) for each in held] for number, held in state["known"].items()}


class _FirstSamples(Dataset[Any]):
    """The samples of a stream that were tried, over and over: what a model is tried on before the training."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __getitem__(self, position: int) -> Any:
        # Positions at even distances in `MANY` are other samples, too.
        return self._samples[(position + (position >> 36)) % len(self._samples)]

    def __len__(self) -> int:
        return MANY


class StreamData(DatasetData):
    """A stream as training samples, with datasets to be judged on."""

    def __init__(
        self,
        train: Stream,
        valid: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        options: Mapping[str, ReadOptions] | None = None,
        name: str | None = None,
    ) -> None:
        """``options``: how each split is read. Raise `ConfigError` as `trainer.data.stream.try_stream`."""
        self.stream, self.states = train, StreamStates()
        tried = try_stream(train)
        self.substreams, self._keeps_states = train.count, tried.keeps_states
        options = dict(options or {})
        given = options.get("train", ReadOptions())
        options["train"] = replace(given, collate_fn=given.collate_fn or train.collate_fn)
        name = f"{name or f'stream-{tried.digest}'}-of-{train.count}"
        super().__init__(_FirstSamples(tried.samples), valid, test, options, name)

    @property
    def attached(self) -> Mapping[str, Any]:
        """The states of sub-streams, which checkpoints keep."""
        return {"stream": self.states} if self._keeps_states else {}

    def pool_of(self, splits: list[str], options: ReadOptions, rank: int, patience: float) -> WorkerPool:
        """Return the workers of some splits. A stream has one worker at most, since a sub-stream is read in order."""
        if splits != ["train"]:
            return super().pool_of(splits, options, rank, patience)
        options = replace(options, num_workers=min(1, options.num_workers))
        kept = 3 + (options.prefetch_factor or _READ_AHEAD)
        reads = StreamReads(self.stream, options.collate_fn or default_collate, kept)
        return WorkerPool(cast("Dataset[Any]", reads), options, rank, patience)


class StreamLoader:
    """The batches of one rank in one world, of which all ranks know how many samples they have together."""

    def __init__(
        self,
        data: StreamData,
        config: DistributedTrainingConfig,
        sampler: StreamSampler,
        world: World,
        state: Any,
        faults: Faults,
        timer: StepTimer,
    ) -> None:
        """``state``: that of the training, whose progress says where it is."""
        self.data, self.config, self.sampler, self.world = data, config, sampler, world
        self.state, self.faults, self.timer = state, faults, timer
        self._pool = data.training_pool(world.device)

    def batches(self, epoch: int, offset: int, step: int) -> Iterator[Batch]:
        """Yield the batches of a pass from where the training is in it. ``step``: the optimizer steps that are done by
        then; ``offset``: the samples of the pass that are used by then. Raise `ConfigError` on all ranks for a stream
        that gives other samples than before."""
        place = self._place(epoch, offset)
        infos: deque[list[Drawn]] = deque()
        coming = self._read(epoch, place, step, infos)
        copies = copies_to(self.world.device)
        read = coming if copies is None else copies.ahead(coming)
        for number in itertools.count(step):
            self.timer.mark("other")
            self.faults.reach("input", number)
            data = next(read)
            drawn = infos.popleft()
            counts, place = self._agree(epoch, place, drawn, takes_states=self._takes_states(number))
            yield self._batch(counts, data, drawn, place)
            if len(place.ended) == len(place.drawn):
                return

    def close(self) -> None:
        """The worker stays for the next loader."""

    @property
    def _consumed(self) -> list[EpochCoverage]:
        found: list[EpochCoverage] = self.state.progress.consumed
        return found

    def _place(self, epoch: int, offset: int) -> StreamPlace:
        """Return where the training is in a pass."""
        count, known = self.data.substreams, self._consumed
        if known and known[0].drawn is not None and len(known[0].drawn) != count:
            raise ConfigError(
                f"the stream has {count} sub-streams, and had {len(known[0].drawn)} when this training began: a sample "
                "is known by the number of its sub-stream, so give Stream(…, count=…) as before"
            )
        if not offset:
            return StreamPlace([0] * count, [])
        last = known[-1]
        assert last.drawn is not None
        assert last.ended is not None
        return StreamPlace(list(last.drawn), list(last.ended))

    def _takes_states(self, step: int) -> bool:
        """Whether ranks exchange the states of their sub-streams with this step, behind which a checkpoint is due."""
        return bool(self.data.attached) and (step + 1) % self.config.checkpoint_frequency == 0

    def _orders(self, epoch: int, place: StreamPlace, step: int) -> Iterator[StreamOrder]:
        sampler, known = self.sampler, self.data.states.of_pass(epoch)
        ended = set(place.ended)
        wanted = frozenset(each for number in sampler.numbers for each in sampler.substreams_of(number))
        for number, micro_batch in ((number, each) for number in itertools.count(step) for each in sampler.numbers):
            cut = sampler.wanted, sampler.at_most, sampler.at_least
            order = StreamOrder(number, micro_batch, epoch, sampler.seed, *cut, self._takes_states(number))
            if number == step:
                start = {each: place.drawn[each] for each in sampler.substreams_of(micro_batch) if each not in ended}
                order = replace(
                    order, start=start, wanted=wanted, states={each: known[each] for each in start if each in known}
                )
            yield order

    def _read(self, epoch: int, place: StreamPlace, step: int, infos: deque[list[Drawn]]) -> Iterator[list[Any]]:
        """Yield the data of this rank's micro-batches of each step; what they consist of goes into ``infos``."""
        coming = self._pool.read(self._orders(epoch, place, step))
        for first in coming:
            read = [first, *itertools.islice(coming, len(self.sampler.numbers) - 1)]
            infos.append([drawn for _, drawn in read])
            yield [part for data, _ in read for part in data]

    def _agree(
        self, epoch: int, before: StreamPlace, drawn: list[Drawn], takes_states: bool
    ) -> tuple[NDArray[np.int64], StreamPlace]:
        """Return (samples of each sub-stream in a step, where the stream is after it), as all ranks together have read
        it. A collective."""
        count = self.data.substreams
        sums = np.zeros(2 * count, dtype=np.int64)
        for each in drawn:
            numbers, counts = np.unique(each.samples >> 40, return_counts=True)
            sums[numbers] += counts
            sums[[count + number for number in each.ended]] = 1
        sums[[count + number for number in before.ended]] = self.world.rank == 0
        self.world.all_reduce(torch.from_numpy(sums), "samples of the stream")
        if takes_states:
            mine = [[number, *state] for each in drawn for number, state in each.states.items()]
            told: list[list[Any]] = self.world.all_gather_object(mine)
            for number, *state in itertools.chain(*told):
                self.data.states.add(epoch, number, StreamState(*state))
        now = (np.asarray(before.drawn) + sums[:count]).tolist()
        place = StreamPlace(now, np.flatnonzero(sums[count:]).tolist())
        if not sums[:count].any():
            raise ConfigError(
                "the stream has no samples"
                if not any(now)
                else f"the stream gave no more samples in pass {epoch + 1}, where it is to go on"
            )
        self._refuse_other_lengths(epoch, place)
        return sums[:count], place

    def _refuse_other_lengths(self, epoch: int, place: StreamPlace) -> None:
        """Raise `ConfigError` where a sub-stream ends elsewhere than in the first pass."""
        if not epoch:
            return
        lengths = self._consumed[0].drawn
        assert lengths is not None
        ended = set(place.ended)
        for number, (now, length) in enumerate(zip(place.drawn, lengths, strict=True)):
            if now > length or (number in ended and now != length):
                found = f"ended after {now}" if number in ended else f"has more than {length}"
                raise ConfigError(
                    f"sub-stream {number} {found} samples in pass {epoch + 1}, and had {length} in the first: each "
                    "pass has to give the same samples, in the same or another order"
                )

    def _batch(self, counts: NDArray[np.int64], data: list[Any], drawn: list[Drawn], place: StreamPlace) -> Batch:
        device, parts = self.world.device, list[Samples]()
        coming = iter(data)
        for each in drawn:
            last = 0
            for part, size in enumerate(each.sizes):
                first, last = last, last + size
                names = _Names(each.samples[first:last])
                parts.append(Samples(each.number, size, move_to(next(coming), device), part, names))
        used = np.concatenate([each.samples for each in drawn])
        stand_in = None if parts else self._stand_in()
        largest = int(counts.reshape(-1, self.sampler.micro_batches).sum(0).max())
        return Batch(int(counts.sum()), tuple(parts), digest_samples(used), STREAM, place, largest, stand_in)

    def _stand_in(self) -> Samples:
        """Return samples that count for nothing."""
        positions = np.arange(SMALLEST, dtype=np.int64)
        return Samples(self.sampler.numbers[0], SMALLEST, self.data.read("train", positions, self.world.device))


def data_of_requests(
    by_split: Mapping[str, LoaderRequest], name: str | None = None, sample_weights: Any = None, lengths: Any = None
) -> DatasetData:
    """Return the data of a training from the requests for its splits. Each loader's samples are read as it says; those
    of a dataset that was given without one, as the training loader says. Raise `ConfigError` as `data_of`."""
    usual = by_split["train"].options
    options = {split: usual if request.batch_size is None else request.options for split, request in by_split.items()}
    datasets = {split: request.dataset for split, request in by_split.items()}
    return data_of(datasets, options, name, sample_weights, lengths)


def data_of(
    datasets: Mapping[str, Any],
    options: Mapping[str, ReadOptions],
    name: str | None = None,
    sample_weights: Any = None,
    lengths: Any = None,
) -> DatasetData:
    """Return the data of a training from its datasets, by split. Raise `ConfigError` for what cannot be used."""
    train, valid, test = (datasets.get(split) for split in ("train", "valid", "test"))
    if not isinstance(train, Stream):
        data = DatasetData(cast("Dataset[Any]", train), valid, test, options=options, name=name)
        data.draw_by(sample_weights, lengths)
        return data
    if sample_weights is not None or lengths is not None:
        given = "lengths" if sample_weights is None else "sample_weights"
        raise ConfigError(
            f"{given} are of samples with positions, and a stream has none: weigh or sort the samples in the stream "
            "itself, or give a map-style dataset"
        )
    return StreamData(train, valid, test, options, name)
