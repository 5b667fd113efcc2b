"""A finished job's model that is to be registered, and the right answers of a server of it: real samples of the test
split, their answers, and the comparison. No network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.run_model import ASK_SECONDS, RunModel, load_run_model, ordered_job
from trainer.config import JobConfig
from trainer.data.sampler import spread_positions
from trainer.documents.arrays import ArraysError, read_arrays
from trainer.errors import DamagedError
from trainer.model.raw_rows import raw_columns
from trainer.rundir import PREDICTIONS, RunDir
from trainer.spec import REGRESSION, DataSpec, RowSpec

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from trainer.data.row_data import RowData
    from trainer.data.shards import DataShardManager

SAME_WEIGHTS_TOLERANCE = 1e-5
"""The largest allowed difference between the server and the run directory's weights on this machine, as a fraction of a
column's root mean square: the same float32 arithmetic in batches of another size."""
ROWS = 32
"""The most samples that a server is asked for."""
ROWS_PER_SECOND = 500
"""Rows that a model answers in a second at least."""
MOST_VALUES = 1 << 25
"""The most numbers that are asked about at once."""
MOST_BYTES = 1 << 30
"""The greatest size of ``predictions.npz``."""
TRAINING_TOLERANCE = 1e-3
"""The same bound for training's own predictions, perhaps made on a GPU with other kernels."""


class AnswerError(ValueError):
    """A served answer in the wrong form. The message continues ``the scoring server …``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Windows of the test split, spread over it, with the answers that a server of the model must give."""

    windows: NDArray[Any] | pd.DataFrame
    """Raw features, (n, window, features) float32, or rows of a table, as `as_registered` gives them."""
    expected: Mapping[str, NDArray[np.float64]]
    """Column → (n,), from the run directory's weights, computed here."""
    trained: Mapping[str, NDArray[Any]]
    """The columns that training itself wrote for these windows; empty for a loss that gives raw outputs."""
    units: Mapping[str, float] = field(default_factory=dict)
    """What differences of a column are measured by, where that is not its root mean square."""
    takes_infinite: bool = False
    """Whether the model takes values that are not finite."""


@dataclass
class Candidate:
    """The model of a finished job: read once, checked, and asked once for the answers that a server of it must give.

    ``order``: see `run_model.load_run_model`, which raises `RunModelError` where it is first needed; ``cache_dir``: the
    node-local cache of shards. Raise `AnswerError` where the run directory's predictions are of another dataset, or
    unreadable, and `DatasetError` where the data cannot be read.
    """

    run_dir: str
    order: Order | None = None
    cache_dir: str | None = None

    @property
    def rundir(self) -> RunDir:
        """Its run directory."""
        return RunDir(self.run_dir)

    @property
    def job(self) -> JobConfig:
        """The job as it was ordered."""
        return ordered_job(self.rundir, self.order)

    @cached_property
    def own(self) -> RunModel:
        """The model itself."""
        return load_run_model(self.rundir, self.order)

    @cached_property
    def data(self) -> Any:
        """The data of a model that is no script's: a `RowData`, or a `DataShardManager`."""
        from trainer.data.row_data import RowData  # not above: torch
        from trainer.data.shards import DataShardManager

        kind = RowData if isinstance(self.own.spec, RowSpec) else DataShardManager
        return kind(self.own.job.dataset.uri, self.cache_dir, self.own.spec.dataset_id)

    @cached_property
    def forecast(self) -> NDArray[np.float64] | None:
        """What a model of rows forecasts for those that are judged (`spread_positions`), see `answers`."""
        positions = spread_positions(self.data.count("test"))
        seconds = ASK_SECONDS + len(positions) / ROWS_PER_SECOND
        return answers(partial(self.own.predict, seconds=seconds), self.data, positions)

    @cached_property
    def sample(self) -> Sample:
        """`ROWS` samples at most, of a script all that lie beside its program, with their answers."""
        import numpy as np

        own, found = self.own, self.own.found
        if found is not None:
            trained = dict(zip(found.columns, found.outputs.T, strict=True))
            known = {name: values for name, values in trained.items() if np.isfinite(values).all()}
            return Sample(windows=found.inputs, expected=own.predict(found.inputs), trained=known, takes_infinite=True)
        judged = spread_positions(self.data.count("test"))
        positions = np.unique(np.linspace(0, len(judged) - 1, min(ROWS, len(judged))).astype(np.int64))
        windows = inputs_at(self.data, judged[positions])
        expected = own.predict(windows)
        trained = stored_predictions(self.rundir, self.data, ("mu", "sigma", "nu"))
        renamed = {"prediction" if name == "mu" and "mu" not in expected else name: trained[name] for name in trained}
        known = {name: renamed[name][positions] for name in expected if name in renamed}
        return Sample(
            windows=as_registered(own.spec, windows),
            expected=expected,
            trained={name: values for name, values in known.items() if np.isfinite(values).all()},
            units={"prediction": own.spec.target_std} if getattr(own.spec, "task", "") == REGRESSION else {},
        )


