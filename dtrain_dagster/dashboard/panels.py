"""The panels of the dashboard, as data: the columns of each chart and its form. ``static/job_charts.js`` draws them."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain_dagster.dashboard.series import ALL_NODES
from dtrain_dagster.monitoring.windows import SEGMENTS

EACH_NODE = "node *"
"""A placeholder for a track's name that stands for every node, each as a line of its own."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart: a column of a track. An empty ``label`` stands for the track's name."""

    track: str
    column: str
    label: str = ""
    dash: str = "solid"
    marker: bool = False
    right: bool = False
    """Whether it is drawn on the axis at the right side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A chart. ``kind``: lines, stack (lines that add up), ranks, heatmap, collectives, links, timeline."""

    key: str
    title: str
    unit: str
    about: str
    """A sentence on what it shows, for readers who do not know."""
    kind: str = "lines"
    x: str = "step"
    lines: tuple[ChartLine, ...] = ()
    right_unit: str = ""
    wide: bool = False
    section: str
    optional: bool = False
    """Whether the panel is hidden while it has no data."""


PANELS = (
    Panel(
        key="loss", section="Training", title="Loss", unit="loss per sample",
        about="Mean over the samples of all ranks since the report before; validation at each evaluation.",
        lines=(ChartLine("steps", "loss", "training"), ChartLine("evaluations", "loss", "validation", marker=True)),
    ),
    Panel(
        key="rate", section="Training", title="Learning rate and gradient norm", unit="learning rate",
        about="The gradient's 2-norm is taken before it is clipped.", right_unit="gradient 2-norm",
        lines=(
            ChartLine("steps", "learning_rate", "learning rate"),
            ChartLine("steps", "grad_norm", "gradient norm", right=True),
        ),
    ),
    Panel(
        key="throughput", section="Training", title="Throughput", unit="samples/s", x="time",
        about="All nodes together while they train, and each node.",
        lines=(ChartLine("steps", "samples_per_second", "all nodes"), ChartLine(EACH_NODE, "samples_per_second")),
    ),
    Panel(
        key="breakdown", section="Where the time goes", title="A step, by what it was spent on", unit="ms per step",
        kind="stack", wide=True,
        about="Mean over ranks. Communication: on the network, not hidden by computation. Waiting: for slower ranks.",
        lines=tuple(ChartLine("timing", name, name) for name in SEGMENTS),
    ),
    Panel(
        key="ranks", section="Where the time goes", title="A step, by rank", unit="ms per step", kind="ranks",
        about="Over the newest reports. The others wait for the rank that waits least.",
    ),
    Panel(
        key="late", section="Where the time goes", title="Late ranks over time", unit="ms late", kind="heatmap",
        wide=True,
        about="Median per report of how much less a rank waited than the one that waited most.",
        lines=(ChartLine("late", "*"),),
    ),
    Panel(
        key="collectives", section="Where the time goes", title="Communication, by collective", unit="ms per step",
        kind="collectives",
        about="Newest report. Network: the fastest rank's time. Overlapped: the part that computation hides.",
    ),
    Panel(
        key="links", section="Where the time goes", title="Links between ranks", unit="ms", kind="links", optional=True,
        about="A probe from rank to rank, made when much of a step is exposed communication.",
    ),
    Panel(
        key="busy", section="Nodes", title="Utilisation", unit="%", x="time",
        about="Mean over a node's GPUs; without GPUs, its share of the machine's processors.",
        lines=(ChartLine(ALL_NODES, "busy", "mean"), ChartLine(EACH_NODE, "busy")),
    ),
    Panel(
        key="memory", section="Nodes", title="Memory", unit="%", x="time",
        about="Share of the GPUs' memory; without GPUs, the ranks' share of the machine's.",
        lines=(ChartLine(ALL_NODES, "memory", "mean"), ChartLine(EACH_NODE, "memory")),
    ),
    Panel(
        key="network", section="Nodes", title="Network", unit="bytes/s", x="time",
        about="All interfaces of the machine; sent, and received (dotted).",
        lines=(ChartLine(EACH_NODE, "sent"), ChartLine(EACH_NODE, "received", dash="dot")),
    ),
    Panel(
        key="disk", section="Nodes", title="Disk", unit="bytes/s", x="time",
        about="All disks of the machine; written, and read (dotted).",
        lines=(ChartLine(EACH_NODE, "disk_written"), ChartLine(EACH_NODE, "disk_read", dash="dot")),
    ),
    Panel(
        key="timeline", section="Nodes", title="When nodes were there", unit="", kind="timeline", x="time", wide=True,
        about="A bar for each incarnation of a node; marks are new generations (▼), checkpoints (·) and hangs (✕).",
    ),
)  # fmt: skip
