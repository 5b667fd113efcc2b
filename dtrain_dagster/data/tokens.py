"""The builder of datasets of tokens: documents become one stream of ids for each split.

Documents are read one after another, in the order of their names, and written at once: the stream may be larger than
memory. By bytes, so may a document; a tokenizer of one's own gets a document as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dtrain_dagster.data.build_once import (
    SCHEMA_VERSION,
    FinishedDataset,
    build_once,
    digest_files,
    id_of,
    shard_entry,
)
from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.rows import check_fractions, hashed_shares, splits_of
from trainer.data.kinds import FEW_DOCUMENTS, MOST_IDS, SPLITS, id_bytes, windows_in
from trainer.spec import TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CODE_VERSION = 1
"""The version of the builder. Raise it when the same documents would give other ids."""
BYTES = "bytes"
"""The encoding whose ids are the bytes of a document."""
BYTE_VOCABULARY, END = 256, 0
"""Ids of that encoding, and the one that ends a document: a byte that no text has."""
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenParams:
    """The parameters of a dataset besides its documents."""

    context: int = 256
    """Tokens in one sample."""
    encoding: str = BYTES
    """``bytes``, or the ``package.module:encode`` of a tokenizer of one's own, which returns the ids of a document
    (bytes), of an allowed module (``DTRAIN_FACTORY_MODULES``)."""
    vocabulary: int = BYTE_VOCABULARY
    """The number of ids, 0 … vocabulary - 1."""
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    seed: int = 0
    """Of the division of documents among the splits."""
    shard_tokens: int = 1 << 26

    def __post_init__(self) -> None:
        check_fractions(self.valid_fraction, self.test_fraction)
        if self.context < 1:
            raise DataError(f"context = {self.context}: must be at least 1")
        if not 2 <= self.vocabulary <= MOST_IDS:
            raise DataError(f"vocabulary = {self.vocabulary}: must be from 2 to {MOST_IDS:,}")
        if self.encoding == BYTES and self.vocabulary != BYTE_VOCABULARY:
            raise DataError(f"vocabulary = {self.vocabulary}: bytes are {BYTE_VOCABULARY} ids; leave it out")


def build_tokens(source: str, storage_uri: str, params: TokenParams, pattern: str = "**/*.txt") -> FinishedDataset:
    """Build ``<storage>/datasets/<id>`` from the files in a folder that match a pattern (of `pathlib`), or from one
    file, unless it exists; return a reference. A document that is there twice is taken once. Raise `DataError` for
    documents that cannot be used, and ConfigError for a tokenizer that is not allowed or cannot be found."""
    files = _files(Path(source), pattern)
    digests = digest_files(files)
    encode = None if params.encoding == BYTES else _tokenizer(params.encoding)
    unique = {digest: path for digest, path in reversed(list(zip(digests, files, strict=True)))}
    documents = [(digest, path) for digest, path in zip(digests, files, strict=True) if unique[digest] == path]
    identity = {"kind": TOKENS, "code": CODE_VERSION, "documents": [digest for digest, _ in documents]}
    code = "" if encode is None else _code_of(params.encoding)
    dataset_id = id_of({**identity, "params": asdict(params), "tokenizer": code})

    def write(folder: Path) -> dict[str, Any]:
        return _write(folder, documents, params, encode, dataset_id) | {
            "source": {"title": Path(source).name, "files": len(files), "documents": len(documents)}
        }

    return build_once(storage_uri, dataset_id, write)


def _files(source: Path, pattern: str) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(path for path in source.glob(pattern) if path.is_file() and path.stat().st_size)
    if not found:
        raise DataError(f"{source}: no file in it matches {pattern!r}: name the folder, and a --pattern")
    return found


def _tokenizer(name: str) -> Callable[[bytes], Sequence[int]]:
    """Return a tokenizer of the user's own."""
    from dtrain_dagster.support.user_sources import ensure_importable
    from trainer.model.allowed_factories import modules_of_settings
    from trainer.model.factories import find_factory

    ensure_importable()
    return find_factory("encoding", name, {}, modules_of_settings())


def _code_of(name: str) -> str:
    from dtrain_dagster.support.user_code import digest_user_code

    return digest_user_code(name)


