"""What a followed job waits for, as its nodes for places in a queue: told when it changes, and not at each look."""

from __future__ import annotations

from dtrain_dagster.clusters.base import JobStatus
from trainer.printable import visible


class WaitNews:
    """What was told last of one job that is followed."""

    def __init__(self) -> None:
        self._told = ""

    def tell(self, status: JobStatus) -> str:
        """Return a sentence where the reason of the wait is another than before, or the wait is over; else ""."""
        words = describe_wait(status)
        reason = words.partition(";")[0]  # what follows is how long it has been
        if reason == self._told:
            return ""
        self._told = reason
        return words or ("" if status.state.is_final else "all nodes have their places")


def describe_wait(status: JobStatus) -> str:
    """Return what a job that goes on waits for, in the words of its cluster; "" where it does not wait. Pure."""
    return "" if status.state.is_final else visible(status.message)
