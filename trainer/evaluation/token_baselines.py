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
) -> dict[str, Array]:
    """Return the mean loss per token in nats of each baseline over each piece of this split (pieces,), for the tokens
    that a model predicts there. Every token counts once more than it was seen; a pair's probability is mixed with that
    of the single token in proportion to what was seen. A collective."""
    plain = (single + 1) / (single.sum() + len(single))
    seen = None if pairs is None else pairs.sum(axis=1)
    count, context = data.count(split), data.spec.context
    block = max(1, CHUNK // context)
    first, last = work.part(count, block)
    names = ("unigram",) if pairs is None else ("unigram", "bigram")
    part = np.empty((last - first, len(names)))
    for start in range(first, last, block):
        before_chunk()
        stop = min(start + block, last)
        ids = data.stream(split, start * context, stop * context + 1)
        before, after = ids[:-1], ids[1:]
        found = [plain[after]]
        if pairs is not None and seen is not None:
            found.append((pairs[before, after] + plain[after]) / (seen[before] + 1))
        for column, probabilities in enumerate(found):
            losses = -np.log(probabilities).reshape(-1, context)
            part[start - first : stop - first, column] = losses.mean(axis=1)
    return dict(zip(names, work.join(part, first, count).T, strict=True))


def count_ends(data: TokenData, split: str, work: SharedWork) -> NDArray[np.int64]:
    """Return how many documents end in each piece of a split (pieces,): none where their ends are not marked. A
    collective."""
    count, context, end = data.count(split), data.spec.context, data.spec.end
    block = max(1, CHUNK // context)
    first, last = work.part(count, block)
    part = np.zeros(last - first)
    for start in range(first, last, block) if end is not None else ():
        stop = min(start + block, last)
        ids = data.stream(split, start * context, stop * context).reshape(-1, context)
        part[start - first : stop - first] = (ids == end).sum(axis=1)
    return work.join(part, first, count).astype(np.int64)
