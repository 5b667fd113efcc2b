"""The norm of a gradient, exact to the rounding of its type however large the gradient is.

What is clipped by it belongs in `trainer.engine.step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 1 << 16
"""Elements of which torch takes a norm at once on a CPU. It adds up their squares in a few float32 numbers: of 65,536
elements the norm is right to 3e-7, of 6.5 million, as a bucket has, to 2e-4, and of 25 million to 1e-3."""


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the Euclidean norm of all elements of these tensors together, a scalar on ``device``; 0 for none."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(_pieces(gradients) if device.type == "cpu" else list(gradients))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        piece
        for tensor in tensors
        for piece in ((tensor,) if tensor.numel() <= PIECE else tensor.reshape(-1).split(PIECE))
    ]
