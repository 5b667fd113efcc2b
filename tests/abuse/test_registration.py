"""What registration reads, asks and serves: files of nodes that are no files, runs of others, and a model's own code in
a server, which may say what it likes for as long as it likes."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry import endpoint, run_model
from dtrain_dagster.registry.endpoint import ScoringEndpoint, ServingError
from dtrain_dagster.registry.run_model import RunModelError, load_run_model
from dtrain_dagster.registry.smoke_test import AnswerError, read_answer, read_predictions
from dtrain_dagster.registry.versions import open_client, tracking_run
from harness.tables import copy_tables
from tests.abuse.hostile_nodes import Marker, Place
from trainer.observability.mlflow_sink import ensure_experiment
from trainer.rundir import RunDir


class TestFiles:
    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("put", ["pipe", "device", "link", "folder"])
    @pytest.mark.parametrize("name", ["model/model.json", "model/weights.pt", "predictions.npz"])
    def test_what_is_no_file_is_not_waited_for(self, place: Place, name: str, put: str) -> None:
        run_dir = place.fresh(f"{name.replace('/', '-')}-{put}")
        path = Path(run_dir, name)
        path.rename(path.with_name("aside"))
        {
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "link": lambda: path.symlink_to(path.with_name("aside")),
            "folder": path.mkdir,
        }[put]()
        if name == "predictions.npz":
            with pytest.raises(AnswerError, match=rf"{name}: an? [a-z ]+ is in its place"):
                read_predictions(RunDir(run_dir), ("row", "mu"))
        else:
            with pytest.raises(RunModelError, match=rf"{name}: an? [a-z ]+ is in its place"):
                load_run_model(RunDir(run_dir), Order(job=RunDir(place.good).read_job()))

    def test_predictions_that_hold_objects_are_not_unpickled(self, tmp_path: Path) -> None:
        objects = np.array([Marker(tmp_path / "marker")], dtype=object)
        np.savez(tmp_path / "predictions.npz", row=objects, mu=np.zeros(1))
        with pytest.raises(AnswerError, match=r"Object arrays cannot be loaded"):
            read_predictions(RunDir(str(tmp_path)), ("row", "mu"))
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("said", [[1.0], {"members": "3"}, {"scale_factor": math.nan}])
    def test_a_correction_that_is_no_set_of_numbers_is_refused(self, place: Place, said: Any) -> None:
        run_dir = place.fresh(f"correction-{type(said).__name__}-{len(str(said))}")
        path = Path(run_dir, "model/model.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "correction": said}))
        with pytest.raises(RunModelError, match=r"says correction = .* finite numbers"):
            load_run_model(RunDir(run_dir), Order(job=RunDir(place.good).read_job()))

    def test_weights_are_never_in_memory_as_a_whole(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_dir = place.fresh("large")
        order = Order(job=RunDir(place.good).read_job())
        small = load_run_model(RunDir(run_dir), order)
        small.write(tmp_path)
        assert (tmp_path / "weights.pt").read_bytes() == Path(run_dir, "model/weights.pt").read_bytes()
        with open(Path(run_dir, "model/weights.pt"), "wb") as file:
            file.truncate(64 << 20)
        tracemalloc.start()
        with pytest.raises(RunModelError, match="it is damaged or was changed"):
            load_run_model(RunDir(run_dir), order)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()
        monkeypatch.setitem(run_model.MOST_BYTES, "weights.pt", 1 << 20)
        with pytest.raises(RunModelError, match=r"weights\.pt: it has [0-9,]+ bytes, and such a file has at most"):
            load_run_model(RunDir(run_dir), order)

    @pytest.mark.parametrize("text", ["[]", "{}", "7", '{"dataset_id": "x"}', "[" * 5000])
    def test_a_manifest_that_is_none_is_refused_in_words(self, place: Place, tmp_path: Path, text: str) -> None:
        run_dir, job = place.fresh(f"manifest-{len(text)}-{text[:1]}{text[1:2] == ']'}"), RunDir(place.good).read_job()
        (tmp_path / "manifest.json").write_text(text)
        order = replace(job, dataset=replace(job.dataset, uri=str(tmp_path), dataset_id=None))
        with pytest.raises(RunModelError, match=r"manifest\.json|schema version"):
            load_run_model(RunDir(run_dir), Order(job=order))


def test_the_run_of_another_job_is_not_written_over(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    copy_tables(tmp_path / "mlflow.db")
    client = open_client(uri)
    others = client.create_run(client.create_experiment("e"), tags={"job_id": "theirs"}).info.run_id
    for number, said in enumerate((others, "../../x", "x" * 400, "0" * 32)):
        rundir = RunDir(str(tmp_path / f"job-{number}"))
        rundir.write_json("tracking.json", {"mlflow_run_id": said})
        taken = tracking_run(client, rundir, uri, "e", f"mine-{number}")
        assert taken != said
        assert client.get_run(taken).data.tags["job_id"] == f"mine-{number}"
        rundir.write_json("tracking.json", {"mlflow_run_id": taken})
        assert tracking_run(client, rundir, uri, "e", f"mine-{number}") == taken


def test_an_experiment_that_another_makes_at_the_same_time_is_taken(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    copy_tables(tmp_path / "mlflow.db")
    client = open_client(uri)
    theirs, get = client.create_experiment("e"), client.get_experiment_by_name
    asked = Mock(side_effect=lambda name: None if asked.call_count == 1 else get(name))
    told = Mock(side_effect=[MlflowException("UNIQUE constraint failed"), None, None])
    with patch.multiple(client, get_experiment_by_name=asked, set_experiment_tag=told):
        assert ensure_experiment(client, "e", uri) == theirs
    assert told.call_args_list[0] == told.call_args_list[1]


def test_of_two_runs_made_at_once_the_older_one_stays(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    copy_tables(tmp_path / "mlflow.db")
    client = open_client(uri)
    experiment, search = client.create_experiment("e"), client.search_runs
    theirs = client.create_run(experiment, start_time=1, tags={"job_id": "mine"}).info.run_id
    asked = Mock(side_effect=lambda *given: [] if asked.call_count == 1 else search(*given))
    with patch.object(client, "search_runs", asked):
        assert tracking_run(client, RunDir(str(tmp_path / "job")), uri, "e", "mine") == theirs
    assert [run.info.run_id for run in search([experiment])] == [theirs]


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Starts a server that answers everybody with what a function sends; its port."""
    listeners: list[socket.socket] = []

    def start(say: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            try:
                connection = listener.accept()[0]
                with connection:
                    connection.recv(1 << 16)
                    say(connection)
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.close()


class TestAnswers:
    @pytest.mark.timeout(30)
    def test_one_that_never_ends_is_given_up(self, answering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(endpoint, "ANSWER_BYTES", 1 << 20)

        def slowly(connection: socket.socket) -> None:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            wait = threading.Event()
            while not wait.wait(0.05):
                connection.sendall(b" ")

        def much(connection: socket.socket) -> None:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(b" " * (1 << 16))

        def asked(say: Callable[[socket.socket], None], seconds: float) -> ScoringEndpoint:
            return ScoringEndpoint(url=f"http://127.0.0.1:{answering(say)}", timeout_seconds=seconds, is_local=True)

        with pytest.raises(ServingError, match=r"did not end its answer within 0\.5 s"):
            asked(slowly, 0.5).post(np.zeros(1))
        with pytest.raises(ServingError, match="more than 1,048,576 bytes"):
            asked(much, 10.0).post(np.zeros(1))

    @pytest.mark.parametrize(
        "body", [b"<html>", b"7", b"{}", b'{"predictions": 7}', b"[" * 100_000, b"\xff", b'"\\ud800"']
    )
    def test_one_that_is_none_is_a_failed_check(self, body: bytes) -> None:
        with pytest.raises(AnswerError):
            read_answer(body, 1)
