"""Charts of scaling: the measured points, and the model beyond them; SVG, each with axes, units and a legend."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain_dagster.monitoring.scaling import CLAIMED, SIZES, Study
from dtrain_dagster.monitoring.scaling_points import Mode, ScalingPoint, efficiency
from dtrain_dagster.reports.drawing import COLOURS, MUTED, label, new_figure, svg

MODES: tuple[Mode, ...] = ("weak", "strong")
TITLES = {"weak": "Weak scaling", "strong": f"Strong scaling (modelled: a step of {max(SIZES)} micro-batches)"}


def measured_chart(points: Sequence[ScalingPoint]) -> bytes:
    """Return an SVG of the speed-up over ranks beside the ideal, the parts of a step in each world, and an epoch's
    dollars."""
    picture = new_figure(9, 3.4)
    speed, parts, cost = picture.subplots(1, 3, width_ratios=(1.1, 1.3, 1))
    worlds = sorted({point.world_size for point in points})
    speed.plot(worlds, [world / worlds[0] for world in worlds], "--", color=MUTED, linewidth=1, label="ideal")
    for mode, colour in zip(MODES, COLOURS, strict=False):
        share = efficiency(points, mode)
        if worlds[0] not in share:  # nothing to compare with: the smallest world was not measured in this mode
            continue
        speed.plot(list(share), [share[world] * world / worlds[0] for world in share], "o-", color=colour, label=mode)
    speed.set_ylim(bottom=0)
    speed.set_xticks(worlds)
    label(speed, "Speed-up", "ranks", "times the samples/s of the smallest")
    speed.legend(frameon=False, fontsize=8)
    names = [f"{point.mode}\n{point.world_size}" for point in points]
    floor = [0.0] * len(points)
    for index, (name, field) in enumerate(
        (("compute", "compute_seconds"), ("communication", "network_seconds"), ("waiting", "waiting_seconds"))
    ):
        values = [1000 * getattr(point, field) for point in points]
        parts.bar(names, values, bottom=floor, color=COLOURS[index], label=name, width=0.6)
        floor = [below + value for below, value in zip(floor, values, strict=True)]
    rest = [max(0.0, 1000 * point.step_seconds - below) for point, below in zip(points, floor, strict=True)]
    parts.bar(names, rest, bottom=floor, color="#d0d7de", label="other", width=0.6)
    label(parts, "A step", "ranks", "ms, mean over ranks")
    parts.legend(frameon=False, fontsize=8, ncols=2)
    parts.set_ylim(top=1.35 * max(1000 * point.step_seconds for point in points))
    for side, (mode, colour) in enumerate(zip(MODES, COLOURS, strict=False)):
        mine = [point for point in points if point.mode == mode]
        places = [worlds.index(point.world_size) + 0.36 * (side - 0.5) for point in mine]
        cost.bar(places, [point.usd_per_epoch for point in mine], color=colour, width=0.34, label=mode)
    cost.set_xticks(range(len(worlds)), [str(world) for world in worlds])
    cost.set_ylim(top=1.25 * max(point.usd_per_epoch for point in points))
    cost.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    label(cost, "Cost of an epoch", "ranks", "US dollars")
    return svg(picture)


def tell_error(study: Study) -> str:
    """Return in a sentence how far the model was off where it was checked; "" without a check."""
    if study.error is None:
        return ""
    worst = max(study.checks, key=lambda item: abs(item.error))
    return (
        f"Modelled up to {max(SIZES)} ranks. Checked on {worst.world_size} ranks, which the model had not seen: its "
        f"step is off by {worst.error:+.0%}; no larger world was checked."
    )


def modelled_chart(study: Study) -> bytes:
    """Return an SVG of efficiency over ranks: modelled for stated links with its range, measured here, and as
    claimed; its title says how far the model was off where it was checked. Raise ValueError where the model is
    withheld."""
    if study.withheld:
        raise ValueError(study.withheld)
    curves, points = study.curves, study.points
    picture = new_figure(9, 4.0)
    axes = dict(zip(MODES, picture.subplots(1, 2, sharey=True), strict=True))
    for mode, axis in axes.items():
        for index, curve in enumerate(item for item in curves if item.mode == mode):
            worlds = [entry[0] for entry in curve.rows]
            colour = COLOURS[index]
            axis.fill_between(
                worlds, [entry[1] for entry in curve.rows], [entry[3] for entry in curve.rows], color=colour, alpha=0.12
            )
            axis.plot(worlds, [entry[2] for entry in curve.rows], color=colour, label=f"modelled: {curve.link.name}")
        if mode == "weak":
            axis.plot(
                list(CLAIMED), list(CLAIMED.values()), ":", marker="x", color=MUTED, label="claimed by the checklist"
            )
        here = efficiency(points, mode)
        axis.plot(list(here), list(here.values()), "o", color=COLOURS[4], label="measured on this cluster", zorder=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({size for curve in curves for size, *_ in curve.rows}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ylim(0, 1.08)
        label(axis, TITLES[mode], "ranks (log scale)", "efficiency per rank (1 = perfect)")
    picture.suptitle(tell_error(study), fontsize=9)
    handles = {
        text: handle for axis in axes.values() for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    picture.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return svg(picture)
