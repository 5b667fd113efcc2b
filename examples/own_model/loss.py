"""A Student-t likelihood with zero mean and fixed tails: the model forecasts volatility and nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.losses import Predictive
from trainer.spec import DataSpec


class VolatilityLoss(nn.Module):
    """The negative log likelihood of a Student-t distribution with zero mean and ``nu`` degrees of freedom."""

    outputs = 1
    """One number per sample: the log of the scale, relative to that of all training targets."""

    def __init__(self, spec: DataSpec, nu: float) -> None:
        super().__init__()
        self.nu = nu
        self.log_scale = math.log(spec.target_std * math.sqrt((nu - 2) / nu))

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the distributions that the outputs mean, in the unit of the target. With this method the loss is
        judged against the baselines."""
        sigma = torch.exp(self.log_scale + outputs.float()[:, 0].clamp(-8, 8))
        return Predictive(mu=torch.zeros_like(sigma), sigma=sigma, nu=torch.full_like(sigma, self.nu))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return one loss per sample, (batch,). The trainer divides by the global batch."""
        return self.predictive(outputs).nll(target)


def make_loss(spec: DataSpec, nu: float = 5.0) -> nn.Module:
    """Return the loss; ``loss.factory`` names this function. Raise `ValueError` if ``nu`` is not above 2."""
    if nu <= 2:
        raise ValueError(f"nu = {nu} must be above 2, where the variance is finite")
    return VolatilityLoss(spec, nu)
