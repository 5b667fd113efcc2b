"""MLflow's own scoring application for a model in a folder, served in this process: a process of its own takes seconds
to import MLflow and torch. `test_registry` asks a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain_dagster.registry.endpoint import ScoringEndpoint
from tests.abuse.websites import served


@contextmanager
def scoring_here(folder: Path) -> Iterator[ScoringEndpoint]:
    import mlflow.pyfunc
    from mlflow.pyfunc import scoring_server

    with served(scoring_server.init(mlflow.pyfunc.load_model(str(folder)))) as port:
        yield ScoringEndpoint(url=f"http://127.0.0.1:{port}/invocations", is_local=True)
