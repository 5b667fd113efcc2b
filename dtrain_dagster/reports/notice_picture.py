"""The picture of a notice: ``python -m dtrain_dagster.reports.notice_picture DIR`` writes it as PNG to standard output,
and nothing where the job of this run directory has no loss yet.

It is a process of its own, so that whoever sends the notice neither imports matplotlib nor depends on what nodes have
written.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.costs.ledger import Ledger, ledger
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs.totals import launched_usage
from dtrain_dagster.reports.drawing import COLOURS, label, line, new_figure
from dtrain_dagster.reports.ledger_charts import CAUSE_COLOURS
from dtrain_dagster.support.formatting import dollars
from trainer.documents.presences import stale_seconds
from trainer.rundir import JOB, LAUNCH, STATUS, RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
SHOWN_CAUSES = 6
"""The causes of cost that have a name below the bar, the largest first."""
MOST_POINTS = 1000
"""The most points of a curve; beyond that, some are left out."""


def loss_points(events: Iterable[Mapping[str, Any]]) -> tuple[Points, Points]:
    """Return (step, loss) of the training and of its evaluations on the validation split; those that are finite.
    Pure."""
    training, valid = [], []
    for event in events:
        loss = event.get("loss")
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            continue
        if event["kind"] == "step":
            training.append((event["step"], loss))
        elif event["kind"] == "evaluation" and event.get("split") == "valid":
            valid.append((event["step"], loss))
    return training[:: 1 + len(training) // MOST_POINTS], valid


def draw_job(training: Points, valid: Points, bill: Ledger | None) -> bytes:
    """Return a PNG of the loss curve, and below it a bar of what the dollars bought; b"" where there is no loss."""
    if not training and not valid:
        return b""
    heights = [3.4, 1.2] if bill is not None and bill.units > 0 else [3.4]
    figure = new_figure(7.5, sum(heights))
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    line(axes[0], training, "training", COLOURS[0], width=1.1)
    line(axes[0], valid, "validation", COLOURS[1], marker="o")
    label(axes[0], "Loss per sample", "optimizer step", "")
    axes[0].legend(frameon=False, fontsize=8)
    if bill is not None and len(axes) > 1:
        _draw_bill(axes[1], bill)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw_bill(axis: Axes, bill: Ledger) -> None:
    causes, left = bill.causes(), 0.0
    for cause, row in causes.items():
        share = row.usd / (sum(each.usd for each in causes.values()) or 1.0)
        axis.barh([0], [row.usd], left=left, color=CAUSE_COLOURS[cause], height=0.6, label=f"{cause} {share:.0%}")
        left += row.usd
    axis.set_yticks([])
    axis.set_xlim(0, left)
    label(axis, f"What {dollars(left)} bought", "US dollars", "")
    axis.grid(visible=False)
    handles, names = axis.get_legend_handles_labels()
    largest = sorted(zip(handles, names, causes.values(), strict=True), key=lambda item: -item[2].usd)[:SHOWN_CAUSES]
    axis.figure.legend(
        [handle for handle, _, _ in largest], [name for _, name, _ in largest],
        frameon=False, fontsize=8, ncols=3, loc="outside lower center",
    )  # fmt: skip


def bill_of(rundir: RunDir, events: Sequence[dict[str, Any]]) -> Ledger | None:
    """Return what the job's nodes were paid for so far; None where a price is not known."""
    launch, status = rundir.read_json(LAUNCH) or {}, rundir.read_json(STATUS) or {}
    running = not JobState(status.get("state", JobState.QUEUED)).is_final
    usage = launched_usage(rundir.nodes(), launch, running, time.time(), stale_seconds(rundir.storage))
    try:
        tracker = CostTracker("", usage, "dedicated")
    except PriceError:
        return None
    return ledger(tracker.nodes, events, running, is_script=not rundir.storage.exists(JOB))


def main(uri: str) -> None:
    """Write the picture of the job in this run directory to standard output."""
    rundir = RunDir(uri)
    events = list(rundir.events())
    sys.stdout.buffer.write(draw_job(*loss_points(events), bill_of(rundir, events)))


if __name__ == "__main__":
    main(sys.argv[1])
