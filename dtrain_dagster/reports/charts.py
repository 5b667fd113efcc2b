"""The charts in the assets' metadata: plain rows or a dataset in, SVG out, each with axes, units and a legend."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtrain_dagster.monitoring.learning import evaluations_of, judge_learning
from trainer.data.manifest import read_dataset_manifest
from trainer.documents.places import inside
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#24292f", "#6e7781", "#d8dee4"
COLOURS = ("#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#9a6700", "#0e7490", "#57606a")
MOST_LINES = 60
"""The most tickers that are drawn; of more, an even selection is taken."""
POINTS = 500


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    # Figure, not pyplot: no global state and no display, so any thread of any process may draw.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def line(
    axis: Axes,
    points: Sequence[tuple[float, float]],
    text: str,
    colour: str,
    marker: str | None = None,
    width: float = 1.5,
) -> None:
    """Draw a labelled line through ``points`` (x, y)."""
    horizontal, vertical = ([point[index] for point in points] for index in (0, 1))
    axis.plot(horizontal, vertical, label=text, color=colour, linewidth=width, marker=marker, markersize=4)


def label(axis: Axes, title: str, horizontal: str, vertical: str) -> None:
    """Set an axis's title and labels, in the common style."""
    axis.set_title(title, fontsize=10, color=INK, loc="left", fontweight="bold")
    axis.set_xlabel(horizontal, fontsize=9, color=MUTED)
    axis.set_ylabel(vertical, fontsize=9, color=MUTED)
    axis.tick_params(labelsize=8, colors=MUTED)
    axis.grid(visible=True, color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GRID)


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG."""
    buffer = io.BytesIO()
    # No date in the file: the same figures give the same bytes.
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def markdown_image(svg: bytes, title: str) -> str:
    """Return Markdown that shows the chart in Dagster's UI without any request for it."""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg).decode()})"


