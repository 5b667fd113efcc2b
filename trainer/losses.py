"""The public names for a user's own loss, from `trainer.model.losses`.

Names that users import belong here; how losses are computed and found does not. A loss is a `torch.nn.Module` that
returns one loss per sample, and may have ``predictive(outputs) -> Predictive`` to be judged as a distribution.
"""

from trainer.model.build import build_loss
from trainer.model.losses import (
    GaussianLoss,
    MeanSquaredError,
    Predictive,
    StudentTLoss,
    student_t_cdf,
    student_t_nll,
    student_t_quantile,
)
from trainer.model.task import LastDimCrossEntropyLoss

__all__ = [
    "GaussianLoss",
    "LastDimCrossEntropyLoss",
    "MeanSquaredError",
    "Predictive",
    "StudentTLoss",
    "build_loss",
    "student_t_cdf",
    "student_t_nll",
    "student_t_quantile",
]
