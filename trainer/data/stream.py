"""`Stream`: training samples without positions, as numbered sub-streams, each of which is read in its own order.

What a caller gives, how a sub-stream is opened at one of its samples, and what is tried of it before a training belong
here. Which sub-stream a sample of a micro-batch is of is `trainer.data.stream_sampler`; reading them is
`trainer.data.stream_reads`.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import inspect
import io
import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from trainer.data.batches import update_digest
from trainer.data.random_state import own_random_state, seed_all
from trainer.errors import ConfigError

_TRIED = 4
"""Samples of a sub-stream that are tried, and sub-streams of which they are."""
_OTHER_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
_log = logging.getLogger(__name__)


class Stream(IterableDataset[Any]):
    """Training samples that come as a stream: data without positions, such as archives, logs, or a pipeline.

    ``make_substream(number, count)`` returns the sub-stream of a number 0 … count - 1: an `IterableDataset` or any
    other iterable, which gives the same samples each time it is made. Together they have each sample once. A sub-stream
    is read by one rank at a time; when ranks come and go, another one reads it from where the training is. It is put
    there

    - by ``make_substream(number, count, start=n)``, if the function has an argument ``start``: without its first n
      samples,
    - else by ``state_dict`` and ``load_state_dict`` of what it returns, or of its iterator,
    - else by reading forward.

    A function with an argument ``epoch`` gets the number of the pass, from 0, and so does the method ``set_epoch`` of
    what it returns: the order may change with it, but not the number of samples.
    """

    def __init__(
        self, make_substream: Callable[..., Iterable[Any]], count: int, *, collate_fn: Callable[..., Any] | None = None
    ) -> None:
        """``count``: the number of sub-streams, a multiple of the number of micro-batches of a global batch.
        ``collate_fn``: makes a batch of a list of samples, where no `DataLoader` has one. Raise `ConfigError` for a
        function or a count that cannot be used."""
        if not callable(make_substream):
            raise ConfigError(
                f"Stream(make_substream, …) is a {type(make_substream).__name__}: give a function of (number, count) "
                "that returns the sub-stream of this number"
            )
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"Stream(…, count={count!r}): give the number of sub-streams, 1 or above")
        self.make_substream, self.count, self.collate_fn = make_substream, count, collate_fn
        names = _arguments_of(make_substream)
        self.takes_start, self.takes_epoch = "start" in names, "epoch" in names

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of a pass, one sub-stream after the other."""
        for number in range(self.count):
            yield from self.make(number)

    def make(self, number: int, epoch: int = 0, start: int = 0) -> Iterable[Any]:
        """Return the sub-stream of a number, for this pass. Raise `ConfigError` for what is no iterable."""
        given = ({"start": start} if self.takes_start else {}) | ({"epoch": epoch} if self.takes_epoch else {})
        made = self.make_substream(number, self.count, **given)
        if not isinstance(made, Iterable):
            raise ConfigError(
                f"make_substream({number}, {self.count}) returned a {type(made).__name__}: return an iterable"
            )
        if callable(set_epoch := getattr(made, "set_epoch", None)):
            set_epoch(epoch)
        return made


class SubStreamEndedError(Exception):
    """A sub-stream has no such sample."""


class StreamState(NamedTuple):
    """A state of a sub-stream, and how to see whether it is put back rightly."""

    read: int
    """Samples that were read by then."""
    text: str
    followed_by: int
    """Samples that were read right after it."""
    digest: str
    """Of those."""


