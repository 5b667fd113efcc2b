"""The losses that training minimises, and the predictive distributions that they define.

A loss is an ``nn.Module`` with an attribute ``outputs`` (how many numbers the model must yield per sample) and
``forward(outputs (B, K), target (B,)) -> (B,)``, one loss per sample, *not* reduced: the trainer divides by the global
batch. An attribute ``second_target`` names a stored column that is stacked to the target then, (B, 2). Optional
methods say what the outputs mean, in the unit of the target:

- ``predictive(outputs) -> Predictive``: a Student-t distribution per sample; NLL, pinball and coverage are judged then;
  with ``calibrate(predictive, target) -> dict``, numbers for the arguments named by an attribute ``corrections``, with
  which a loss makes better distributions of the same outputs. They are found on the validation split once the training
  is over, and belong to the saved model;
- ``point(outputs) -> (B,)``: a point forecast only; its squared error is judged then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.spec import DataSpec


@dataclass(frozen=True, slots=True)
class Predictive:
    """Student-t distributions, one per sample: ``mu + sigma * T`` with T of ``nu`` degrees of freedom.

    All three have shape (B,). ``sigma`` is the *scale*, in the unit of the target; the standard deviation is
    ``sigma * sqrt(nu / (nu - 2))``. ``nu = inf`` is the normal distribution.
    """

    mu: Tensor
    sigma: Tensor
    nu: Tensor

    def nll(self, target: Tensor) -> Tensor:
        """Return the negative log density at ``target``, shape (B,), in nats; differentiable."""
        return student_t_nll(self.mu, self.sigma, self.nu, target)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(X <= value), shape (B,), float64."""
        return student_t_cdf((value.double() - self.mu.double()) / self.sigma.double(), self.nu)

    def quantile(self, q: float) -> Tensor:
        """Return the value that is not exceeded with probability ``q`` in (0, 1), shape (B,), float64; no gradient."""
        return self.mu.double() + self.sigma.double() * student_t_quantile(q, self.nu)


def student_t_nll(mu: Tensor, sigma: Tensor, nu: Tensor, target: Tensor) -> Tensor:
    """Return -log p(target), elementwise. ``nu = inf`` gives the normal density."""
    z2 = ((target - mu) / sigma) ** 2
    normal = torch.isinf(nu)
    finite = torch.where(normal, torch.ones_like(nu), nu)  # keeps infinity out of the branch that is not taken
    student = (
        torch.lgamma(finite / 2)
        - torch.lgamma((finite + 1) / 2)
        + 0.5 * torch.log(finite * math.pi)
        + (finite + 1) / 2 * torch.log1p(z2 / finite)
    )
    gaussian = 0.5 * z2 + 0.5 * math.log(2 * math.pi)
    return torch.where(normal, gaussian, student) + torch.log(sigma)


def student_t_cdf(z: Tensor, nu: Tensor) -> Tensor:
    """Return P(T <= z) elementwise (the two are broadcast), float64 on the CPU; ``nu = inf`` is the normal
    distribution."""
    from scipy.special import stdtr  # not above: what trains does not need it, and loading it takes a tenth of torch's

    return torch.from_numpy(np.asarray(stdtr(_float64(nu), _float64(z))))


def student_t_quantile(q: float, nu: Tensor) -> Tensor:
    """Return the q-quantile of T for each ``nu`` (any shape), float64, on the device of ``nu``. Raise ValueError unless
    0 < q < 1."""
    from scipy.special import stdtrit

    if not 0 < q < 1:
        raise ValueError(f"q = {q}: a quantile level lies between 0 and 1")
    return torch.from_numpy(np.asarray(stdtrit(_float64(nu), q))).to(nu.device)


def _float64(values: Tensor) -> NDArray[np.float64]:
    return values.detach().cpu().double().numpy()


MEAN_UNIT = 0.1


