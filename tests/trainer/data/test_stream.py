"""Streams: each sample once at any number of ranks that come and go, and what is refused of a stream."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from trainer import Stream
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch
from trainer.data.coverage import (
    DRAWS,
    SAMPLES,
    STREAM,
    add,
    find_coverage_errors,
    kind_of_data,
    split_substream_sample,
)
from trainer.data.sampler import spread_positions
from trainer.data.stream import StreamState, SubStream, digest_sample, try_stream
from trainer.data.stream_data import StreamData, StreamLoader
from trainer.data.stream_reads import StreamOrder, StreamReads
from trainer.data.stream_sampler import order_of_draws
from trainer.data.torch_loader import read_request
from trainer.engine.state import Progress
from trainer.engine.workload import make_sampler
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

CPU = torch.device("cpu")


class Peers:
    """What ranks in threads sum and gather."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.given = threading.Barrier(ranks, timeout=30), [None] * ranks

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class RankInThread:
    """As much of a world as a loader needs."""

    device = CPU

    def __init__(self, rank: int, peers: Peers) -> None:
        self.rank, self.peers = rank, peers

    def all_reduce(self, values: torch.Tensor, what: str) -> torch.Tensor:
        values.copy_(sum(self.peers.exchange(self.rank, values.clone())))
        return values

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.peers.exchange(self.rank, value)


def numbers(lengths: list[int]) -> Callable[[int, int], Iterator[tuple[int, int]]]:
    """Sub-streams of these lengths, whose samples are their names."""

    def make(number: int, count: int) -> Iterator[tuple[int, int]]:
        assert count == len(lengths)
        return iter([(number, sample) for sample in range(lengths[number])])

    return make


class Training:
    """The batches of a training whose ranks come and go; it computes nothing."""

    def __init__(self, stream: Stream, micro_batches: int, batch: int, **settings: Any) -> None:
        self.stream, self.progress = stream, Progress()
        self.is_shuffled = False
        self.config = DistributedTrainingConfig(
            world_size=micro_batches,
            gradient_accumulation_steps=1,
            batch_size_per_gpu=batch,
            max_steps=1000,
            **settings,
        )
        self.nodes: list[StreamData] = []
        self.batches: list[dict[int, list[tuple[int, int]]]] = []
        """The samples of each micro-batch of each committed step."""

    def run(self, ranks: int, steps: int, lost: bool = False, at_most: int | None = None) -> None:
        """Do some steps of the present pass with this many ranks; the last one is ``lost`` in the step after that."""
        while len(self.nodes) < ranks:
            self.nodes.append(StreamData(self.stream))
            if len(self.nodes) > 1:
                self.nodes[-1].states.load_state_dict(self.nodes[0].states.state_dict())
        del self.nodes[ranks:]
        peers, found = Peers(ranks), [list[Batch]() for _ in range(ranks)]
        epoch, offset = self.progress.position(0)

        def life(rank: int) -> None:
            for batch in self.loader(rank, ranks, peers, at_most).batches(epoch, offset, self.progress.step):
                found[rank].append(batch)
                if len(found[rank]) == steps + lost:
                    break

        with ThreadPoolExecutor(ranks) as threads:
            for each in [threads.submit(life, rank) for rank in range(ranks)]:
                each.result()
        done = list(zip(*found, strict=True))[:steps]
        for of_ranks in done:
            self._commit(epoch, of_ranks)
        if lost:
            self.nodes.pop(random.Random(self.progress.step).randrange(ranks))

    def loader(self, rank: int, ranks: int, peers: Peers, at_most: int | None = None) -> StreamLoader:
        node, world, faults = self.nodes[rank], RankInThread(rank, peers), Faults({}, CPU)
        sampler = make_sampler(self.config, node, rank, ranks, at_most)
        return StreamLoader(node, self.config, sampler, world, self, faults, StepTimer(False, CPU))  # type: ignore

    def rest_of_pass(self) -> list[Batch]:
        """What one rank reads of the rest of a pass, without a commit."""
        return list(self.loader(0, 1, Peers(1)).batches(*self.progress.position(0), self.progress.step))

    def _commit(self, epoch: int, batches: tuple[Batch, ...]) -> None:
        first, digest = batches[0], 0
        used: dict[int, list[tuple[int, int]]] = {}
        for batch in batches:
            assert (batch.samples, batch.place) == (first.samples, first.place), "all ranks know the same"
            assert bool(batch.micro_batches) is (batch.stand_in is None)
            digest = add(digest, batch.digest)
            for part in batch.micro_batches:
                samples = list(zip(*(column.tolist() for column in part.data), strict=True))
                assert len(samples) == part.count == len(part.positions)
                assert self.is_shuffled or part.positions[0] == f"{samples[0][1]} of sub-stream {samples[0][0]}"
                used.setdefault(part.number, []).extend(samples)
        assert first.largest == max(map(len, used.values()))
        assert sum(map(len, used.values())) == first.samples == sum(batch.local_samples for batch in batches)
        self.progress.commit(epoch, first.samples, digest, first.kind, first.place)
        self.batches.append(used)

    def errors(self) -> list[str]:
        records = [item.record() for item in self.progress.consumed]
        assert all(item["kind"] == STREAM for item in records)
        return find_coverage_errors(records, 1000, int(self.progress.epochs(0)))