def training_curves(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> bytes:
    """Return an SVG of the loss of training and validation over optimizer steps, with learning rate and gradient norm
    below."""
    figure = new_figure(9, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    line(upper, [(row["step"], row["loss"]) for row in steps], "training", COLOURS[0], width=1.1)
    valid = evaluations_of(evaluations)
    if found := judge_learning(valid):
        line(upper, [(item.step, item.loss) for item in valid], "validation", COLOURS[1], marker="o")
        best = found.best
        upper.annotate(
            f"best {best.loss:.4f}\nat step {best.step}",
            (best.step, best.loss),
            xytext=(0, 22),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=COLOURS[1],
        )
    label(upper, "Loss over optimizer steps", "", "loss per sample")
    upper.legend(frameon=False, fontsize=8)
    line(lower, [(row["step"], row["learning_rate"]) for row in steps], "learning rate", COLOURS[2])
    norms = lower.twinx()
    line(norms, [(row["step"], row["grad_norm"]) for row in steps], "gradient norm", COLOURS[3], width=0.9)
    norms.set_ylabel("gradient 2-norm", fontsize=9, color=COLOURS[3])
    norms.spines[["top"]].set_visible(False)
    label(lower, "", "optimizer step", "learning rate")
    lines = lower.get_lines() + norms.get_lines()
    lower.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8, loc="upper right")
    return svg(figure)


def skill_chart(model: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]]) -> bytes:
    """Return an SVG of negative log-likelihood and 90 % coverage on the test split: the model against every
    baseline."""
    rows = [(name, metrics) for name, metrics in baselines.items() if metrics.get("nll") is not None]
    rows = sorted([*rows, ("this model", model)], key=lambda row: row[1]["nll"], reverse=True)
    names = [name for name, _ in rows]
    colours = [COLOURS[0] if name == "this model" else "#afb8c1" for name in names]
    figure = new_figure(9, 1.3 + 0.42 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    nll = [metrics["nll"] for _, metrics in rows]
    span = max(nll) - min(nll) or 1.0
    floor = max(nll) + 0.15 * span
    left.barh(names, [floor - value for value in nll], color=colours, height=0.62)
    for index, value in enumerate(nll):
        left.text(floor - value + 0.01 * span, index, f"{value:.4f}", va="center", fontsize=8, color=INK)
    left.set_xlim(0, (floor - min(nll)) * 1.18)
    left.set_xticks([])
    label(left, "Negative log-likelihood (longer bar: better)", "", "")
    right.axvspan(0.87, 0.93, color="#dafbe1", label="accepted")
    right.axvline(0.90, color=COLOURS[2], linewidth=1, linestyle="--", label="nominal")
    right.scatter([metrics["coverage_90"] for _, metrics in rows], names, color=colours, zorder=3, s=36)
    right.set_xlim(0.84, 0.96)
    label(right, "Coverage of the 90 % interval", "share of test windows inside", "")
    figure.legend(*right.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower right", ncols=2)
    return svg(figure)


def calibration_chart(quintiles: Sequence[Mapping[str, float]]) -> bytes:
    """Return an SVG of the coverage of the 90 % interval within each fifth of the predicted scale, calm to stormy."""
    figure = new_figure(6, 3)
    axis = figure.subplots()
    labels = [f"{index + 1}" for index in range(len(quintiles))]
    axis.axhspan(0.87, 0.93, color="#dafbe1", label="accepted overall")
    axis.axhline(0.90, color=COLOURS[2], linewidth=1, linestyle="--", label="nominal")
    axis.plot(labels, [row["coverage_90"] for row in quintiles], "o-", color=COLOURS[0], label="this model")
    axis.set_ylim(0.80, 1.0)
    label(axis, "Calibration by predicted volatility", "quintile of predicted scale (1 calm … 5 stormy)", "coverage")
    axis.legend(frameon=False, fontsize=8, loc="lower left", ncols=3)
    return svg(figure)


def dataset_picture(uri: str) -> bytes:
    """Return an SVG of all tickers' prices on one scale (log of price over its first), splits shaded, masked days
    marked."""
    import numpy as np
    import pyarrow.parquet as pq
    from matplotlib import rc_context
    from matplotlib.dates import date2num

    manifest = read_dataset_manifest(open_storage(uri))
    tickers = [ticker for shard in manifest["shards"] for ticker in shard["tickers"]]
    shown = set(tickers[:: -(-len(tickers) // MOST_LINES)])
    figure = new_figure(9, 4)
    axis = figure.subplots()
    for colour, (split, bounds) in zip(("#ddf4ff", "#fff8c5", "#dafbe1"), manifest["splits"].items(), strict=True):
        first, last = (float(date2num(np.datetime64(bounds[end]))) for end in ("first", "last"))
        count = manifest["samples"][split]
        axis.axvspan(first, last, color=colour, linewidth=0, label=f"{split}: {count:,} windows")
    for shard in manifest["shards"]:
        file = pq.ParquetFile(inside(uri, shard["path"], f"a shard of {uri}"))
        for group, ticker in enumerate(shard["tickers"]):
            if ticker not in shown:
                continue
            table = file.read_row_group(group, columns=["date", "adj_close"])
            dates, prices = table["date"].to_numpy(), table["adj_close"].to_numpy()
            thin = slice(None, None, max(1, len(dates) // POINTS))
            axis.plot(
                dates[thin],
                np.log(prices[thin] / prices[0]),
                color="#57606a",
                alpha=0.45,
                linewidth=0.7,
                rasterized=True,
            )
            axis.annotate(
                ticker,
                (dates[-1], np.log(prices[-1] / prices[0])),
                fontsize=5,
                color="#57606a",
                va="center",
                parse_math=False,
            )
    for place, mask in enumerate(manifest["masks"]):
        first, last = (float(date2num(np.datetime64(mask[end]))) for end in ("first", "last"))
        axis.axvspan(first, last, ymax=0.04, color="#cf222e", linewidth=0, label="masked days" if not place else None)
    axis.set_title(f"{manifest['source']['title']}", fontsize=10, loc="left", fontweight="bold", parse_math=False)
    axis.set_ylabel("log(price / first price)", fontsize=9)
    axis.set_xlabel("day", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # letters as text: their outlines would double the size
        figure.savefig(buffer, format="svg", dpi=90, metadata={"Date": None})
    return buffer.getvalue()
