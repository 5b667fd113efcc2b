"""`ShardedAdamW`: AdamW on this rank's rows of the parameters, whose moments are rows as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.runtime.step_timer import traced

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the moments, as torch calls them."""


class ShardedAdamW:
    """AdamW with torch's fused kernel and its defaults. All parameters count as updated equally often."""

    def __init__(self, lr: float, weight_decay: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "weight_decay": weight_decay}]
        self.steps = 0
        """The updates so far."""
        self.moments: dict[str, dict[str, Tensor]] = {name: {} for name in MOMENTS}
        """Rows by name of moment and of parameter; empty before the first update."""

    def update_rows(self, rows: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Update the rows of the parameters that have gradients."""
        for moments in self.moments.values():
            for name in rows:
                if name not in moments:
                    moments[name] = torch.zeros_like(rows[name])
        self.steps += 1
        names = [name for name in rows if name in gradients and rows[name].numel()]
        if not names:
            return
        [group] = self.param_groups
        count = torch.full((), float(self.steps), device=rows[names[0]].device)
        averages, squares = (self.moments[kind] for kind in MOMENTS)
        with torch.no_grad(), traced("Optimizer.step#AdamW.step"):
            torch._fused_adamw_(
                [rows[name] for name in names], [gradients[name] for name in names],
                [averages[name] for name in names], [squares[name] for name in names], [], [count] * len(names),
                lr=group["lr"], beta1=0.9, beta2=0.999, weight_decay=group["weight_decay"], eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip
