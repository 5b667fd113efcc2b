"""Digests of the samples used: small enough for each all-reduce, strong enough to prove that none was left out.

Every sample has a hash; those of a step are summed modulo 2^64 over all ranks together with their number, in the very
all-reduce that commits the step. Over an epoch the sums must be those of 0 … n - 1, each once: they are computed from
n alone, without the sampler, so a sampler that deals a sample twice cannot hide it (a chance of 2^-64 left aside).

Where samples are drawn with replacement, what is proven is that each draw was made once: its digest is of the places
in the order of the epoch. Samples of a stream have no positions: what is counted is sample n of sub-stream k.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 20
GOLDEN, MIXERS, SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)
"""The numbers of SplitMix64, whose finaliser is the hash of a sample."""


def digest_samples(samples: NDArray[np.int64]) -> int:
    """Return the sum of the samples' hashes modulo 2^64, as a signed 64-bit number: sums of digests, wrapping, are
    digests."""
    return digests(samples, np.zeros(1, dtype=np.int64))[0] if len(samples) else 0


def digests(samples: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    """Return the digest (`digest_samples`) of each part of ``samples``. Parts begin at ``starts``; none is empty."""
    values = np.asarray(samples, dtype=np.uint64) + np.uint64(GOLDEN)
    for shift, factor in zip(SHIFTS, MIXERS, strict=False):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    values ^= values >> np.uint64(SHIFTS[-1])
    return np.add.reduceat(values, starts).astype(np.int64).tolist()


def add(one: int, other: int) -> int:
    """Return the sum of two digests."""
    return (one + other + 2**63) % 2**64 - 2**63


def digest_of_all(count: int) -> int:
    """Return the digest of 0 … count - 1, each once."""
    total = 0
    for first in range(0, count, _BLOCK):
        total = add(total, digest_samples(np.arange(first, min(first + _BLOCK, count), dtype=np.int64)))
    return total


SAMPLES, DRAWS, STREAM = "samples", "draws", "stream"
"""What the records of an epoch count: samples, each once; draws with replacement, each once; samples of a stream."""
_SUBSTREAM_BITS = 40
_STREAM_NAME, _WEIGHTED_NAME = re.compile(r"-of-\d+$"), re.compile(r"-weights-[0-9a-f]{12}$")


def substream_samples(number: int, first: int, count: int) -> NDArray[np.int64]:
    """Return one number for each of ``count`` samples (count,) of a sub-stream, from its sample ``first`` on, which no
    sample of another sub-stream has."""
    return (number << _SUBSTREAM_BITS) + np.arange(first, first + count, dtype=np.int64)


def split_substream_sample(sample: int) -> tuple[int, int]:
    """Return (number of the sub-stream, number within it) of what `substream_samples` has numbered."""
    return sample >> _SUBSTREAM_BITS, sample & ((1 << _SUBSTREAM_BITS) - 1)


def digest_of_stream(drawn: Sequence[int]) -> int:
    """Return the digest of the first ``drawn[k]`` samples of each sub-stream k, each once."""
    total = 0
    for number, count in enumerate(drawn):
        for first in range(0, count, _BLOCK):
            total = add(total, digest_samples(substream_samples(number, first, min(_BLOCK, count - first))))
    return total


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """How far a pass over a stream has come."""

    drawn: list[int]
    """The samples that were drawn from each sub-stream."""
    ended: list[int]
    """The numbers of the sub-streams that are known to have ended, in order."""


@dataclass(slots=True)
class EpochCoverage:
    """The number and the digest of the samples that committed steps used in one epoch."""

    epoch: int
    samples: int = 0
    digest: int = 0
    kind: str = SAMPLES
    """What is counted: `SAMPLES`, `DRAWS` or `STREAM`."""
    drawn: list[int] | None = None
    """Of a stream: the samples of each sub-stream; None also where they are those of the first pass."""
    ended: list[int] | None = None
    """Of a stream: the sub-streams that have ended."""

    def record(self) -> dict[str, Any]:
        """Return it as ``result.json`` has it: without what is as usual."""
        usual = EpochCoverage(self.epoch)
        kept = {name: value for name, value in asdict(self).items() if value != getattr(usual, name)}
        return {"epoch": self.epoch, "samples": self.samples, "digest": self.digest, **kept}

    @property
    def is_whole_pass(self) -> bool:
        """Whether this is a pass over a stream of which all sub-streams have ended."""
        return self.kind == STREAM and (self.drawn is None or len(self.ended or ()) == len(self.drawn))


def kind_of_data(dataset_id: str) -> str:
    """Return what is counted of training samples with this name."""
    if _STREAM_NAME.search(dataset_id):
        return STREAM
    return DRAWS if _WEIGHTED_NAME.search(dataset_id) else SAMPLES


def find_coverage_errors(
    epochs: list[dict[str, Any]], count: int, whole_epochs: int, kind: str | None = None
) -> list[str]:
    """Return what is wrong with the records of a training over ``count`` samples that finished ``whole_epochs`` epochs,
    one sentence for each fault, none if every sample (of a split that is drawn from with replacement: every draw) was
    used exactly once per epoch. An epoch that was cut short (by ``max_steps`` or early stopping) is judged by its
    number of samples only, which must not exceed ``count``; of a stream, whose length nobody knows, by what was drawn
    of each sub-stream, in all passes together at most ``count``. ``kind``: what is to be counted; None: any. Records
    count epochs from 0, the sentences from 1. Pure."""
    kinds = {item.get("kind", SAMPLES) for item in epochs}
    if len(kinds) > 1 or (kind is not None and kinds - {kind}):
        return [f"what was recorded are {', '.join(sorted(map(str, kinds)))}, and not {kind or 'of one kind'}"]
    found = {item["epoch"]: item for item in epochs}
    wrong = [f"epoch {epoch + 1}: nothing was recorded" for epoch in range(whole_epochs) if epoch not in found]
    if STREAM in kinds:
        used = sum(item["samples"] for item in epochs)
        drawn = sum(sum(map(abs, item.get("drawn") or ())) for item in epochs)
        if max(used, drawn) > count:  # which is not to be counted one by one
            wrong.append(f"{max(used, drawn)} samples of the stream were used, and all steps have {count}")
        else:
            wrong += _find_stream_errors(epochs, whole_epochs)
    else:
        expected = digest_of_all(count)
        for epoch, item in sorted(found.items()):
            what = "draws" if item.get("kind") == DRAWS else "samples"
            if item["samples"] > count or (epoch < whole_epochs and item["samples"] != count):
                wrong.append(f"epoch {epoch + 1}: {item['samples']} {what} were used, the split has {count}")
            elif epoch < whole_epochs and item["digest"] != expected:
                wrong.append(f"epoch {epoch + 1}: {count} {what} were used, but not each exactly once")
    if len(found) != len(epochs):
        wrong.append("an epoch was recorded twice")
    return wrong


def _find_stream_errors(epochs: list[dict[str, Any]], whole_epochs: int) -> list[str]:
    wrong = []
    lengths = next((item["drawn"] for item in epochs if item["epoch"] == 0), None) or []
    of_whole = digest_of_stream(lengths)
    for item in epochs:
        pass_, drawn = f"pass {item['epoch'] + 1} of the stream", item.get("drawn") or lengths
        if item["epoch"] < whole_epochs and drawn != lengths:
            wrong.append(f"{pass_}: its sub-streams had other lengths than in the first pass")
        if item["samples"] != sum(drawn):
            wrong.append(f"{pass_}: {item['samples']} samples were used, and {sum(drawn)} were drawn")
        elif item["digest"] != (of_whole if drawn == lengths else digest_of_stream(drawn)):
            wrong.append(f"{pass_}: {item['samples']} samples were used, but not each exactly once")
    return wrong
