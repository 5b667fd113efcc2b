"""Training samples that come as a stream: tar files, datasets of Hugging Face, pipelines of Grain and of torchdata.

    python examples/streams.py

writes the digits into tar files, as WebDataset has them, and trains on these; only Python's own library reads them.
Each other function is the same for a library, which has to be installed. A stream has as many sub-streams as it has
files or shards, a multiple of the micro-batches of a step: `world_size` x `gradient_accumulation_steps`.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import is_right, make_model, read_digits
from torch import Tensor, nn

from trainer import DistributedConfig, FitResult, Stream, Trainer

SHARDS = 12
Decode = Callable[[dict[str, bytes]], Any]


def tar_files(paths: list[str], decode: Decode) -> Stream:
    """Return the samples of tar files, of which each is a sub-stream. Files of one name are a sample: `7.npy` and
    `7.cls` are {"npy": …, "cls": …}."""

    def read(number: int, count: int) -> Iterator[Any]:
        with tarfile.open(paths[number]) as archive:
            name, parts = "", dict[str, bytes]()
            for member in archive:
                stem, _, suffix = member.name.partition(".")
                if parts and stem != name:
                    yield decode(parts)
                    parts = {}
                name, content = stem, archive.extractfile(member)
                assert content is not None, f"{member.name} is no file"
                parts[suffix] = content.read()
            if parts:
                yield decode(parts)

    return Stream(read, len(paths))


def hugging_face(dataset: Any) -> Stream:
    """Return the samples of an `IterableDataset` of Hugging Face, of which each shard is a sub-stream. It goes on by
    its state; where it has a shuffle buffer, which is in no state of it, it is read forward."""
    return Stream(lambda number, count: dataset.shard(num_shards=count, index=number), dataset.num_shards)


def grain(dataset: Any, count: int) -> Stream:
    """Return the samples of a `grain.MapDataset`, in another order in each pass. It knows its samples by number, so it
    begins anywhere at once."""

    def part(number: int, count: int, start: int = 0, epoch: int = 0) -> Any:
        return dataset[number::count].shuffle(seed=epoch)[start:]

    return Stream(part, count)


def torchdata(paths: list[str], read: Callable[[str], Iterable[Any]]) -> Stream:
    """Return what is read from files, by nodes of torchdata, which have states."""
    from torchdata import nodes

    return Stream(lambda number, count: nodes.Loader(nodes.IterableWrapper(read(paths[number]))), len(paths))


def write_digits(folder: str) -> list[str]:
    """Write the training digits into tar files, and return their paths."""
    train, _, _ = read_digits()
    paths = [f"{folder}/digits-{shard:03}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as archive:
            for sample in range(shard, len(train), SHARDS):
                image, digit = train[sample]
                written = io.BytesIO()
                np.save(written, image.numpy())
                for suffix, content in (("npy", written.getvalue()), ("cls", str(int(digit)).encode())):
                    member = tarfile.TarInfo(f"{sample:06}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return paths


def decode_digit(parts: dict[str, bytes]) -> tuple[Tensor, int]:
    """Return image (1, 8, 8) and digit."""
    return torch.from_numpy(np.load(io.BytesIO(parts["npy"]))), int(parts["cls"])


def train(stream: Stream, run_dir: str, **settings: Any) -> FitResult:
    """Train on a stream of digits. It has no length, so ``max_steps`` says how long the training is at most."""
    torch.manual_seed(0)
    usual = {
        "world_size": 1, "gradient_accumulation_steps": 4, "batch_size_per_gpu": 8, "learning_rate": 3e-3,
        "epochs": 3, "max_steps": 150,
    }  # fmt: skip
    config = DistributedConfig(**usual | settings)
    trainer = Trainer(
        make_model(), config, loss=nn.CrossEntropyLoss(), metrics={"accuracy": is_right}, run_dir=run_dir
    )  # fmt: skip
    _, valid, test = read_digits()
    return trainer.fit(stream, valid, test)


def main() -> None:
    """Train, and print how many digits of the test split are recognised."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(tar_files(write_digits(folder), decode_digit), str(Path(folder) / "run"))
        print(f"{result.test['accuracy']:.1%} of 250 digits, after {result.samples_seen} samples of tar files")


if __name__ == "__main__":
    main()
