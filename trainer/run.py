"""The entry points to a training in this process: `DistributedTrainer`, and `run_job`, of ``python -m trainer``.

Names that users import belong here; the loop itself is in `trainer.engine`.
"""

from trainer.engine.run_job import run_job
from trainer.engine.trainer import DistributedTrainer

__all__ = ["DistributedTrainer", "run_job"]
