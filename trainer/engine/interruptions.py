"""Exceptions with which a training changes its course or ends, although the code has no error.

The module that notices raises one; the loop (`trainer.engine.trainer`) or the process (`trainer.engine.run_job`) acts
on it. Failures of a part, such as a group or the data, belong to the module of that part.
"""

from __future__ import annotations

from typing import Any


class Stopped(Exception):
    """This process was asked to end (SIGTERM), alone or together with all ranks; a checkpoint has been written."""

    def __init__(self, everybody: bool = True) -> None:
        super().__init__("asked to end")
        self.everybody = everybody


class Regroup(Exception):
    """Another generation is wanted, between two steps. The message gives the reason."""


class JobOver(Exception):
    """Another process has ended the job meanwhile; ``result`` says how."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("error", result["status"]))
        self.result = result


class BudgetSpent(Exception):
    """The budget is spent, except for what a checkpoint needs. ``agreed``: all ranks know."""

    def __init__(self, agreed: bool) -> None:
        super().__init__("the budget is spent")
        self.agreed = agreed


class OutOfMemoryError(RuntimeError):
    """Memory does not suffice for the smallest part of a micro-batch. The message says what was measured and what would
    fit; ``facts`` holds the figures (`trainer.engine.memory_need.MemoryNeed.facts`)."""

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = facts


class GPUTooSmall(Exception):
    """The GPU of this process has not the memory that the training needs, and the job may go on on the CPU:
    `trainer.engine.run_job` does so, as a newcomer among the peers."""
