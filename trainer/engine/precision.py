"""What the passes of a training compute in: the type of autocast, and matrix products of float32 in TF32.

Both are set for the passes of a step alone. Evaluations, and a caller's own code between steps, compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainer.config import ConfigError

AUTOCAST: Mapping[str, torch.dtype | None] = {
    "fp32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_ONLY_GPUS = ("tf32", "fp16")


def refuse_precision(precision: str, device: torch.device) -> None:
    """Raise `ConfigError` for a precision that this device does not have."""
    if precision in _ONLY_GPUS and device.type != "cuda":
        raise ConfigError(f"training.precision = {precision!r} needs a GPU; use 'bf16' or 'fp32' on the CPU")


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let this process's GPUs compute matrix products of float32 in TF32 within the block, and as before after it.

    torch has two interfaces for this. The newer one, `fp32_precision`, makes those parts of torch 2.9 to 2.13 raise
    that still read by the older one, `torch.compile` among them; the older one sets what both read.
    """
    newer = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in newer]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # what the caller has set by the newer interface cannot be said by the older one
        older = "highest"
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for each, value in zip(newer, before, strict=True):
            each.fp32_precision = value