def one_rank(lengths: list[int], micro_batches: int, batch: int) -> list[dict[int, list[tuple[int, int]]]]:
    """The batches of a pass that nothing disturbs."""
    training = Training(Stream(numbers(lengths), len(lengths)), micro_batches, batch)
    training.run(1, 1000)
    return training.batches


Shape = tuple[list[int], int, int]


@st.composite
def streams(draw: Any) -> Shape:
    """Lengths of sub-streams, micro-batches, samples of a micro-batch."""
    micro_batches = draw(st.integers(1, 4))
    count = micro_batches * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count).filter(any))
    return lengths, micro_batches, draw(st.integers(1, 5))


@given(given=streams(), data=st.data())
def test_each_sample_is_used_once_whoever_comes_and_goes(
    given: tuple[list[int], int, int], data: st.DataObject
) -> None:
    lengths, micro_batches, batch = given
    whole = one_rank(lengths, micro_batches, batch)
    training = Training(Stream(numbers(lengths), len(lengths)), micro_batches, batch, checkpoint_frequency=2)
    while training.progress.position(0)[0] == 0:
        ranks, steps = data.draw(st.integers(1, micro_batches)), data.draw(st.integers(1, 3))
        training.run(ranks, steps, lost=data.draw(st.booleans()), at_most=data.draw(st.none() | st.integers(1, 5)))
    assert training.batches == whole
    used = Counter(sample for step in whole for part in step.values() for sample in part)
    assert used == {(number, sample): 1 for number, length in enumerate(lengths) for sample in range(length)}
    assert all(number % micro_batches == part for step in whole for part in step for number, _ in step[part])
    assert training.errors() == []
    for part in range(micro_batches):  # BatchNorm trains on two samples and more
        sizes = [len(step[part]) for step in whole if part in step]
        assert batch == 1 or sum(lengths[part::micro_batches]) < 2 or min(sizes) > 1


def test_another_batch_in_the_middle_of_a_pass_uses_each_sample_once() -> None:
    lengths = [9, 4, 7, 0, 12, 3, 8, 8, 1, 5, 2, 6]
    training = Training(Stream(numbers(lengths), 12), 2, 3)
    for world_size, batch, ranks in [(2, 3, 2), (4, 2, 3), (3, 5, 1), (6, 1, 4), (1, 4, 1)]:
        training.config = replace(training.config, world_size=world_size, batch_size_per_gpu=batch)
        training.run(ranks, 2 if world_size > 1 else 1000, lost=world_size == 4)
    used = Counter(sample for step in training.batches for part in step.values() for sample in part)
    assert used == {(number, sample): 1 for number, length in enumerate(lengths) for sample in range(length)}
    assert training.progress.position(0) == (1, 0)
    assert training.errors() == []


