"""What a model of tokens is judged against: counts of single tokens, and of pairs, in the training split.

Ranks share the stream, and their counts are whole numbers: the result does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainer.data.token_data import TokenData
from trainer.evaluation.shared_work import SharedWork

Array = NDArray[np.float64]
MOST_PAIRED = 1024
"""The largest vocabulary whose pairs are counted: their table has its square as many entries."""
CHUNK = 1 << 20
"""Tokens that are counted at once."""


def count_tokens(data: TokenData, work: SharedWork, before_chunk: Callable[[], object]) -> tuple[Array, Array | None]:
    """Return how often each token is in the training split (V,), and how often each follows each (V, V): row before,
    column after; None where the vocabulary is larger than `MOST_PAIRED`. A collective."""
    size = data.spec.vocabulary
    single = np.zeros(size)
    pairs = np.zeros(size * size) if size <= MOST_PAIRED else None
    count = data.tokens("train")
    first, last = work.part(count, CHUNK)
    for start in range(first, last, CHUNK):
        before_chunk()
        ids = data.stream("train", start, min(start + CHUNK + 1, count))  # with the first of the next chunk
        own = min(CHUNK, last - start)
        single += np.bincount(ids[:own], minlength=size)
        if pairs is not None:
            pairs += np.bincount(ids[:-1][:own] * size + ids[1:][:own], minlength=size * size)
    single = work.sum(single)
    return single, None if pairs is None else work.sum(pairs).reshape(size, size)


def judge_counts(
    single: Array,
    pairs: Array | None,
    data: TokenData,
    split: str,
    work: SharedWork,
    before_chunk: Callable[[], object],
) -> dict[str, float]:
    """Return the mean loss per token in nats of each baseline, over the tokens that a model predicts in this split.
    Every token counts once more than it was seen; a pair's probability is mixed with that of the single token in
    proportion to what was seen. A collective."""
    plain = (single + 1) / (single.sum() + len(single))
    seen = None if pairs is None else pairs.sum(axis=1)
    count = data.count(split) * data.spec.context
    first, last = work.part(count, CHUNK)
    sums = np.zeros(2)
    for start in range(first, last, CHUNK):
        before_chunk()
        stop = min(start + CHUNK, last)
        ids = data.stream(split, start, stop + 1)
        before, after = ids[:-1], ids[1:]
        sums[0] -= np.log(plain[after]).sum()
        if pairs is not None and seen is not None:
            sums[1] -= np.log((pairs[before, after] + plain[after]) / (seen[before] + 1)).sum()
    sums = work.sum(sums) / count
    return {"unigram": float(sums[0])} | ({} if pairs is None else {"bigram": float(sums[1])})
