"""The share of samples in their class, by the protocol of torchmetrics: a measure of a whole split."""

from __future__ import annotations

from torch import Tensor


class Accuracy:
    """A measure whose figure is the mean over single samples, so that it can be told from what they give."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self.right = self.seen = 0

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Count a batch."""
        self.right += int((outputs.argmax(1) == target).sum())
        self.seen += len(target)

    def compute(self) -> float:
        """Return the share."""
        return self.right / self.seen