def test_a_second_pass_is_as_the_first_and_another_one_is_refused() -> None:
    lengths = [5, 0, 3, 4]
    training = Training(Stream(numbers(lengths), 4), 2, 2)
    for _ in range(2):
        training.run(2, 1000)
    assert training.batches[: len(training.batches) // 2] * 2 == training.batches
    assert training.progress.position(0) == (2, 0)
    assert training.errors() == []
    lengths[2] = 9
    training.nodes = [StreamData(Stream(numbers(lengths), 4))]
    with pytest.raises(ConfigError, match="sub-stream 2 has more than 3 samples in pass 3, and had 3 in the first"):
        training.rest_of_pass()
    lengths[2] = 2
    training.nodes = [StreamData(Stream(numbers(lengths), 4))]
    with pytest.raises(ConfigError, match="sub-stream 2 ended after 2 samples in pass 3"):
        training.rest_of_pass()


def test_a_stream_that_became_shorter_is_refused_where_it_goes_on() -> None:
    training = Training(Stream(numbers([9, 9]), 2), 1, 3)
    training.run(1, 4)
    training.nodes = [StreamData(Stream(numbers([4, 9]), 2))]
    with pytest.raises(ConfigError, match="sub-stream 0 ended after 4 samples, and 6 were drawn from it before"):
        training.rest_of_pass()
    training.nodes = [StreamData(Stream(numbers([9, 9, 1]), 3))]
    with pytest.raises(ConfigError, match="the stream has 3 sub-streams, and had 2 when this training began"):
        training.rest_of_pass()


class Counted(IterableDataset[Any]):
    """A sub-stream that counts what is read of it, and has a state if it is asked to."""

    read: ClassVar[Counter[int]] = Counter()

    def __init__(self, number: int, length: int = 100, first: int = 0) -> None:
        self.number, self.length, self.at = number, length, first

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.at < self.length:
            self.at += 1
            Counted.read[self.number] += 1
            yield self.number, self.at - 1


class Stateful(Counted):
    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at), "of": (self.number, "plain")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


class Forgetful(Stateful):
    """Its state leaves out what it has in a buffer."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"]) + 3


class Shuffled(Counted):
    """Of a buffer of eight it gives four, and refills it. The other four are in no state of it, as in Hugging Face's
    shuffle: a state of the first buffer is right, and a later one loses samples."""

    filled_at = given = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        buffer, source = list[tuple[int, int]](), super().__iter__()
        left_out = self.given
        while True:
            self.filled_at, self.given = self.at, left_out
            buffer += itertools.islice(source, 8 - len(buffer))
            if not buffer:
                return
            for sample in [buffer.pop() for _ in range(min(4, len(buffer)))][left_out:]:
                self.given += 1
                yield sample
            left_out = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.filled_at, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.given = state["at"], state["given"]


class Odd(Stateful):
    """Its state is nothing that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": Counted(0)}


def with_start(number: int, count: int, start: int = 0) -> Counted:
    return Counted(number, first=start)


def read_after_loss(make: Callable[..., Any]) -> int:
    """The samples that a newcomer reads of a sub-stream at its sample 60, to do one step of three samples."""
    training = Training(Stream(make, 2), 2, 3, checkpoint_frequency=4)
    training.run(2, 20)
    Counted.read.clear()
    del training.nodes[1]
    training.nodes[0]._pools.clear()  # a process that has read nothing
    training.run(1, 1)
    assert training.batches[-1] == {0: [(0, 60), (0, 61), (0, 62)], 1: [(1, 60), (1, 61), (1, 62)]}
    return Counted.read[1]


def test_a_newcomer_reads_on_from_a_state_or_from_start_else_forward(caplog: pytest.LogCaptureFixture) -> None:
    tried = 40  # by a node as it begins, at most
    assert 60 < read_after_loss(lambda number, count: Counted(number)) <= 60 + tried
    assert read_after_loss(lambda number, count: Stateful(number)) < 20
    assert read_after_loss(with_start) < 10
    assert not caplog.records
    assert 60 < read_after_loss(lambda number, count: Forgetful(number)) <= 60 + tried
    assert "(a shuffle buffer that is not in its state_dict?): it is read forward instead" in caplog.text
    assert 60 < read_after_loss(lambda number, count: Odd(number)) <= 60 + tried


