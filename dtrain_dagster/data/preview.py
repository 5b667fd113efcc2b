"""The preview of a dataset: a few rows, and one picture."""

from __future__ import annotations

import io
from typing import Any

from trainer.data.manifest import read_dataset_manifest
from trainer.documents.places import inside
from trainer.storage.open import open_storage

_MAX_LINES = 60
"""The most tickers that are drawn; of more, an even selection is taken."""
_POINTS = 500


def median_prices(path: str, points: int = 60) -> list[tuple[float, float]]:
    """Return (year, median price of the tickers then) at so many days, evenly spread over a file of prices."""
    import duckdb

    query = """
        with days as (select distinct "date" from read_parquet($path)),
             placed as (select "date", row_number() over (order by "date") - 1 as place from days),
             chosen as (select "date" from placed where place % greatest(1, (select count(*) from days) // $points) = 0)
        select year("date") + dayofyear("date") / 366.0, median(adj_close)
        from read_parquet($path) join chosen using ("date") group by "date" order by "date"
    """
    with duckdb.connect() as database:
        found = database.execute(query, {"path": path, "points": points}).fetchall()
    return [(float(year), float(price)) for year, price in found if price is not None]


def preview_rows(uri: str, count: int = 10) -> list[dict[str, Any]]:
    """Return the first ``count`` rows of the first shard, as text for a table."""
    import pyarrow.parquet as pq

    manifest = read_dataset_manifest(open_storage(uri))
    with open(inside(uri, manifest["shards"][0]["path"], f"a shard of {uri}"), "rb") as handle:
        return _first_rows(pq.ParquetFile(handle), count)


def _first_rows(file: Any, count: int) -> list[dict[str, Any]]:
    rows = next(file.iter_batches(batch_size=count)).to_pylist()
    return [
        {name: f"{value:.5g}" if isinstance(value, float) else str(value) for name, value in row.items()}
        for row in rows
    ]


def dataset_picture(uri: str) -> bytes:
    """Return an SVG of all tickers' prices on one scale (log of price over its first), splits shaded, masked days
    marked."""
    import numpy as np
    import pyarrow.parquet as pq
    from matplotlib import rc_context
    from matplotlib.dates import date2num
    from matplotlib.figure import Figure

    manifest = read_dataset_manifest(open_storage(uri))
    tickers = [ticker for shard in manifest["shards"] for ticker in shard["tickers"]]
    shown = set(tickers[:: -(-len(tickers) // _MAX_LINES)])
    figure = Figure(figsize=(9, 4), layout="constrained", facecolor="white")
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
            thin = slice(None, None, max(1, len(dates) // _POINTS))
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
