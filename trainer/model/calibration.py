"""The correction of a trained forecast by two numbers, which are fitted to the outcomes of windows that it was not
trained on: the logarithm of a factor of its scale, and a shift of its shape.

A network is too sure of what it was trained on, and the tails of old prices, of which many did not move for a week
because they moved in eighths of a dollar, are not those of today's. Temperature scaling (Guo et al. 2017) is the same
thing for classifiers. What distribution the numbers correct is a loss's (`trainer.model.losses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOG_FACTOR_SPREAD = 0.5
"""Standard deviation that is expected of the logarithm of the factor, before any outcome is seen."""
SHIFT_SPREAD = 2.0
"""The same of the shift of the raw shape."""


def fit_correction(nll: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
    """Return (log factor, shift) that make the outcomes most likely; (0, 0) where there is no finite optimum.

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