def test_a_rank_that_is_sent_back_further_than_it_keeps_begins_anew() -> None:
    reads = StreamReads(Stream(numbers([40]), 1), list, kept_orders=2)

    def read(step: int, start: int | None = None) -> list[int]:
        told = {} if start is None else {"start": {0: start}, "wanted": frozenset([0])}
        order = StreamOrder(step, 0, 0, 0, size=4, at_most=None, at_least=1, **told)
        [samples] = reads[order][0]
        return [sample for _, sample in samples]

    whole = [read(0, 0), *(read(step) for step in range(1, 6))]
    assert [sample for each in whole for sample in each] == list(range(24))
    opened = reads._open[0]
    assert read(5, 20) == whole[5]
    assert read(4, 16) == whole[4]
    assert reads._open[0] is opened
    assert len(opened.kept) < 16
    assert read(1, 4) == whole[1]
    assert reads._open[0] is not opened


def test_what_has_ended_is_not_opened_again() -> None:
    made: list[int] = []

    def make(number: int, count: int) -> list[tuple[int, int]]:
        made.append(number)
        return [(number, sample) for sample in range(3 if number == 0 else 30)]

    training = Training(Stream(make, 2), 2, 2)
    training.run(2, 5)
    training.nodes = [StreamData(training.stream)]
    made.clear()
    training.run(1, 3)
    assert made == [1]


def test_a_state_that_would_lose_samples_is_noticed_when_it_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(lambda number, count: Shuffled(number), 2)
    assert try_stream(stream).keeps_states, "its first samples do not tell"
    training = Training(stream, 2, 3, checkpoint_frequency=4)
    whole = Training(stream, 2, 3)
    training.is_shuffled = whole.is_shuffled = True
    whole.run(1, 1000)
    training.run(2, 13, lost=True)
    assert not caplog.records
    training.run(1, 1000)
    assert "it is read forward instead" in caplog.text
    assert training.batches == whole.batches
    assert training.errors() == []


def test_a_state_that_is_ahead_of_the_training_is_not_used() -> None:
    stream = Stream(lambda number, count: Stateful(number), 1)
    opened = SubStream(stream, 0, 0, 0, 0)

    def state(read: int) -> StreamState:
        opened.get(read - 1)
        text = opened.state()
        assert text is not None
        return StreamState(read, text, 2, opened.digest(read, 2))

    early, late = state(5), state(10)
    Counted.read.clear()
    assert SubStream(stream, 0, 0, 0, 7, [early, late]).get(7) == (0, 7)
    assert Counted.read[0] == 3
    assert SubStream(stream, 0, 0, 0, 10, [early, late]).read == 12
    assert SubStream(stream, 0, 0, 0, 3, [early, late]).get(3) == (0, 3)


def test_samples_of_a_sub_stream_are_random_by_their_number_alone() -> None:
    def noise(number: int, count: int) -> Iterator[tuple[float, float, float]]:
        for _ in range(9):
            yield float(torch.rand(())), random.random(), float(np.random.rand())

    stream = Stream(noise, 2)
    one = SubStream(stream, 1, 0, 7, 0)
    first = [one.get(sample) for sample in range(6)]
    other = SubStream(stream, 1, 0, 7, 4)
    other.get(3)
    torch.rand(3), random.random(), np.random.rand()  # as another sub-stream that is read meanwhile
    assert [other.get(sample) for sample in (4, 5)] == first[4:]
    assert SubStream(stream, 1, 1, 7, 0).get(0) != first[0]
    assert SubStream(stream, 0, 0, 7, 0).get(0) != first[0]
    state = torch.get_rng_state(), random.getstate()
    try_stream(stream)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_what_a_collate_function_takes_out_of_a_sample_is_there_again() -> None:
    def collate(samples: list[dict[str, int]]) -> list[int]:
        return [sample.pop("value") for sample in samples]

    stream = Stream(lambda number, count: ({"value": each} for each in range(8)), 1, collate_fn=collate)
    training = Training(stream, 1, 2)
    training.nodes = [StreamData(stream)]
    assert training.rest_of_pass()[0].micro_batches[0].data == [0, 1]
    assert [batch.micro_batches[0].data for batch in training.rest_of_pass()] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_epoch_is_told_and_set() -> None:
    told: list[Any] = []

    class Set(list[int]):
        def set_epoch(self, epoch: int) -> None:
            told.append(("set", epoch))

    def make(number: int, count: int, *, epoch: int) -> Set:
        told.append((number, epoch))
        return Set(range(number, number + 4))

    stream = Stream(make, 2)
    SubStream(stream, 1, 3, 0, 0)
    assert told == [(1, 3), ("set", 3)]
    assert sorted(stream) == [0, 1, 1, 2, 2, 3, 3, 4]