class StudentTLoss(nn.Module):
    """Negative log likelihood of a Student-t distribution; three outputs: mean, log scale and shape, all raw.

    Outputs are in units of the target's training standard deviation and are zero at the unconditional distribution,
    so a model whose last layer starts at zero starts where a constant forecast would be. The mean is in units of
    ``mean_unit`` standard deviations: the mean of a return is all but unpredictable, and where it learns as fast as the
    scale it memorises noise first (on the 20-stock panel that costs 0.002 to 0.004 of test NLL).
    """

    outputs = 3

    def __init__(
        self,
        spec: DataSpec,
        nu_min: float = 2.5,
        nu_max: float = 60.0,
        nu_start: float = 6.0,
        mean_unit: float = MEAN_UNIT,
    ) -> None:
        super().__init__()
        if not 2 < nu_min < nu_start < nu_max:
            raise ValueError(
                f"nu_min = {nu_min}, nu_start = {nu_start}, nu_max = {nu_max}: needs 2 < nu_min < nu_start < nu_max "
                "(at 2 and below the variance is infinite)"
            )
        self.mean_unit = mean_unit * spec.target_std
        self.nu_min, self.nu_max = nu_min, nu_max
        share = (nu_start - nu_min) / (nu_max - nu_min)
        self.nu_bias = math.log(share / (1 - share))
        self.log_scale = math.log(spec.target_std) + 0.5 * math.log((nu_start - 2) / nu_start)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the distribution that raw outputs (B, 3) mean, as float32 also under autocast."""
        mu, log_sigma, shape = outputs.float().unbind(-1)
        return Predictive(
            mu=mu * self.mean_unit,
            # e^±8 of the unconditional scale is beyond any market: a bound against overflow, not a prior.
            sigma=torch.exp(self.log_scale + log_sigma.clamp(-8, 8)),
            nu=self.nu_min + (self.nu_max - self.nu_min) * torch.sigmoid(shape + self.nu_bias),
        )

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample (B,) in nats, for raw outputs (B, 3) and targets (B,)."""
        if type(self).predictive is not StudentTLoss.predictive:  # a subclass with its own distribution
            return self.predictive(outputs).nll(target)
        return _StudentTNLL.apply(outputs.float(), target.float(), self)


