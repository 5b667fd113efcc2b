"""The engine of data on Ray: rows are sorted by Ray Data, tickers are computed by tasks.

Only where things are computed is decided here; what is read and written stays with this process, so workers need no
storage that they share with it, but the same versions of the packages that compute. Starting Ray belongs in
`dtrain_dagster.support.ray_session`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain_dagster.data.disk_watch import is_too_full, says_full, watched
from dtrain_dagster.data.engines import ORDER
from dtrain_dagster.data.errors import DataEngineError
from dtrain_dagster.support.building import building_in
from dtrain_dagster.support.ray_session import RayError, RayPlace, ray_session

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa

Result = TypeVar("Result")
BLOCK_ROWS = 1 << 17
"""Rows of a block that is sorted: a few megabytes."""
TASK_ROWS = 1 << 15
"""Rows of prices from which on tickers make a task: below, starting it would take longer than its work."""
AHEAD = 2
"""Tasks for each CPU that are under way or done and not yet fetched, so that memory is bounded."""
RETRIES = 4
"""How often a task is run again whose worker died."""
_PACKAGES = ("numpy", "pandas", "pyarrow")


@dataclass(slots=True)
class RayEngine:
    """See `opened_ray_engine`."""

    place: RayPlace
    spill: Path
    stack: ExitStack
    name: str = "ray"
    _ray: Any = field(default=None)

    def sorted_rows(self, database: duckdb.DuckDBPyConnection, select: str) -> tuple[pa.Schema, Iterator[pa.Table]]:
        """See `dtrain_dagster.data.engines.DataEngine`. The database reads and checks; it neither sorts nor spills."""
        reader: Any = database.execute(select).to_arrow_reader(BLOCK_ROWS)
        return reader.schema, self._watched(lambda ray: self._sorted(ray, reader))

    def _sorted(self, ray: Any, reader: Any) -> Iterator[pa.Table]:
        import pyarrow as pa
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        with _told_plainly(ray, self.spill):
            blocks = [ray.put(pa.Table.from_batches([batch])) for batch in reader if len(batch)]
            if not blocks:
                return
            rows = ray.data.from_arrow_refs(blocks).sort(list(ORDER))
            for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
                yield table.select(reader.schema.names).cast(reader.schema)

    def map_tickers(
        self, frames: Iterator[tuple[str, pd.DataFrame]], work: Callable[[pd.DataFrame], Result]
    ) -> Iterator[Result]:
        """See `dtrain_dagster.data.engines.DataEngine`. A task that lost its worker is run again."""
        return self._watched(lambda ray: self._computed(ray, frames, work))

    def _computed(
        self, ray: Any, frames: Iterator[tuple[str, pd.DataFrame]], work: Callable[[pd.DataFrame], Result]
    ) -> Iterator[Result]:
        compute = ray.remote(num_cpus=1, max_retries=RETRIES)(_compute)
        with _told_plainly(ray, self.spill):
            shared = ray.put(work)
            most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            under_way: deque[Any] = deque()
            for tickers in _in_tasks(frames):
                if len(under_way) == most:
                    yield from ray.get(under_way.popleft())
                under_way.append(compute.remote(shared, tickers))
            while under_way:
                yield from ray.get(under_way.popleft())

    def _watched(self, give: Callable[[Any], Iterator[Result]]) -> Iterator[Result]:
        """Yield what Ray gives. Raise OSError where it spills on this machine and the disk is full."""
        ray = self._connected()
        if self.place.address:
            yield from give(ray)  # it spills on its own machines
            return
        connected = ray.init(ignore_reinit_error=True)  # it says where this process is connected, and changes nothing
        logs = Path(connected.address_info["session_dir"]) / "logs"

        def is_full() -> bool:
            return says_full(logs) or is_too_full(self.spill)

        yield from watched(give(ray), is_full, lambda: _no_room(self.spill, "the disk is full"))

    def _connected(self) -> Any:
        if self._ray is None:
            try:
                self._ray = self.stack.enter_context(ray_session(self.place, self.spill))
            except RayError as error:
                raise DataEngineError(f"DTRAIN_DATA_ENGINE=ray: {error}") from error
            if self.place.address:
                with _told_plainly(self._ray, self.spill):
                    there = self._ray.get(self._ray.remote(num_cpus=1)(_versions).remote())
                refuse_other_versions(computing_versions(), there)
        return self._ray


@contextmanager
def opened_ray_engine(place: RayPlace, storage_uri: str) -> Iterator[RayEngine]:
    """Yield the engine. Ray is started, or connected to, when it is first needed: not for data that is there already.
    At the end it is ended, and what it spilled below the storage folder is removed."""
    with ExitStack() as stack:
        spill = stack.enter_context(building_in(Path(storage_uri) / "spill"))
        yield RayEngine(place, spill, stack)


@cache
def computing_versions() -> dict[str, str]:
    """Return the versions of what computes features here: packages, and a digest of this project's modules."""
    modules = hashlib.sha256()
    for name in ("features", "ticker_rows", "validation", "shard_file"):
        modules.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return {**{name: version(name) for name in _PACKAGES}, "dtrain": modules.hexdigest()[:8]}


def _versions() -> dict[str, str]:
    return computing_versions()


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
def _told_plainly(ray: Any, spill: Path) -> Iterator[None]:
    """Raise what a task raised, as it raised it; `OSError` for a full disk; `DataEngineError` for other ends of Ray."""
    found = ray.exceptions
    try:
        yield
    except found.RayTaskError as error:
        full = _full_disk(error)
        if full:
            raise _no_room(spill, full) from error
        if isinstance(error.cause, found.RayError):
            raise DataEngineError(f"DTRAIN_DATA_ENGINE=ray: {_first_line(error.cause)}") from error
        raise error.cause from error
    except found.RayError as error:
        if isinstance(error, (found.OutOfDiskError, found.ObjectStoreFullError)):
            raise _no_room(spill, _first_line(error)) from error
        raise DataEngineError(f"DTRAIN_DATA_ENGINE=ray: {_first_line(error)}") from error


def _no_room(spill: Path, why: str) -> OSError:
    return OSError(f"no room for what Ray spills under {spill.parent}: {why}")


def _full_disk(error: BaseException) -> str:
    text = str(error)
    return "the disk is full" if "OutOfDiskError" in text or "ObjectStoreFullError" in text else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