@dataclass(slots=True)
class SubStream:
    """A sub-stream that is being read in one pass. Its latest samples are kept until `forget`, so that a step that is
    discarded finds them again."""

    stream: Stream
    number: int
    epoch: int
    seed: int
    start: int
    """The sample at which it is opened."""
    states: Sequence[StreamState] = ()
    """Known states of it in this pass."""
    read: int = 0
    """Samples that were read or left out so far."""
    has_ended: bool = False
    kept: deque[Any] = field(default_factory=deque)
    """The latest of them."""
    _iterator: Iterator[Any] = field(init=False)
    _owner: Any = None
    """What has ``state_dict``."""

    def __post_init__(self) -> None:
        known = () if self.stream.takes_start else self.states
        for state in sorted((each for each in known if each.read <= self.start), key=lambda each: -each.read):
            if self._goes_on_from(state):
                return
            _log.warning(
                "sub-stream %d does not go on as it did where its state was taken (a shuffle buffer that is not in its "
                "state_dict?): it is read forward instead",
                self.number,
            )
        self._open(None, self.start if self.stream.takes_start else 0)

    def _open(self, state: str | None, read: int) -> None:
        """Begin to read: after ``read`` samples, where the sub-stream had this state."""
        self.read, self.has_ended, self._owner = read, False, None
        self.kept.clear()
        self._seed("open")
        made: Any = self.stream.make(self.number, self.epoch, read)
        if _has_state(made):
            self._owner = made
            if state is not None:
                made.load_state_dict(_state_of(state))
        self._iterator = iter(made)
        if self._owner is None and _has_state(self._iterator):
            self._owner = self._iterator
            if state is not None:
                self._owner.load_state_dict(_state_of(state))

    def _goes_on_from(self, state: StreamState) -> bool:
        """Begin to read at a known state, and return whether the samples that followed it then follow it now."""
        try:
            self._open(state.text, state.read)
            return self.digest(state.read, state.followed_by) == state.digest
        except SubStreamEndedError:
            return False
        except Exception:
            _log.warning("sub-stream %d does not take its state", self.number, exc_info=True)
            return False

    def digest(self, first: int, count: int) -> str:
        """Return a digest of this many samples from one on; "" where one of them has no content that could be compared.
        Raise `SubStreamEndedError` where there are fewer."""
        found = [digest_sample(self.get(sample)) for sample in range(first, first + count)]
        return "" if "" in found else hashlib.sha256("/".join(found).encode()).hexdigest()[:16]

    def holds(self, sample: int) -> bool:
        """Return whether a sample is kept, or to come."""
        return sample >= self.read - len(self.kept)

    def get(self, sample: int) -> Any:
        """Return a sample, by its number from 0; those between are left out. Raise `SubStreamEndedError` behind the
        last."""
        while sample >= self.read:
            if self.has_ended:
                raise SubStreamEndedError
            self._seed(str(self.read))  # what it draws does not depend on who reads it
            try:
                found = next(self._iterator)
            except StopIteration:
                self.has_ended = True
                raise SubStreamEndedError from None
            if sample > self.read:
                self.kept.clear()
            else:
                self.kept.append(found)
            self.read += 1
        found = self.kept[sample - self.read]
        return copy.copy(found) if isinstance(found, dict | list) else found  # who gets it may take parts out

    def skip_to(self, sample: int) -> None:
        """Read forward until this sample is the next one. Raise `ConfigError` for a sub-stream that ends before."""
        if sample <= self.read:
            return
        try:
            self.get(sample - 1)
        except SubStreamEndedError:
            raise ConfigError(
                f"sub-stream {self.number} ended after {self.read} samples, and {sample} were drawn from it before: it "
                "has to give the same samples each time it is made"
            ) from None
        self.kept.clear()

    def ends_at(self, sample: int) -> bool:
        """Return whether it is known to have this many samples."""
        return self.has_ended and self.read == sample

    def forget(self, first: int) -> None:
        """Keep the samples from this one on."""
        while len(self.kept) > self.read - first:
            self.kept.popleft()

    def state(self) -> str | None:
        """Return its state as text; None where it has none that a checkpoint could keep."""
        if self._owner is None or self.has_ended:
            return None
        try:
            written = io.BytesIO()
            torch.save(self._owner.state_dict(), written)
            text = base64.b64encode(written.getvalue()).decode()
            _state_of(text)
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
            _log.info("the state of sub-stream %d cannot be kept: %s", self.number, error)
            return None
        return text

    def _seed(self, what: str) -> None:
        name = f"{self.seed}/{self.epoch}/{self.number}/{what}".encode()
        seed_all(int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big"))


def digest_sample(sample: Any) -> str:
    """Return a digest of the content of a sample; "" where nothing of it has bytes."""
    digest = hashlib.sha256()
    return digest.hexdigest()[:16] if update_digest(digest, sample, takes_bytes=True) else ""


def _has_state(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _state_of(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def _arguments_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that can be given by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    return {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


@dataclass(frozen=True, slots=True)
class TriedStream:
    """What is known of a stream before it is read."""

    samples: list[Any]
    """Some of its first samples."""
    digest: str
    """Of them and the number of sub-streams."""
    keeps_states: bool
    """Whether the states of its sub-streams put them to where they were."""


def try_stream(stream: Stream, seed: int = 0) -> TriedStream:
    """Try some sub-streams of a stream: each must give the same samples each time and on each rank, other ones than the
    next, and those from ``start`` on where it takes that. Raise `ConfigError`, which names the fault, for another one,
    and for a stream without samples."""
    with own_random_state():
        numbers = sorted({place * stream.count // _TRIED for place in range(_TRIED)} | {min(1, stream.count - 1)})
        first = {number: _first(stream, number, seed) for number in numbers}
        if not any(first.values()):
            first = next(({each: found} for each in range(stream.count) if (found := _first(stream, each, seed))), {})
        if not first:
            raise ConfigError(f"the stream has no samples in any of its {stream.count} sub-streams")
        digests = {number: [digest_sample(sample) for sample in samples] for number, samples in first.items()}
        for number, known in digests.items():
            _refuse_other_samples(stream, number, seed, known)
        _refuse_equal_parts(digests)
        keeps_states = all(_keeps_state(stream, number, seed, known) for number, known in digests.items())
        whole = hashlib.sha256(repr([stream.count, sorted(digests.items())]).encode()).hexdigest()
        return TriedStream([each for samples in first.values() for each in samples], whole[:16], keeps_states)


def _first(stream: Stream, number: int, seed: int, start: int = 0) -> list[Any]:
    """Return the samples of a sub-stream from ``start`` on, up to the first ones that are tried."""
    opened, found = SubStream(stream, number, 0, seed, start), list[Any]()
    try:
        for sample in range(start, _TRIED):
            found.append(opened.get(sample))
    except SubStreamEndedError:
        pass
    return found


def _refuse_other_samples(stream: Stream, number: int, seed: int, known: list[str]) -> None:
    """Raise `ConfigError` for a sub-stream that gives other samples than these if it is made again."""
    if [digest_sample(sample) for sample in _first(stream, number, seed)] != known:
        raise ConfigError(
            f"sub-stream {number} gave other samples when it was made a second time: make_substream({number}, "
            f"{stream.count}) has to return the same samples each time, since another rank reads it on after a lost "
            "node. Return a new iterable with each call, and give generators and shuffles a fixed seed"
        )
    with _another_rank():
        again = [digest_sample(sample) for sample in _first(stream, number, seed)]
    if again != known:
        raise ConfigError(
            f"sub-stream {number} gives other samples on another rank: it divides itself by RANK or WORLD_SIZE, which "
            "the trainer does already. Let it depend on (number, count) alone"
        )
    if stream.takes_start and len(known) > 1:
        start = len(known) // 2
        if [digest_sample(sample) for sample in _first(stream, number, seed, start)] != known[start:]:
            raise ConfigError(
                f"make_substream({number}, {stream.count}, start={start}) does not begin with sample {start} of the "
                "sub-stream: leave out its first samples, as many as start says, or leave the argument start out"
            )


def _refuse_equal_parts(digests: Mapping[int, list[str]]) -> None:
    numbers = list(digests)
    for one, other in pairwise(numbers):
        if digests[one] == digests[other] and len(digests[one]) == _TRIED and "" not in digests[one]:
            raise ConfigError(
                f"sub-streams {one} and {other} begin with the same {_TRIED} samples, so each would be used more than "
                "once: make_substream(number, count) has to return the part of this number"
            )


def _keeps_state(stream: Stream, number: int, seed: int, known: list[str]) -> bool:
    """Return whether a sub-stream has states that put it back to where it was, as far as its first samples tell."""
    if stream.takes_start or len(known) < 2:
        return not stream.takes_start
    opened = SubStream(stream, number, 0, seed, 0)
    opened.get(0)
    text = opened.state()
    if text is None or "" in known:
        return False
    state = StreamState(1, text, len(known) - 1, opened.digest(1, len(known) - 1))
    return SubStream(stream, number, 0, seed, 1, [state]).read == len(known)


@contextmanager
def _another_rank() -> Iterator[None]:
    """Let the environment be that of another rank."""
    before = {name: os.environ.get(name) for name in _OTHER_RANK}
    here = os.environ.get("RANK", "0") == _OTHER_RANK["RANK"]
    os.environ.update(_OTHER_RANK | ({"RANK": "0", "LOCAL_RANK": "0"} if here else {}))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