def by_rank(number: int, count: int) -> Iterator[int]:
    return iter(range(100 * number + int(os.environ.get("RANK", "0")), 1000, int(os.environ.get("WORLD_SIZE", "1"))))


def anew(number: int, count: int) -> Iterator[float]:
    return (random.SystemRandom().random() for _ in range(9))


ONCE = {number: iter(range(10 * number, 10 * number + 9)) for number in range(4)}
REFUSED = {
    "sub-stream 0 gives other samples on another rank: it divides itself by RANK": by_rank,
    "sub-stream 0 gave other samples when it was made a second time": anew,
    "Return a new iterable with each call": lambda number, count: ONCE[number],
    "sub-streams 0 and 1 begin with the same 4 samples": lambda number, count: range(50),
    r"make_substream\(0, 4\) returned a int: return an iterable": lambda number, count: number,
    "the stream has no samples in any of its 4 sub-streams": lambda number, count: (),
    r"make_substream\(0, 4, start=2\) does not begin with sample 2": lambda number, count, start=0: range(
        100 * number, 100 * number + 9
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_stream_is_refused_by_name(said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StreamData(Stream(REFUSED[said], 4))
    assert "RANK" not in os.environ


def test_empty_sub_streams_and_samples_without_content_are_none_of_these() -> None:
    lengths = [0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert try_stream(Stream(numbers(lengths), 16)).samples == [(2, 0), (2, 1), (2, 2)]
    assert len(try_stream(Stream(lambda number, count: [object()] * 5, 4)).samples) == 16
    made = Stream(lambda number, count: range(9 * number, 9 * number + 9), 1)
    assert try_stream(made).digest == try_stream(made).digest
    assert try_stream(Stream(lambda number, count: range(1, 9), 1)).digest != try_stream(made).digest
    assert StreamData(made, name="mine").dataset_id == "mine-of-1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([1, 2], 4), "is a list: give a function"),
        ((numbers([1]), 0), "count=0"),
        ((numbers([1]), True), "count=True"),
        ((numbers([1]), 2.0), "count=2.0"),
    ],
)
def test_what_makes_no_stream_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Stream(*arguments)


def test_samples_on_which_a_model_is_tried_are_not_all_the_same() -> None:
    for length in (4, 5, 16):
        data = StreamData(Stream(numbers([length] * 4), 4))
        for positions in (np.arange(16), spread_positions(data.count("train"), 16)):
            found = data.read("train", positions, CPU)
            assert len(set(zip(*(part.tolist() for part in found), strict=True))) > 8


def test_a_sample_is_known_by_its_content_where_it_has_some() -> None:
    class Image:
        def tobytes(self) -> bytes:
            return b"pixels"

    same = [digest_sample(each) for each in (b"pixels", {"image": Image()}, [memoryview(b"pixels")])]
    assert len({*same, digest_sample(b"others"), digest_sample("pixels")}) == 3
    assert digest_sample({"odd": object()}) == ""
    assert digest_sample((object(), 1)) == digest_sample(1) != digest_sample(torch.tensor(1))


def test_settings_that_fit_no_stream_are_refused() -> None:
    data = StreamData(Stream(numbers([3] * 4), 4))
    usual: dict[str, Any] = {"world_size": 2, "gradient_accumulation_steps": 1, "max_steps": 5}
    for changed, said in [
        ({"max_steps": None}, "a stream has no length, so training.max_steps has to say"),
        ({"world_size": 3}, r"4 sub-streams, and a global batch 3 micro-batches .* count=…\) a multiple of 3"),
        ({"strategy": "deepspeed"}, "training.strategy = 'deepspeed' does not train on streams"),
        ({"shuffle_block": 4}, "training.shuffle_block wants samples with positions"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make_sampler(DistributedTrainingConfig(**usual | changed), data, 0, 1)
    assert make_sampler(DistributedTrainingConfig(**usual), data, 0, 1).samples == 5 * 2 * 128


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_a_loader_of_a_stream_is_read_and_one_of_another_iterable_is_refused() -> None:
    request = read_request(DataLoader(Stream(numbers([2]), 1), batch_size=3, num_workers=2), "train")
    assert request.batch_size == 3
    assert request.options.num_workers == 2
    assert "a stream is read by one on each rank" in request.notes[0]
    with pytest.raises(ConfigError, match=r"Plain, an iterable dataset: .* Give trainer.Stream"):
        read_request(DataLoader(Plain(), batch_size=3), "train")
    with pytest.raises(ConfigError, match=r"the valid loader reads Stream, .* as in valid=list\(dataset\)"):
        read_request(DataLoader(Stream(numbers([2]), 1), batch_size=3), "valid")
    with pytest.raises(ConfigError, match=r"the test dataset Plain is iterable: .* as in test=list\(dataset\)"):
        StreamData(Stream(numbers([2]), 1), test=Plain())


def test_the_order_of_draws_follows_from_the_numbers_drawn() -> None:
    lengths = {0: 3, 4: 1, 8: 2}

    def has(number: int, sample: int) -> bool:
        return sample < lengths[number]

    whole = list(order_of_draws(dict.fromkeys(lengths, 0), has))
    assert whole == [(0, 0), (4, 0), (8, 0), (0, 1), (8, 1), (0, 2)]
    assert list(order_of_draws({0: 1, 4: 1, 8: 1}, has)) == whole[3:]


def test_records_of_a_stream_prove_each_sample_once() -> None:
    training = Training(Stream(numbers([5, 2, 3, 4]), 4), 2, 2)
    for _ in range(3):
        training.run(2, 1000)
    training.run(2, 1)
    records = [item.record() for item in training.progress.consumed]
    assert [item.get("drawn") for item in records] == [[5, 2, 3, 4], None, None, [1, 1, 1, 1]]
    assert find_coverage_errors(records, 1000, 3) == []
    wrong = [dict(item) for item in records]
    wrong[1]["digest"] += 1
    assert find_coverage_errors(wrong, 1000, 3) == [
        "pass 2 of the stream: 14 samples were used, but not each exactly once"
    ]
    wrong = [dict(item) for item in records]
    wrong[3]["drawn"] = [2, 1, 1, 0]
    assert "pass 4 of the stream: 4 samples were used, but not each exactly once" in find_coverage_errors(
        wrong, 1000, 3
    )
    wrong = [dict(item) for item in records]
    wrong[2]["samples"] = 13
    assert find_coverage_errors(wrong, 1000, 3) == ["pass 3 of the stream: 13 samples were used, and 14 were drawn"]
    [said] = find_coverage_errors(records, 45, 3)
    assert said == "46 samples of the stream were used, and all steps have 45"
    for drawn in ([1 << 50, 2, 3, 4], [1 << 50, -(1 << 50), 3, 4]):
        [said] = find_coverage_errors([{**records[0], "drawn": drawn}], 1000, 1)
        assert "samples of the stream were used, and all steps have 1000" in said
    [said] = find_coverage_errors(records, 1000, 3, SAMPLES)
    assert said == "what was recorded are stream, and not samples"
    assert "not of one kind" in find_coverage_errors([*records, {"epoch": 7, "samples": 1, "digest": 1}], 1000, 3)[0]
    assert find_coverage_errors(records, 1000, 3, STREAM) == []
    names = ["stream-1-of-12", "mine-weights-0123456789ab", "mine-lengths-0123456789ab", "stocks", "kind-of-blue"]
    assert [kind_of_data(name) for name in names] == [STREAM, DRAWS, SAMPLES, SAMPLES, SAMPLES]
    assert kind_of_data(training.nodes[0].dataset_id) == STREAM
    assert "had other lengths" in find_coverage_errors(records, 1000, 4)[0]
    assert find_coverage_errors(records[:2], 1000, 3) == ["epoch 3: nothing was recorded"]
    sample = int(next(iter(training.rest_of_pass()[0].micro_batches[0].positions.samples)))
    assert split_substream_sample(sample) == (0, 1)
    assert asdict(training.progress)["consumed"][0]["kind"] == STREAM
