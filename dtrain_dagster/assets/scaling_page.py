"""The page of `scaling_study`: on how many nodes the training is fastest and cheapest, its speed-up, and the short runs
that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.assets.common import best_rows, charts, head_of_page, links, round_figures, table_file
from dtrain_dagster.support.formatting import dollars

if TYPE_CHECKING:
    from dtrain_dagster.monitoring.scaling import Study
    from dtrain_dagster.monitoring.scaling_points import ScalingPoint

SHOWN = ("scaling", "nodes", "samples/s", "communication", "$ an epoch")
"""The columns of the table on the page; the file has all."""


def scaling_page(
    study: Study, folder: str, name: str, uneven: Sequence[int], addresses: Mapping[str, str]
) -> dict[str, Any]:
    """Return the page of a study, after its table was written as ``name``.csv into ``folder``, beside its JSON.
    ``uneven``: the numbers of nodes without strong scaling; ``addresses``: the pages of the web about it, by their
    names."""
    from dtrain_dagster.monitoring.scaling_points import efficiency
    from dtrain_dagster.reports import scaling_charts
    from dtrain_dagster.reports.scaling_charts import MODES
    from dtrain_dagster.reports.small_pictures import small_curves

    points = study.points
    weak = [point for point in points if point.mode == "weak"]
    most = max(weak, key=lambda point: point.world_size)
    least = min(weak, key=lambda point: point.world_size)
    rows = [row(point) for point in sorted(points, key=lambda point: -point.samples_per_second)]
    pictures = {"Scaling as measured": scaling_charts.measured_chart(points)}
    if study.curves:
        pictures["Scaling as modelled"] = scaling_charts.modelled_chart(study)
    shares = {mode: efficiency(points, mode) for mode in MODES}
    curves = {"ideal speed-up": [(float(point.world_size), point.world_size / least.world_size) for point in weak]} | {
        mode: [(float(world), share * world / least.world_size) for world, share in found.items()]
        for mode, found in shares.items()
        if least.world_size in found  # else there is nothing to compare with
    }
    return {
        **head_of_page(
            f"{fastest_and_cheapest(points)} {study.verdict.removesuffix(study.withheld).rstrip()}",
            small_curves(curves),
            {
                "speed_up": round(most.samples_per_second / least.samples_per_second, 3),
                "samples_per_second": round(most.samples_per_second, 1),
                "usd_per_epoch": round_figures(most.usd_per_epoch),
            },
        ),
        "measured": best_rows(rows, SHOWN),
        **links(**addresses),
        "pictures": charts(pictures),
        "measured_file": table_file(folder, f"{name}.csv", rows),
        "study": dg.MetadataValue.path(f"{folder}/{name}.json"),
        "beyond_the_measured": study.withheld or scaling_charts.tell_error(study),
        **({} if study.error is None else {"model_error_percent": round(100 * study.error, 1)}),
        **({"no_strong_scaling_with_nodes": ", ".join(map(str, uneven))} if uneven else {}),
    }


def fastest_and_cheapest(points: Sequence[ScalingPoint]) -> str:
    """Return in a sentence on how many nodes most samples are trained in a second, and on how many an epoch costs
    least. Pure."""
    if len({point.nodes for point in points}) == 1:
        only = points[0]
        return f"On {_nodes(only)}: {only.samples_per_second:,.0f} samples/s, {dollars(only.usd_per_epoch)} an epoch."
    fast = max(points, key=lambda point: point.samples_per_second)
    cheap = min(points, key=lambda point: point.usd_per_epoch)
    said = (
        f"Fastest on {_nodes(fast)}: {fast.samples_per_second:,.0f} samples/s, {dollars(fast.usd_per_epoch)} an epoch; "
    )
    if cheap.nodes == fast.nodes:
        return f"{said}no other number of nodes is cheaper."
    return (
        f"{said}cheapest on {_nodes(cheap)}: {cheap.samples_per_second:,.0f} samples/s, "
        f"{dollars(cheap.usd_per_epoch)} an epoch."
    )


def row(point: ScalingPoint) -> dict[str, Any]:
    """Return a measured point as a table's row for people."""
    return {
        "scaling": point.mode,
        "nodes": point.nodes,
        "ranks": point.world_size,
        "global batch": point.global_batch,
        "ms a step": round(1000 * point.step_seconds, 2),
        "samples/s": round(point.samples_per_second, 1),
        "communication": f"{point.network_seconds / point.step_seconds:.1%}",
        "waiting": f"{point.waiting_seconds / point.step_seconds:.1%}",
        "communication / compute": round(point.communication_to_compute, 3),
        "$ an epoch": round(point.usd_per_epoch, 4),
    }


def _nodes(point: ScalingPoint) -> str:
    from dtrain_dagster.planning.projection import count_nodes

    return f"{count_nodes(point.nodes)} ({point.mode} scaling)"
