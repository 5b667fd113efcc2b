"""Orders of samples other than a permutation: drawn by weights, or with those of like length side by side.

Each says which sample is at a place of an epoch, for any place at any time, by seed and epoch alone, so that ranks and
resumed trainings agree without exchanging anything. Who gets which places is `trainer.data.sampler`. Numpy only.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.coverage import DRAWS, GOLDEN, MIXERS, SAMPLES, SHIFTS
from trainer.data.sampler import Drawing, permute
from trainer.errors import ConfigError

POOL = 50
"""Global batches that are sorted by length together. More sort more sharply, and mix samples less."""


class WeightedDrawing:
    """Samples drawn with replacement, each as often as its weight says, as `torch.utils.data.WeightedRandomSampler`
    does. An epoch has as many draws as there are samples."""

    kind = DRAWS
    depends_on_batch = False

    def __init__(self, weights: Any, count: int) -> None:
        """``weights``: of each of ``count`` samples, any scale. Raise `ConfigError` for weights that cannot be used."""
        values = _column(weights, count, "sample_weights", "a weight")
        if (values < 0).any():
            place = int(np.flatnonzero(values < 0)[0])
            raise ConfigError(f"sample_weights[{place}] = {values[place]:g} is negative: weights are 0 or above")
        # Of what may be as large as a float can be, the sum still is one.
        shares = values / top if (top := float(values.max())) > 0 else values
        self._edges = np.cumsum(shares)
        if not top:
            raise ConfigError("sample_weights are all 0, so no sample can be drawn: give at least one of them a weight")
        self._last = int(np.flatnonzero(values)[-1])
        self.name = f"weights-{_digest(values)}"

    def samples(self, places: NDArray[np.int64], seed: int, epoch: int, global_batch_size: int) -> NDArray[np.int64]:
        """Return the samples that are drawn at these places (n,) of an epoch."""
        key = hashlib.blake2b(f"{seed}/{epoch}/weights".encode(), digest_size=8).digest()
        mixed = _mix(_mix(places.astype(np.uint64)) ^ np.uint64(int.from_bytes(key, "big")))
        chances = (mixed >> np.uint64(11)).astype(np.float64) / (1 << 53)  # [0, 1)
        # The product may be rounded up to the sum, behind which there is no sample.
        return np.minimum(np.searchsorted(self._edges, chances * self._edges[-1], side="right"), self._last)


class LengthDrawing:
    """Each sample once per epoch, with those of like length in one global batch, so that little has to be padded.

    The samples of an epoch are mixed, and sorted by length within pools of `POOL` global batches; then the batches are
    mixed. What is left of the samples comes last.
    """

    kind = SAMPLES
    depends_on_batch = True

    def __init__(self, lengths: Any, count: int) -> None:
        """``lengths``: of each of ``count`` samples. Raise `ConfigError` for lengths that cannot be used."""
        self._lengths = _column(lengths, count, "lengths", "a length")
        self.name = f"lengths-{_digest(self._lengths)}"
        self._known: tuple[tuple[int, int, int], NDArray[np.int64]] | None = None

    def samples(self, places: NDArray[np.int64], seed: int, epoch: int, global_batch_size: int) -> NDArray[np.int64]:
        """Return the samples at these places (n,) in the order of an epoch with global batches of this size."""
        key = seed, epoch, global_batch_size
        if self._known is None or self._known[0] != key:
            self._known = key, self._order(*key)
        return self._known[1][places]

    def _order(self, seed: int, epoch: int, size: int) -> NDArray[np.int64]:
        count = len(self._lengths)
        order = permute(np.arange(count, dtype=np.int64), count, seed, epoch)
        for first in range(0, len(order), POOL * size):
            pool = order[first : first + POOL * size]
            order[first : first + POOL * size] = pool[np.argsort(self._lengths[pool], kind="stable")]
        whole = count // size
        batches = order[: whole * size].reshape(whole, size)
        if whole:
            batches = batches[permute(np.arange(whole, dtype=np.int64), whole, seed, epoch)]
        return np.concatenate([batches.ravel(), order[whole * size :]])


def _column(given: Any, count: int, name: str, what: str) -> NDArray[np.float64]:
    """Return finite numbers (count,), one for each sample. Raise `ConfigError` for anything else."""
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} are no numbers: give {what} for each training sample") from None
    if values.shape != (count,):
        size = len(values) if values.ndim == 1 else f"the shape {values.shape}"
        raise ConfigError(f"{name} have {size}, and there are {count} training samples: give {what} for each")
    if not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ConfigError(f"{name}[{place}] is {values[place]}: give a finite number for each sample")
    return values


def _digest(values: NDArray[np.float64]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:12]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of SplitMix64 of each value."""
    values = values + np.uint64(GOLDEN)
    for shift, factor in zip(SHIFTS, MIXERS, strict=False):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(SHIFTS[-1]))


def choose_drawing(count: int, weights: Any, lengths: Any) -> Drawing | None:
    """Return the order that is asked for, None for a permutation. ``weights``, ``lengths``: one for each of ``count``
    samples, or None. Raise `ConfigError` for both together, and for what cannot be used."""
    if weights is not None and lengths is not None:
        raise ConfigError(
            "give either sample_weights or lengths: what is drawn by weights cannot be sorted by length, too"
        )
    if weights is not None:
        return WeightedDrawing(weights, count)
    return None if lengths is None else LengthDrawing(lengths, count)
