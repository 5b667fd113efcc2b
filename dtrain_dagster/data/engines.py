"""Engines of data: who sorts the rows of prices, and computes what a dataset holds of each ticker.

An engine decides where something is computed, never what: prices and datasets have the same bytes with each. What is
computed belongs in `dtrain_dagster.data.ticker_rows`. What is read and written stays with this process, so workers of
Ray need no storage that they share with it, but the same versions of the packages that compute. Starting and ending a
cluster is Ray's own ``ray start`` and ``ray stop``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain_dagster.data.errors import DataEngineError

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa

Result = TypeVar("Result")
ORDER = ("ticker", "date", "line")
"""The columns that rows of prices are sorted by; ``line`` counts the rows of the file, and is in each row another."""
_BATCH_ROWS = 1 << 16
BLOCK_ROWS = 1 << 17
"""Rows of a block that Ray sorts: a few megabytes."""
TASK_ROWS = 1 << 15
"""Rows of prices from which on tickers make a task: below, starting it would take longer than its work."""
AHEAD = 2
"""Tasks for each CPU that are under way or done and not yet fetched, so that memory is bounded."""
RETRIES = 4
"""How often a task is run again whose worker died."""
CONNECT_SECONDS = 10.0
_PACKAGES = ("numpy", "pandas", "pyarrow")


class DataEngine:
    """Where rows of prices are sorted and tickers are computed: here, all in this process. The database sorts, and
    spills to disk."""

    def sorted_rows(self, database: duckdb.DuckDBPyConnection, select: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
        """Return the schema of the rows of a query, and the rows in the order of `ORDER`.

        Raise `OSError` where a disk is full, `DataEngineError` where the engine cannot go on.
        """
        import pyarrow as pa

        reader: Any = database.execute(f"{select} ORDER BY {', '.join(ORDER)}").to_arrow_reader(_BATCH_ROWS)
        return reader.schema, (pa.Table.from_batches([batch]) for batch in reader)

    def map_tickers(
        self, frames: Iterator[tuple[str, pd.DataFrame]], work: Callable[[pd.DataFrame], Result]
    ) -> Iterator[Result]:
        """Yield what ``work``, which can be pickled, returns for each ticker, in the order of the tickers. Raise what
        it raises, `OSError` where a disk is full, `DataEngineError` where the engine cannot go on."""
        for _, frame in frames:
            yield work(frame)


DUCKDB = DataEngine()
"""The engine that is used unless another is asked for."""


class RayEngine(DataEngine):
    """Rows are sorted by Ray Data, tickers are computed by tasks; see `opened_ray_engine`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._ray: Any = None
        self._is_own = False  # whether the connection was made here

    def sorted_rows(self, database: duckdb.DuckDBPyConnection, select: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
        """See `DataEngine`: the database reads and checks."""
        reader: Any = database.execute(select).to_arrow_reader(BLOCK_ROWS)
        return reader.schema, self._sorted(reader)

    def _sorted(self, reader: Any) -> Iterator[pa.Table]:
        import pyarrow as pa

        ray = self._connected()
        from ray.data import DataContext, from_arrow_refs

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        with _told_plainly(ray):
            blocks = [ray.put(pa.Table.from_batches([batch])) for batch in reader if len(batch)]
            if not blocks:
                return
            rows: Any = from_arrow_refs(blocks).sort(list(ORDER))
            for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
                yield table.select(reader.schema.names).cast(reader.schema)

    def map_tickers(
        self, frames: Iterator[tuple[str, pd.DataFrame]], work: Callable[[pd.DataFrame], Result]
    ) -> Iterator[Result]:
        """See `DataEngine`. A task that lost its worker is run again."""
        ray = self._connected()
        compute = ray.remote(num_cpus=1, max_retries=RETRIES)(_compute)
        with _told_plainly(ray):
            shared = ray.put(work)
            most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            under_way: deque[Any] = deque()
            for tickers in _in_tasks(frames):
                if len(under_way) == most:
                    yield from ray.get(under_way.popleft())
                under_way.append(compute.remote(shared, tickers))
            while under_way:
                yield from ray.get(under_way.popleft())

    def close(self) -> None:
        """Close the connection, if it was made here."""
        if self._is_own:
            self._ray.shutdown()

    def _connected(self) -> Any:
        if self._ray is None:
            os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")  # before the import, which reads it
            try:
                import ray
            except ImportError as error:
                raise DataEngineError(
                    f"data_engine=ray: Ray cannot be imported ({error}): install dtrain with its extra `ray`"
                ) from None
            if not ray.is_initialized():
                try:
                    if self.address != "auto":  # Ray itself takes minutes to find out that nobody is there
                        host, _, port = self.address.rpartition(":")
                        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
                    ray.init(address=self.address, namespace="dtrain", log_to_driver=False, logging_level=logging.ERROR)
                except Exception as error:  # of any kind: Ray says with a bare one that it did not answer in time
                    raise DataEngineError(
                        f"data_engine=ray: no Ray answers at DTRAIN_RAY_ADDRESS={self.address}: "
                        f"{_first_line(error)}; this machine must be a node of the cluster: `ray start --head` makes "
                        "one here, `ray start --address=…` joins one"
                    ) from error
                self._is_own = True
            self._ray = ray
            with _told_plainly(ray):
                there = ray.get(ray.remote(num_cpus=1)(computing_versions).remote())
            refuse_other_versions(computing_versions(), there)
        return self._ray


@contextmanager
def opened_ray_engine(address: str) -> Iterator[RayEngine]:
    """Yield the engine on the cluster at this address (``host:port`` of its head, or ``auto`` for the one that this
    machine belongs to). It is connected to when it is first needed: not for data that is there already. Raise
    `DataEngineError` for an address of Ray Client."""
    if address.startswith("ray://"):
        raise DataEngineError(
            f"DTRAIN_RAY_ADDRESS={address!r} is an address of Ray Client, which moves rows through one process: for "
            "data give host:port of the head, on a machine of the cluster"
        )
    engine = RayEngine(address)
    try:
        yield engine
    finally:
        engine.close()


def computing_versions() -> dict[str, str]:
    """Return the versions of what computes features here: packages, and a digest of this project's modules."""
    modules = hashlib.sha256()
    for name in ("features", "ticker_rows", "validation"):
        modules.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return {**{name: version(name) for name in _PACKAGES}, "dtrain": modules.hexdigest()[:8]}


def refuse_other_versions(here: dict[str, str], there: dict[str, str]) -> None:
    """Raise `DataEngineError` where they differ: the rows of a dataset would depend on who computed them. Pure."""
    others = [f"{name} {there.get(name)} (here {mine})" for name, mine in here.items() if there.get(name) != mine]
    if others:
        raise DataEngineError(
            f"workers of the Ray at DTRAIN_RAY_ADDRESS have {', '.join(others)}: install the same versions there"
        )


def _compute(work: Callable[[pd.DataFrame], Result], frames: list[pd.DataFrame]) -> list[Result]:
    return [work(frame) for frame in frames]


def _in_tasks(frames: Iterator[tuple[str, pd.DataFrame]]) -> Iterator[list[pd.DataFrame]]:
    """Yield consecutive tickers' rows, at least `TASK_ROWS` together."""
    held: list[pd.DataFrame] = []
    for _, frame in frames:
        held.append(frame)
        if sum(map(len, held)) >= TASK_ROWS:
            yield held
            held = []
    if held:
        yield held


@contextmanager
def _told_plainly(ray: Any) -> Iterator[None]:
    """Raise what a task raised, as it raised it; `OSError` for a full disk; `DataEngineError` for other ends of Ray."""
    found = ray.exceptions
    full = (found.OutOfDiskError, found.ObjectStoreFullError)
    try:
        yield
    except found.RayError as error:
        cause = getattr(error, "cause", None) if isinstance(error, found.RayTaskError) else error
        if isinstance(cause, full) or "OutOfDiskError" in str(error) or "ObjectStoreFullError" in str(error):
            raise OSError(f"no room for what Ray spills on its machines: {_first_line(cause or error)}") from error
        if cause is None or isinstance(cause, found.RayError):
            raise DataEngineError(f"data_engine=ray: {_first_line(cause or error)}") from error
        raise cause from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
