"""Draw docs/pictures/performance-*.png from the saved results of benchmarks, as far as they exist.

Run `python -m benchmarks.pictures`. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoint import RESULTS
from benchmarks.frameworks.rounds import LOCKSTEP
from dtrain_dagster.reports.drawing import COLOURS, INK, MUTED, label, line, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
NAMES = {
    "ours": "dtrain", "plain_ddp": "plain DDP", "plain_ddp_malloc": "plain DDP, malloc set",
    "lightning": "Lightning", "accelerate": "Accelerate", "ray": "Ray Train",
}  # fmt: skip
"""Names of frameworks at equal settings, in results and in pictures."""
TUNED_RIVAL = "plain_ddp_tuned"
"""The one that chooses its settings from the same ones as dtrain tuned."""
SHARDERS = {"ours": "dtrain", "pandas": "pandas + Parquet", "mosaic": "mosaicml-streaming"}
READERS = {
    "ours": "dtrain", "ours_blocks": "dtrain, in blocks", "dataloader_0": "DataLoader", "dataloader_2": "… 2 workers",
    "mosaic_0": "mosaicml-streaming", "mosaic_2": "… 2 workers",
}  # fmt: skip
MODES = ("allreduce", "fp16", "topk", "hierarchical")
"""Ways to sum gradients, in the order of the bars."""
LIGHT = "#d0d7de"


def throughput(result: Mapping[str, Any]) -> Figure:
    """Draw, model by model and batch by batch, each framework's samples per second at equal settings as a share of the
    bound's; and dtrain tuned as a multiple of plain DDP tuned, which both may train in another precision."""
    cells = [cell for cell in result["cells"] if cell["vs_bound"]]
    picture = new_figure(11, 3.8)
    axis, multiples = picture.subplots(1, 2, width_ratios=(2.4, 1))
    shown = [name for name in NAMES if any(name in cell["vs_bound"] for cell in cells)]
    width = 0.84 / len(shown)
    for index, name in enumerate(shown):
        there = [(place, cell["vs_bound"][name]) for place, cell in enumerate(cells) if name in cell["vs_bound"]]
        places = [place + width * (index - (len(shown) - 1) / 2) for place, _ in there]
        shares = [found["ratio"] for _, found in there]
        spread = [
            [found["ratio"] - found["low"] for _, found in there],
            [found["high"] - found["ratio"] for _, found in there],
        ]
        axis.bar(places, shares, width * 0.92, color=COLOURS[index], label=NAMES[name])
        axis.errorbar(places, shares, spread, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
    for place, cell in enumerate(cells):
        if LOCKSTEP in cell["vs_bound"]:
            axis.hlines(cell["vs_bound"][LOCKSTEP]["ratio"], place - 0.46, place + 0.46, color=INK, linestyle=":",
                        label=None if place else "the bound, if ranks waited for each other")  # fmt: skip
    axis.axhline(1, color=INK, linewidth=1, linestyle="--")
    axis.annotate("the bound: no input, no communication", (1, 1), (0, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", fontsize=8, color=INK)  # fmt: skip
    _multiples(multiples, cells)
    axis.set_xticks(range(len(cells)), [f"{cell['model']}\n{cell['batch_per_rank']:,}" for cell in cells])
    title = (
        f"Samples per second, {result['ranks']} ranks, {result['cpu']} ({result['cores']} cores), {result['date'][:10]}"
    )
    label(axis, title, "model and samples per rank", "share of the bound's")
    axis.title.set_fontsize(9)
    axis.set_ylim(0, 1.15 * max(1.0, *(cell["vs_bound"][name]["high"] for cell in cells for name in shown
                                       if name in cell["vs_bound"])))  # fmt: skip
    picture.legend(*axis.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=6)
    return picture


def _multiples(axis: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    there = [(place, cell["tuned_vs"][TUNED_RIVAL]) for place, cell in enumerate(cells)
             if TUNED_RIVAL in cell["tuned_vs"]]  # fmt: skip
    for place, found in there:
        low, high = found["ratio"] - found["low"], found["high"] - found["ratio"]
        axis.bar(place, found["ratio"], 0.7, color=COLOURS[0])
        axis.errorbar(place, found["ratio"], [[low], [high]], fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
        axis.annotate(f"{found['ratio']:.2f}", (place, found["high"]), (0, 2), textcoords="offset points",
                      ha="center", fontsize=8, color=INK)  # fmt: skip
    axis.axhline(1, color=INK, linewidth=1, linestyle="--")
    axis.set_ylim(0, 1.12 * max([1.0, *(found["high"] for _, found in there)]))
    axis.set_xticks(range(len(cells)), [f"{cell['model']}\n{cell['batch_per_rank']:,}" for cell in cells])
    label(axis, "Both with settings tuned", "model and samples per rank", "times as fast as plain DDP")
    axis.tick_params(axis="x", labelsize=6.5)
    axis.title.set_fontsize(9)


def scaling(result: Mapping[str, Any]) -> Figure:
    """Draw a step of the wide model on three hosts, for each rate and way to sum: the mean over rounds, and each round
    as a dot where there are several."""
    rows = [row for row in result["rows"] if row["model"] == "wide" and row["ranks"] == 3]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    picture = new_figure(9, 3.4)
    for axis, rate in zip(picture.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        here = {mode: [row for row in rows if (row["rate"], row["communication"]) == (rate, mode)] for mode in MODES}
        modes = [mode for mode in MODES if here[mode]]
        steps, exposed = (
            [1000 * statistics.fmean(row[key] for row in here[mode]) for mode in modes]
            for key in ("step_seconds", "exposed_seconds")
        )
        computed = [step - network for step, network in zip(steps, exposed, strict=True)]
        axis.bar(modes, computed, color=COLOURS[0], label="computation, and communication hidden by it", width=0.65)
        axis.bar(modes, exposed, bottom=computed, color=COLOURS[1], label="exposed communication", width=0.65)
        for place, step in enumerate(steps):
            rounds = [1000 * row["step_seconds"] for row in here[modes[place]]]
            if len(rounds) > 1:
                axis.plot([place] * len(rounds), rounds, "o", color=INK, markersize=3)
            axis.annotate(f"{step:,.0f}", (place, max(rounds)), (0, 3), textcoords="offset points", ha="center",
                          fontsize=8, color=INK)  # fmt: skip
        label(axis, f"3 hosts, {rate}", "", "ms per step, wide model")
        axis.set_xticks(range(len(modes)), modes, rotation=30, ha="right")
        axis.set_ylim(0, 1.12 * max(1000 * row["step_seconds"] for mode in modes for row in here[mode]))
        handles = axis.get_legend_handles_labels()
    picture.legend(*handles, frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return picture


def scaling_by_nodes(result: Mapping[str, Any]) -> Figure:
    """Draw speed-up, the parts of a step and an epoch's dollars as measured; below, where the model met the largest
    world, efficiency as modelled, with its range."""
    points, curves = result["points"], result["curves"]
    rows = [["speed", "parts", "cost"], *([["weak", "strong", "strong"]] if curves else [])]
    picture = new_figure(10, 3.4 * len(rows))
    axes = picture.subplot_mosaic(rows)
    worlds = sorted({point["world_size"] for point in points})
    axes["speed"].plot(worlds, [world / worlds[0] for world in worlds], "--", color=MUTED, linewidth=1, label="ideal")
    for side, mode in enumerate(("weak", "strong")):
        share = {int(world): value for world, value in result[f"efficiency_{mode}"].items()}
        mine = [point for point in points if point["mode"] == mode]
        if worlds[0] in share:  # else there is nothing to compare with
            speed_up = [share[world] * world / worlds[0] for world in share]
            axes["speed"].plot(list(share), speed_up, "o-", color=COLOURS[side], label=mode)
        places = [worlds.index(point["world_size"]) + 0.36 * (side - 0.5) for point in mine]
        dollars = [point["usd_per_epoch"] for point in mine]
        axes["cost"].bar(places, dollars, color=COLOURS[side], width=0.34, label=mode)
        for index, curve in enumerate(item for item in curves if item["mode"] == mode):
            ranks, low, middle, high = zip(*curve["rows"], strict=True)
            axes[mode].fill_between(ranks, low, high, color=COLOURS[index], alpha=0.12)
            axes[mode].plot(ranks, middle, color=COLOURS[index], label=f"modelled: {curve['link']}")
        if curves:
            axes[mode].plot(list(share), list(share.values()), "o", color=INK, label="measured here", zorder=4)
            axes[mode].set_xscale("log", base=2)
            axes[mode].set_ylim(0, 1.08)
            label(axes[mode], f"{mode.capitalize()} scaling", "ranks (log scale)", "efficiency per rank")
            axes[mode].legend(frameon=False, fontsize=6.5)
    names, floor = [f"{point['mode']}\n{point['world_size']}" for point in points], [0.0] * len(points)
    parts = {"compute": COLOURS[0], "network": COLOURS[1], "waiting": COLOURS[2], "other": LIGHT}
    for part, colour in parts.items():
        values = [
            max(0.0, 1000 * point["step_seconds"] - below) if part == "other" else 1000 * point[f"{part}_seconds"]
            for point, below in zip(points, floor, strict=True)
        ]
        axes["parts"].bar(names, values, bottom=floor, color=colour, label=part, width=0.6)
        floor = [below + value for below, value in zip(floor, values, strict=True)]
    axes["speed"].set_xticks(worlds)
    axes["cost"].set_xticks(range(len(worlds)), [str(world) for world in worlds])
    label(axes["speed"], "Speed-up", "ranks", "times the samples/s of the smallest")
    label(axes["parts"], "A step", "ranks", "ms, mean over ranks")
    label(axes["cost"], "Cost of an epoch", "ranks", "US dollars")
    for name in ("speed", "parts", "cost"):
        axes[name].legend(frameon=False, fontsize=8)
        axes[name].set_ylim(0, 1.3 * axes[name].get_ylim()[1])
    return picture


def sharding(result: Mapping[str, Any]) -> Figure:
    """Draw rows per second and peak memory over the size of the data, and samples per second of random windows."""
    picture = new_figure(9, 3.6)
    pace, memory, reading = picture.subplots(1, 3, width_ratios=(1, 1, 1.1))
    sizes = sorted({int(key.split("_")[1][:-1]) for key in result if key.startswith("shard_")})
    for (name, text), colour in zip(SHARDERS.items(), COLOURS, strict=False):
        found = {size: result.get(f"shard_{size}x_{name}", {}) for size in sizes}
        for axis, key in ((pace, "rows_per_second"), (memory, "peak_mb")):
            points = [(float(size), each[key]) for size, each in found.items() if key in each]
            if points:
                line(axis, points, text, colour, marker="o")
    for axis in (pace, memory):
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.set_xticks(sizes, [f"{size}×" for size in sizes])
        axis.set_ylim(bottom=0)
        _thousands(axis)
    label(pace, "To shards", "size of the data", "rows per second")
    label(memory, "Peak memory", "size of the data", "MB")
    picture.legend(*pace.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower left", ncols=3)
    if absent := [
        f"{text} at {size}×" for name, text in SHARDERS.items() for size in sizes
        if "failed" in result.get(f"shard_{size}x_{name}", {})
    ]:  # fmt: skip
        memory.annotate("did not end: " + ", ".join(absent), (0, 1), (4, -2), xycoords="axes fraction", fontsize=7,
                        textcoords="offset points", va="top", color=MUTED)  # fmt: skip
    shown = {name: result.get(f"read_{name}", {}).get("samples_per_second") for name in READERS}
    shown = {name: value / 1000 for name, value in shown.items() if value}
    colours = [COLOURS[0] if name.startswith("ours") else COLOURS[1 if "loader" in name else 2] for name in shown]
    label(reading, "Random windows", "thousand samples per second", "")
    _bars(reading, [READERS[name] for name in shown], list(shown.values()), colours)
    return picture


def orchestration(result: Mapping[str, Any]) -> Figure:
    """Draw a training under Dagster beside the bare one, short and long, and the phases of a short run."""
    picture = new_figure(10, 3.4)
    cpu, wall, parts = picture.subplots(1, 3, width_ratios=(1.15, 1.15, 1.3))
    lengths = sorted({row["steps"] for row in result["rows"]})
    for axis, key, title in ((cpu, "cpu", "CPU time"), (wall, "wall", "Wall-clock time")):
        for side, (field, text) in enumerate(((f"bare_{key}", "bare trainer"), (key, "under Dagster"))):
            values = [
                statistics.median(row[field] for row in result["rows"] if row["steps"] == steps) for steps in lengths
            ]
            places = [place + 0.38 * (side - 0.5) for place in range(len(lengths))]
            axis.bar(places, values, 0.36, color=(LIGHT, COLOURS[0])[side], label=text)
            for place, value in zip(places, values, strict=True):
                axis.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8, color=INK)
        axis.set_xticks(range(len(lengths)), [f"{steps:,} steps" for steps in lengths])
        axis.margins(y=0.2)
        extra, low, high = (result[f"extra_{key}_{name}"] for name in ("seconds", "low", "high"))
        label(axis, f"{title}: {extra:+.1f} s ({low:.1f} to {high:.1f})", "", "seconds of a whole run")
        axis.title.set_fontsize(9)
    cpu.legend(frameon=False, fontsize=8, loc="upper left")
    phases = result["phases"]
    label(parts, "A short run, phase by phase", "seconds", "")
    _bars(parts, list(phases), list(phases.values()), [LIGHT if name == "training" else COLOURS[0] for name in phases])
    return picture


DRAWN: dict[str, tuple[str, Callable[[Mapping[str, Any]], Figure], tuple[str, ...]]] = {
    "throughput": ("throughput", throughput, ("cells",)),
    "scaling": ("scaling", scaling, ("rows",)),
    "scaling-nodes": ("scaling", scaling_by_nodes, ("points",)),
    "sharding": ("sharding", sharding, ("shard_1x_ours", "read_ours")),
    "orchestration": ("orchestration", orchestration, ("rows",)),
}
"""By picture: its benchmark, the function that draws it, and keys of which a result of a benchmark that was stopped
early must have at least one."""


def _bars(axis: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    """Draw horizontal bars from top to bottom, with their values."""
    places = range(len(names))
    axis.barh(places, values, color=colours, height=0.65)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    for place, value in zip(places, values, strict=True):
        axis.text(
            value, place, f" {value:,.0f}" if value >= 10 else f" {value:.2f}", va="center", fontsize=8, color=MUTED
        )
    axis.margins(x=0.25)
    axis.grid(visible=False, axis="y")


def _thousands(axis: Axes) -> None:
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all pictures whose results exist, and print their paths."""
    parser = argparse.ArgumentParser("python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (benchmarks/results)")
    parser.add_argument("--to", type=Path, default=PICTURES, help="folder of pictures (docs/pictures)")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    for name, (benchmark, draw, needed) in DRAWN.items():
        source = options.results / f"{benchmark}.json"
        result = json.loads(source.read_text()) if source.exists() else {}
        if result.get("benchmark") != benchmark or not any(result.get(key) for key in needed):
            print(f"no result of benchmarks.{benchmark} for {name}: left out", file=sys.stderr)
            continue
        target = options.to / f"performance-{name}.png"
        draw(result).savefig(target, dpi=110)
        print(target)


if __name__ == "__main__":
    main()