def answers(
    predict: Callable[[NDArray[np.float64]], Mapping[str, NDArray[np.float64]]],
    data: RowData,
    positions: NDArray[np.int64],
) -> NDArray[np.float64] | None:
    """Return what a model forecasts for rows of the test split: numbers (n,), or the probabilities of classes (n, C);
    None for a model whose loss knows neither."""
    import numpy as np

    classes = len(data.spec.classes)
    names = [f"probability_{code}" for code in range(classes)] if classes else ["prediction"]
    size = max(1, MOST_VALUES // len(data.spec.features))
    parts = []
    for start in range(0, len(positions), size):
        columns = predict(data.original("test", positions[start : start + size]))
        if any(name not in columns for name in names):
            return None
        parts.append(np.column_stack([columns[name] for name in names]))
    forecast = np.concatenate(parts)
    return forecast if classes else forecast[:, 0]


def inputs_at(data: RowData | DataShardManager, positions: NDArray[np.int64]) -> NDArray[Any]:
    """Return the samples at these positions of the test split, 0 … count - 1: windows float32, or rows float64 as the
    weights of a run directory take them."""
    from trainer.data.shards import DataShardManager

    if isinstance(data, DataShardManager):
        return data.gather(data.end_rows("test", positions))[0].numpy()
    return data.original("test", positions)


def as_registered(spec: DataSpec | RowSpec, samples: NDArray[Any]) -> NDArray[Any] | pd.DataFrame:
    """Return samples of `inputs_at` as a registered model takes them: rows of a table as people have them, by the names
    of its columns; windows as they are."""
    import pandas as pd

    if not isinstance(spec, RowSpec):
        return samples
    return pd.DataFrame(raw_columns(spec, samples))


def stored_predictions(
    rundir: RunDir, data: RowData | DataShardManager, names: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return columns of ``predictions.npz``, with a value for each of the samples that were judged
    (`spread_positions`). Raise `AnswerError` for predictions of other samples, and as `read_predictions` does."""
    import numpy as np

    from trainer.data.shards import DataShardManager

    rows = spread_positions(data.count("test"))
    if isinstance(data, DataShardManager):
        rows = data.end_rows("test", rows)
    stored = read_predictions(rundir, ("row", *names))
    if not np.array_equal(stored.pop("row"), rows):
        raise AnswerError(
            f"cannot be judged: {rundir.uri}/{PREDICTIONS} is not of this dataset's test split: train again"
        )
    return stored


def read_predictions(rundir: RunDir, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return columns of a run directory's ``predictions.npz``, all of one length. Raise `AnswerError` for a file of
    another form."""

    try:
        found = read_arrays(rundir.storage.read_bounded(PREDICTIONS, MOST_BYTES), names)
    except DamagedError as error:
        raise AnswerError(f"cannot be judged: {error.where}: {error.what}") from None
    except (ArraysError, FileNotFoundError) as error:
        raise AnswerError(f"cannot be judged: {rundir.uri}/{PREDICTIONS} {error}") from None
    if len({values.shape for values in found.values()}) != 1 or next(iter(found.values())).ndim != 1:
        raise AnswerError(f"cannot be judged: {rundir.uri}/{PREDICTIONS} holds columns of different lengths")
    return found


def read_answer(body: bytes | str, count: int) -> dict[str, NDArray[np.float64]]:
    """Return column → (count,) of an answer: ``{"predictions": […]}`` of an MLflow server, or the bare list of Azure
    ML's, which comes as a JSON text inside JSON from some scoring scripts. Raise `AnswerError` for anything else but
    ``count`` rows of the same named, finite numbers."""
    import numpy as np

    try:
        value = json.loads(body)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise AnswerError(f"answered with something that is not JSON: {_shown(body)}") from None
    rows = value.get("predictions") if isinstance(value, Mapping) else value
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise AnswerError(f"answered without a list of rows with named numbers: {_shown(body)}")
    if len(rows) != count:
        raise AnswerError(f"answered {count} windows with {len(rows)} rows")
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise AnswerError(f"answered row {number} with other columns than row 0: {_shown(list(row))}")
        for name, cell in row.items():
            if type(cell) not in (int, float) or not abs(cell) <= sys.float_info.max:
                raise AnswerError(
                    f"answered {_shown(name)} of row {number} with {_shown(cell)}, which is not a finite number"
                )
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


def compare_answers(sample: Sample, served: Mapping[str, NDArray[np.float64]]) -> tuple[float, float]:
    """Return the largest differences of served columns from those of the run directory's weights, and from those that
    training itself wrote (0 where it wrote none): as fractions of each column's root mean square. Raise `AnswerError`
    for other columns."""
    expected = sample.expected
    if set(served) != set(expected):
        raise AnswerError(f"answers with {_shown(sorted(served))}, the job's model gives {sorted(expected)}")
    to_weights, to_training = (
        _relative_difference(served, known, sample.units) for known in (expected, sample.trained)
    )
    return to_weights, to_training


def _relative_difference(
    served: Mapping[str, NDArray], expected: Mapping[str, NDArray], units: Mapping[str, float]
) -> float:
    """Return the largest difference in any column of ``expected``, as a fraction of that column's root mean square, or
    of its unit.

    ``mu`` is measured by ``sigma``, where there is one: it is close to zero and in the same unit.
    """
    import numpy as np

    worst = 0.0
    for name, values in expected.items():
        size = units.get(name) or np.sqrt(np.mean(expected.get("sigma", values) ** 2 if name == "mu" else values**2))
        worst = max(worst, float(np.abs(served[name] - values).max() / max(size, 1e-12)))
    return worst


def _shown(value: Any) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return repr(text if len(text) <= 200 else text[:199] + "…")