class _StudentTNLL(torch.autograd.Function):
    """`Predictive.nll` of a `StudentTLoss`, with its gradient in closed form: with the backward pass, 50 operations
    instead of 97. On so few numbers it is not what an operation computes that takes time."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, target: Tensor, loss: StudentTLoss) -> Tensor:
        mean, raw_scale, shape = outputs.unbind(-1)
        clamped, share = raw_scale.clamp(-8, 8), (shape + loss.nu_bias).sigmoid_()
        log_sigma = clamped + loss.log_scale
        inverse = log_sigma.neg().exp_()
        span = loss.nu_max - loss.nu_min
        nu = (share * span).add_(loss.nu_min)
        # In float64: at nu = 500 the two lgammas are 1,100 each and differ by 3, of which float32 keeps four digits.
        half = nu.double().mul_(0.5)
        above = half + 0.5
        norm = torch.lgamma(half).sub_(torch.lgamma(above)).float()
        more = nu * 0.5 + 0.5
        z = torch.sub(target, mean, alpha=loss.mean_unit).mul_(inverse)
        z2 = z * z
        tail = torch.log1p(z2 / nu)
        losses = norm.add_(nu.log(), alpha=0.5).addcmul_(more, tail)
        losses.add_(log_sigma).add_(0.5 * math.log(math.pi))
        if ctx.needs_input_grad[0]:
            pull = (more / (nu + z2)).mul_(z)  # d/dz, halved
            by_scale = 1 - (pull * z).mul_(2)  # d/d(log sigma)
            by_norm = torch.digamma(half).sub_(torch.digamma(above)).float()
            by_nu = by_norm.add_(tail).addcdiv_(by_scale, nu)  # d/d(nu), doubled
            by_mean = pull.mul_(inverse).mul_(-2 * loss.mean_unit)
            by_shape = by_nu.mul_(share).mul_(1 - share).mul_(span / 2)
            ctx.save_for_backward(torch.stack((by_mean, by_scale * (raw_scale == clamped), by_shape), -1))
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [by_outputs] = ctx.saved_tensors
        return by_outputs * gradient[..., None], None, None


class ReturnAndVolatility(StudentTLoss):
    """The loss of several forecasts of one return, each by itself: its negative log likelihood, and how far its scale
    is from the volatility that was realised on the way.

    For each of ``members`` forecasts a model gives four outputs: raw mean, log scale and shape, as for `StudentTLoss`,
    and the log ratio of volatility to scale, from what it is for a Student-t distribution on. One return says little
    about the scale that it was drawn from, and the daily returns that it is the sum of say much more: their log
    realised volatility is the second target, which shares the scale. What is predicted is the mean of all raw outputs;
    a mean of log scales was better than a mixture of the distributions. Its tails and its level are not those that
    either was trained to, so after the training they are corrected on the validation split (`calibrate`).
    """

    second_target = "target_log_rv"
    """The column that is stacked to the target; without it the likelihood alone counts."""
    member_outputs = 4
    corrections = ("scale_factor", "shape_shift")

    def __init__(
        self,
        spec: DataSpec,
        members: int = 2,
        weight: float = 1.0,
        spread: float = 0.5,
        nu_min: float = 2.5,
        nu_max: float = 60.0,
        nu_start: float = 6.0,
        mean_unit: float = MEAN_UNIT,
        calibrated: bool = True,
        scale_factor: float = 1.0,
        shape_shift: float = 0.0,
    ) -> None:
        """``weight``: of the volatility against the likelihood; ``spread``: the standard deviation of its log around a
        good forecast. ``calibrated``: whether `calibrate` finds the next two, by which what is predicted, and nothing
        that is learned, differs: a factor of the scale, and what is added to the raw shape."""
        super().__init__(spec, nu_min, nu_max, nu_start, mean_unit)
        if not (0 < scale_factor < math.inf and math.isfinite(shape_shift)):
            raise ValueError(
                f"scale_factor = {scale_factor}, shape_shift = {shape_shift}: both must be finite, and the factor "
                "above 0"
            )
        if members < 1 or weight < 0 or spread <= 0:
            raise ValueError(
                f"members = {members}, weight = {weight}, spread = {spread}: needs members of 1 or more, a weight of 0 "
                "or more and a spread above 0"
            )
        self.members, self.weight, self.spread = members, weight, spread
        self.outputs = self.member_outputs * members
        # The volatility is that of a day. The rest is about what was learned on prices, where training starts.
        self.log_ratio = -0.5 * math.log(spec.horizon) - 0.05
        self.calibrated, self.scale_factor, self.shape_shift = calibrated, scale_factor, shape_shift
        self.horizon = spec.horizon

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the distribution that the mean of the forecasts' raw outputs (B, 4 · members) means, corrected."""
        mean, log_sigma, shape = self._of_members(outputs)[..., :3].mean(1).unbind(-1)
        corrected = super().predictive(torch.stack((mean, log_sigma, shape + self.shape_shift), -1))
        return replace(corrected, sigma=corrected.sigma * self.scale_factor)

    def calibrate(self, predictive: Predictive, target: Tensor) -> dict[str, float]:
        """Return the arguments ``scale_factor`` and ``shape_shift`` that make ``target`` (n,) most likely, from this
        loss's own forecasts of it; none where the loss is not to be calibrated."""
        if not self.calibrated:
            return {}
        mu, sigma, nu, outcome = (
            values.detach().cpu().double() for values in (predictive.mu, predictive.sigma, predictive.nu, target)
        )
        span = self.nu_max - self.nu_min
        raw = torch.logit((nu - self.nu_min) / span, eps=1e-6)

        def nll(log_factor: Tensor, shift: Tensor) -> Tensor:
            corrected = self.nu_min + span * torch.sigmoid(raw + shift)
            each = student_t_nll(mu, sigma * log_factor.exp(), corrected, outcome)
            return each.sum() / self.horizon  # returns of so many days overlap, and are not so many outcomes

        log_factor, shift = fit_correction(nll)
        return {"scale_factor": self.scale_factor * math.exp(log_factor), "shape_shift": self.shape_shift + shift}

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample (B,), the mean over its forecasts, for raw outputs (B, 4 · members) and
        targets (B, 2), return and log realised volatility; for returns (B,) alone, that of the likelihood."""
        own = self._of_members(outputs)
        returns, *volatility = (target,) if target.dim() == 1 else target.unbind(-1)
        likelihood = _StudentTNLL.apply(
            own[..., :3].flatten(0, 1), returns.float().repeat_interleave(self.members), self
        ).unflatten(0, (-1, self.members))
        if not volatility:
            return likelihood.mean(1)
        expected = self.log_scale + self.log_ratio + own[..., 1] + own[..., 3]
        miss = (expected - volatility[0].float()[:, None]) / self.spread
        return (likelihood + 0.5 * self.weight * miss**2).mean(1)

    def _of_members(self, outputs: Tensor) -> Tensor:
        return outputs.float().unflatten(-1, (self.members, self.member_outputs))


class GaussianLoss(nn.Module):
    """Negative log likelihood of a normal distribution; two raw outputs, in the units of `StudentTLoss`."""

    outputs = 2

    def __init__(self, spec: DataSpec, mean_unit: float = MEAN_UNIT) -> None:
        super().__init__()
        self.unit = spec.target_std
        self.mean_unit = mean_unit * spec.target_std

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the distribution that raw outputs (B, 2) mean, as float32 also under autocast."""
        mu, log_sigma = outputs.float().unbind(-1)
        sigma = self.unit * torch.exp(log_sigma.clamp(-8, 8))
        return Predictive(mu=mu * self.mean_unit, sigma=sigma, nu=torch.full_like(sigma, math.inf))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample (B,) in nats, for raw outputs (B, 2) and targets (B,)."""
        return self.predictive(outputs).nll(target)


class MeanSquaredError(nn.Module):
    """Squared error in units of the target's training variance; one output, the mean in units of its deviation."""

    outputs = 1

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.unit = spec.target_std

    def point(self, outputs: Tensor) -> Tensor:
        """Return the forecasts (B,) for raw outputs (B, 1), in the unit of the target."""
        return outputs.float()[:, 0] * self.unit

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample (B,), for raw outputs (B, 1) and targets (B,)."""
        return ((self.point(outputs) - target) / self.unit) ** 2


LOG_FACTOR_SPREAD = 0.5
"""Standard deviation that is expected of the logarithm of the factor, before any outcome is seen."""
SHIFT_SPREAD = 2.0
"""The same of the shift of the raw shape."""


def fit_correction(nll: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
    """Return the correction of a trained forecast by two numbers: the logarithm of a factor of its scale, and a shift
    of its shape, that make the outcomes of windows that it was not trained on most likely; (0, 0) where there is no
    finite optimum. Temperature scaling (Guo et al. 2017) is the same thing for classifiers.

    ``nll`` returns the negative log likelihood of all outcomes together, in nats, for the two as scalars of float64,
    differentiably. With few outcomes the result stays near (0, 0).
    """
    from scipy.optimize import minimize  # not above: only the end of a training needs it

    def loss(at: NDArray) -> tuple[float, NDArray]:
        numbers = torch.from_numpy(at).requires_grad_()
        log_factor, shift = numbers
        expected = 0.5 * (log_factor / LOG_FACTOR_SPREAD) ** 2 + 0.5 * (shift / SHIFT_SPREAD) ** 2
        total = nll(log_factor, shift) + expected
        [gradient] = torch.autograd.grad(total, [numbers])
        return total.item(), gradient.numpy()

    with torch.enable_grad():
        found = minimize(loss, [0.0, 0.0], jac=True, method="L-BFGS-B")
    log_factor, shift = found.x.tolist()
    is_finite = all(map(math.isfinite, (log_factor, shift, float(found.fun))))
    return (log_factor, shift) if is_finite else (0.0, 0.0)


STOCK: dict[str, type[nn.Module]] = {
    "return_and_volatility": ReturnAndVolatility,
    "student_t": StudentTLoss,
    "gaussian": GaussianLoss,
    "mse": MeanSquaredError,
}


def gives_predictive(criterion: object) -> bool:
    """Return whether a loss says what distribution its outputs mean."""
    return callable(getattr(criterion, "predictive", None))
