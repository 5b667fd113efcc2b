"""The stock model and loss for streams of tokens, how a user's own is loaded, and how text is generated.

A model maps ids (B, T), int64, to the logits of the next id at each place, (B, T, vocabulary), for any T from 1 to the
context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import FactoryConfig
from trainer.model.try_parts import build_criterion, build_network, try_criterion, try_network
from trainer.spec import TokenSpec

_SCALE = 0.02
"""Standard deviation of initial weights, as usual for this kind of model."""


class CausalBlock(nn.Module):
    """Causal self-attention and two dense layers, each added to its input, which is normalised before."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for x (B, T, width), same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.before_dense(x))


class DecoderOnly(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, spec: TokenSpec, outputs: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(spec.vocabulary, width), nn.Embedding(spec.context, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                adds = name.endswith(("joined.weight", "dense.2.weight"))  # what is added in each block, so less of it
                nn.init.normal_(parameter, std=_SCALE / math.sqrt(2 * layers) if adds else _SCALE)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, outputs) for ids (B, T)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(
    spec: TokenSpec, outputs: int, width: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.0
) -> nn.Module:
    """Return a decoder-only transformer with causal attention."""
    if width % heads:
        raise ValueError(f"width = {width} must be a multiple of heads = {heads}")
    return DecoderOnly(spec, outputs, width, heads, layers, dropout)


class NextToken(nn.Module):
    """Cross entropy of the next token in nats, one figure per sample: the mean over its places."""

    def __init__(self, spec: TokenSpec) -> None:
        super().__init__()
        self.outputs = spec.vocabulary

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample (B,), for logits (B, T, V) and ids (B, T)."""
        losses = functional.cross_entropy(outputs.float().flatten(0, 1), target.flatten(), reduction="none")
        return losses.view(target.shape).mean(1)


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt": gpt}
LOSSES: dict[str, type[nn.Module]] = {"cross_entropy": NextToken}


def build_token_loss(config: FactoryConfig, spec: TokenSpec, modules: tuple[str, ...] | None = None) -> nn.Module:
    """Return the loss by name (``cross_entropy``) or ``package.module:factory``, called with ``(spec, **args)`` and
    tried on two samples. ``modules``: as for `build_token_model`. Raise `ConfigError` if it cannot be used."""
    loss = build_criterion(config, LOSSES, spec, modules)
    places = min(2, spec.context)
    outputs = torch.zeros(2, places, int(loss.outputs))  # type: ignore[arg-type]
    try_criterion(config, loss, outputs, torch.zeros(2, places, dtype=torch.int64))
    return loss


def build_token_model(
    config: FactoryConfig, spec: TokenSpec, outputs: int, modules: tuple[str, ...] | None = None
) -> nn.Module:
    """Return the model by name (``gpt``) or ``package.module:factory``, called with ``(spec, outputs, **args)`` and
    tried on two samples. Raise `ConfigError`. ``modules``: those that a factory may be of; None: those of the settings
    (`trainer.model.allowed_factories`).

    Weights come from torch's global random state: seed it before.
    """
    model = build_network(config, MODELS, spec, outputs, modules)
    batch = torch.zeros(2, spec.context, dtype=torch.int64)
    try_network(config, model, batch, "batch, context", (2, spec.context, outputs))
    return model


@torch.no_grad()
def generate_ids(
    model: nn.Module, prompt: Sequence[int], count: int, context: int, seed: int, temperature: float = 1.0
) -> list[int]:
    """Return ``count`` ids that the model continues the prompt with, at least one id: each drawn from its distribution
    given the last ``context`` ids, made sharper by a ``temperature`` below 1. The same seed gives the same ids."""
    random = torch.Generator().manual_seed(seed)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu()
        ids.append(int(torch.multinomial(functional.softmax(logits / temperature, dim=0), 1, generator=random)))
    return ids[len(prompt) :]
