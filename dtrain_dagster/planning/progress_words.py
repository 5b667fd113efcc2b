"""The one way in which the progress of a training is told, on every terminal and in every log: phase, step, epoch, time
left, loss, speed, nodes. Pure.

The time left comes before the figures, since a line may be cut off at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.jobs.progress import JobProgress

if TYPE_CHECKING:
    from dtrain_dagster.planning.projection import TimeLeft

WAITING = JobProgress().phase
STARTING = "starting"


def describe_training(
    progress: JobProgress,
    total_steps: int | None,
    left: TimeLeft | None = None,
    state: JobState | None = None,
    with_share: bool = False,
) -> list[str]:
    """Return the parts of the line, as far as they are known. ``state``: of the job; one that has ended is told by its
    state, and has neither a speed nor nodes. ``with_share``: also which share of the steps is done."""  # fmt: skip
    ended = state is not None and state.is_final
    phase = STARTING if progress.phase == WAITING and progress.nodes_alive else progress.phase
    parts = [str(state) if ended else phase]
    if progress.step:
        share = f" ({progress.step / total_steps:.0%})" if with_share and total_steps else ""
        parts.append(f"step {progress.step}" + (f"/{total_steps}" if total_steps else "") + share)
        parts += [f"epoch {progress.epoch}"] if progress.epoch else []
    if left is not None and not ended:
        parts.append(f"ETA {left.words}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.valid_loss is not None:
        parts.append(f"valid {progress.valid_loss:.4f}")
    if progress.samples_per_second is not None and not ended:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    return parts


def count_nodes(count: int) -> str:
    """Return ``1 node`` or ``3 nodes``."""
    return f"{count} node" + ("" if count == 1 else "s")
