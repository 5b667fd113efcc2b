"""A language model of bytes, by `trainer.Trainer`: a small transformer learns Python from the source of Python's
standard library. The README beside this file says how to start it.

Whole modules belong to one split, by the digest of their content. The model is judged on modules that it has not seen,
by nats and bits per byte, beside counts of single bytes and of pairs.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer import DistributedConfig, Trainer
from trainer.losses import LastDimCrossEntropyLoss

VOCABULARY, END = 256, 0
"""The bytes, and the one that ends a module: no text has it."""
CONTEXT = 128
"""Bytes in one sample."""
HELD_OUT = 0.04
"""The share of the modules that are for validation and test, half each."""


class CausalBlock(nn.Module):
    """Causal self-attention and two dense layers, each added to its input, which is normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for x (B, T, width), same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.before_dense(x))


class Decoder(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next byte at each place (B, T, 256), for ids (B, T) of any length up to the
        context."""
        x = self.bytes(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_streams(folder: Path) -> dict[str, Tensor]:
    """Return the bytes of the modules in a folder by split, one module after another (n,) int64. A module that is there
    twice is taken once."""
    texts = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    modules = {hashlib.sha256(text).digest(): text for text in texts}
    streams = {split: bytearray() for split in ("train", "valid", "test")}
    for digest, text in modules.items():
        share = int.from_bytes(digest[:8], "big") / 2**64
        split = "test" if share < HELD_OUT / 2 else "valid" if share < HELD_OUT else "train"
        streams[split] += text + bytes([END])
    return {split: torch.frombuffer(stream, dtype=torch.uint8).long() for split, stream in streams.items()}


def pieces_of(stream: Tensor) -> TensorDataset:
    """Return pieces of a stream that follow each other, with the byte that comes next at each place."""
    count = (len(stream) - 1) // CONTEXT
    return TensorDataset(*(stream[first : first + count * CONTEXT].view(count, CONTEXT) for first in (0, 1)))


def bits_per_byte(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each piece (B,) in bits."""
    return functional.cross_entropy(outputs.movedim(-1, 1), target, reduction="none").mean(1) / math.log(2)


def judge_counts(train: Tensor, test: Tensor) -> dict[str, float]:
    """Return the nats per byte of counting bytes, and pairs of bytes, in the training split. Every byte counts once
    more than it was seen, and a pair is mixed with the single byte in proportion to what was seen."""
    single = torch.bincount(train, minlength=VOCABULARY).double() + 1
    single /= single.sum()
    pairs = torch.bincount(train[:-1] * VOCABULARY + train[1:], minlength=VOCABULARY**2).view(VOCABULARY, -1).double()
    before, after = test[:-1], test[1:]
    found = {
        "bytes": single[after],
        "pairs": (pairs[before, after] + single[after]) / (pairs.sum(1)[before] + 1),
    }
    return {name: -float(probabilities.log().mean()) for name, probabilities in found.items()}


@torch.no_grad()
def sees_the_future(model: nn.Module, ids: Tensor) -> bool:
    """Return whether what the model predicts for pieces (B, T) changes with bytes that come after: its loss would say
    nothing."""
    half = ids.shape[1] // 2
    changed = ids.clone()
    changed[:, half:] = (changed[:, half:] + 1) % VOCABULARY
    before, after = (model(given)[:, :half] for given in (ids, changed))
    return bool((before - after).abs().max() > 1e-3 * before.abs().max())


@torch.no_grad()
def write_text(model: nn.Module, prompt: list[int], count: int = 400, temperature: float = 0.8) -> str:
    """Return what the model writes after these bytes; the same each time."""
    random, ids = torch.Generator().manual_seed(0), list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids[-CONTEXT:]]))[0, -1]
        ids.append(int(torch.multinomial(functional.softmax(logits / temperature, dim=0), 1, generator=random)))
    return bytes(ids[len(prompt) :]).decode("utf-8", "replace")


def main() -> None:
    """Train, and print the figures on the test split and what the model writes."""
    torch.manual_seed(0)
    streams = read_streams(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["stdlib"]))
    config = DistributedConfig(
        strategy="fsdp", max_steps=400, batch_size_per_gpu=16, gradient_accumulation_steps=1, learning_rate=3e-3
    )
    trainer = Trainer(Decoder(), config, loss=LastDimCrossEntropyLoss(), metrics={"bits_per_byte": bits_per_byte})
    result = trainer.fit(*map(pieces_of, streams.values()))
    if os.environ.get("RANK", "0") != "0":
        return
    model, test = result.model.eval(), streams["test"]
    if sees_the_future(model, test[:CONTEXT][None]):
        raise RuntimeError("what the model predicts changes with bytes that come after: its attention is not causal")
    counts = ", ".join(f"{name} {nats:.4f}" for name, nats in judge_counts(streams["train"], test).items())
    print(f"test nats per byte {result.test['loss']:.4f} (counts of {counts})")
    print(f"the model writes: {write_text(model, test[: CONTEXT // 2].tolist())}")


if __name__ == "__main__":
    main()