def division_of(size: int, digest: str, params: TokenParams, is_alone: bool) -> list[tuple[str, int, int]]:
    """Return (split, first byte, byte after the last) for the parts of a document. ``is_alone``: whether there are so
    few documents that each is divided by itself. Pure."""
    valid, test = params.valid_fraction, params.test_fraction
    if not is_alone:
        [place] = splits_of(hashed_shares([digest], params.seed), valid, test)
        return [(SPLITS[place], 0, size)]
    edges = [0, round(size * (1 - valid - test)), round(size * (1 - test))]
    bounds = zip(SPLITS, edges, [*edges[1:], size], strict=True)
    return [(split, first, last) for split, first, last in bounds if last > first]


class _Stream:
    """The shards of one split, written as ids come."""

    def __init__(self, folder: Path, split: str, params: TokenParams) -> None:
        self.folder, self.split, self.params = folder, split, params
        self.shards: list[dict[str, Any]] = []
        self.tokens = self.units = 0
        """Ids, and the bytes that they stand for."""
        self._file: IO[bytes] | None = None
        self._held = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """Append ids."""
        if self._file is None:
            self._file = open(self.folder / self._name, "wb")  # noqa: SIM115 - closed by `_finish`
        self._file.write(ids.astype(f"<u{id_bytes(self.params.vocabulary)}").tobytes())
        self.tokens += len(ids)
        self._held += len(ids)
        if self._held >= self.params.shard_tokens:
            self._finish()

    def close(self) -> list[dict[str, Any]]:
        """Finish the last shard, and return the entries of all."""
        self._finish()
        return self.shards

    @property
    def _name(self) -> str:
        return f"data/{self.split}-{len(self.shards):05d}.bin"

    def _finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self.shards.append(shard_entry(self.folder, self._name, self.split, self._held))
            self._file, self._held = None, 0


def _write(
    folder: Path,
    documents: Sequence[tuple[str, Path]],
    params: TokenParams,
    encode: Callable[[bytes], Sequence[int]] | None,
    dataset_id: str,
) -> dict[str, Any]:
    streams = {split: _Stream(folder, split, params) for split in SPLITS}
    is_alone = len(documents) < FEW_DOCUMENTS
    for digest, path in documents:
        with open(path, "rb") as file:
            for split, first, last in division_of(path.stat().st_size, digest, params, is_alone):
                stream = streams[split]
                for ids in _ids(file, path, last - first, params, encode):
                    stream.add(ids)
                stream.units += last - first
            if file.read(1):
                raise DataError(f"{path} has grown while it was read: build the dataset again")
    samples = {split: windows_in(stream.tokens, params.context) for split, stream in streams.items()}
    for split, count in samples.items():
        if not count:
            raise DataError(
                f"the {split} split has {streams[split].tokens} tokens, less than one sample of {params.context}: give "
                "more documents, a shorter --context, or other fractions"
            )
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": TOKENS,
        "dataset_id": dataset_id,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "context": params.context,
        "vocabulary": params.vocabulary,
        "encoding": params.encoding,
        "end": END if encode is None else None,
        "samples": samples,
        "units": {split: stream.units for split, stream in streams.items()},
        "params": asdict(params),
        "shards": [shard for stream in streams.values() for shard in stream.close()],
    }


def _ids(
    file: IO[bytes], path: Path, size: int, params: TokenParams, encode: Callable[[bytes], Sequence[int]] | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of the next ``size`` bytes of a document."""
    import numpy as np

    if encode is not None:
        yield _checked(encode(file.read(size)), path, params)
        return
    left = size
    while left:
        block = file.read(min(left, BLOCK))
        if not block:
            raise DataError(f"{path} has become shorter while it was read: build the dataset again")
        if END in block:
            raise DataError(f"{path} holds a zero byte, so it is not text: choose files by --pattern")
        left -= len(block)
        yield np.frombuffer(block, dtype=np.uint8).astype(np.int64)
    yield np.array([END], dtype=np.int64)


def _checked(ids: Any, path: Path, params: TokenParams) -> NDArray[np.int64]:
    """Return the ids of a tokenizer of one's own. Raise `DataError` for what are no ids of the vocabulary."""
    import numpy as np

    found = np.asarray(ids)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise DataError(f"{params.encoding} did not return a list of whole numbers for {path}")
    if len(found) and not 0 <= found.min() <= found.max() < params.vocabulary:
        raise DataError(
            f"{params.encoding} gave ids from {found.min()} to {found.max()} for {path}, but the vocabulary has "
            f"{params.vocabulary}: set --vocabulary"
        )
    return found.astype(np.int64)
