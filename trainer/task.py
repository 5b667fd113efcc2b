"""The public names for a task of a user's own, from `trainer.model.task`.

Names that users import belong here. A task has ``loss(model, batch)``, which returns one loss per sample, and may have
``metrics(model, batch)``, which returns further figures per sample by name.
"""

from trainer.model.task import Measure, SupervisedTask, Task

__all__ = ["Measure", "SupervisedTask", "Task"]
