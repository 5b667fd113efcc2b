"""One check for any scoring endpoint: MLflow's own server and one that speaks as Azure ML, right answers and wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from requests.structures import CaseInsensitiveDict
from werkzeug import Request, Response

from dtrain_dagster.registry.endpoint import ScoringEndpoint, check_endpoint
from dtrain_dagster.registry.run_model import RunModel
from dtrain_dagster.registry.smoke_test import AnswerError, Candidate, read_answer
from harness import small_job
from tests.loopback import LoopbackServer
from trainer.model.saved_model import load_saved_model
from trainer.rundir import RunDir

ROW = {"mu": 0.1, "sigma": 0.2}


@pytest.mark.parametrize(
    "body",
    ['{"predictions": [{"mu": 0.1}, {"mu": 1}]}', '[{"mu": 0.1}, {"mu": 1}]', '"[{\\"mu\\": 0.1}, {\\"mu\\": 1}]"'],
    ids=["mlflow", "azure", "json in json"],
)
def test_rows_are_found_in_every_form_of_an_answer(body: str) -> None:
    [(name, values)] = read_answer(body.encode(), 2).items()
    assert (name, values.tolist()) == ("mu", [0.1, 1.0])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"error": 1}, "without a list of rows"),
        (3, "without a list of rows"),
        ([[0.1], [0.2]], "without a list of rows"),
        ([ROW], "2 windows with 1 rows"),
        ([ROW, {"mu": 1.0}], "row 1 with other columns than row 0"),
        ([ROW, {**ROW, "mu": None}], "'mu' of row 1 with 'None', which is not a finite number"),
        ([ROW, {**ROW, "mu": "0.1"}], "'mu' of row 1 with '0.1', which is not"),
        ([ROW, {**ROW, "mu": True}], "'mu' of row 1 with 'True', which is not"),
        ([ROW, {**ROW, "mu": 10**400}], "'mu' of row 1 with '10000"),
        ([ROW, {**ROW, "sigma": float("nan")}], "'sigma' of row 1 with 'nan', which is not"),
        ([{"\ud800": "x"}, {"\ud800": 1}], "of row 0 with 'x', which is not"),
        ([{f"column {row}-{number}": "x" for number in range(20_000)} for row in range(2)], "of row 0 with 'x'"),
    ],
)
def test_what_is_no_answer_is_shown(answer: Any, says: str) -> None:
    with pytest.raises(AnswerError, match=says) as refused:
        read_answer(json.dumps(answer), 2)
    assert len(str(refused.value)) < 500


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTRAIN_CACHE", str(path / "cache"))
        small_job.write_dataset(path / "dataset")
        yield path


@pytest.fixture(scope="module")
def run_dir(home: Path) -> str:
    return small_job.train(home, home / "dataset", "job-a", steps=10)


Answer = Callable[[np.ndarray, dict[str, str]], tuple[int, Any]]


@pytest.fixture
def azure_like(run_dir: str) -> Iterator[Callable[[Answer], str]]:
    """Starts servers that take ``input_data`` and answer with a bare list, as Azure ML's own scoring script does; what
    they answer is up to the test. Gives their addresses."""
    with ExitStack() as stack:

        def serve(answer: Answer) -> str:
            def hear(request: Request) -> Response:
                try:
                    windows = np.array(request.get_json()["input_data"], dtype=np.float32)
                    status, value = answer(windows, CaseInsensitiveDict(request.headers))
                except ValueError as error:
                    status, value = 400, {"error": {"code": "BadRequest", "message": str(error)}}
                return Response(json.dumps(value), status)

            return stack.enter_context(LoopbackServer(hear)).url_for("/score")

        yield serve


@pytest.fixture(scope="module")
def rows_of(run_dir: str) -> Iterator[Callable[[np.ndarray], list[dict[str, float]]]]:
    """What the job's model answers, row by row; here, since the code is ours. The check that is tested asks the model
    in a process of its own, once for windows that it asks again."""
    storage = RunDir(run_dir).storage
    saved = load_saved_model(lambda name: storage.read(f"model/{name}"))

    def rows(windows: np.ndarray) -> list[dict[str, float]]:
        columns = saved.predict(windows)
        return [{name: float(values[at]) for name, values in columns.items()} for at in range(len(windows))]

    asked: dict[bytes, dict[str, np.ndarray]] = {}
    real = RunModel.predict

    def predict(model: RunModel, windows: np.ndarray, *rest: Any) -> dict[str, np.ndarray]:
        key = windows.tobytes()
        if key not in asked:
            asked[key] = real(model, windows, *rest)
        return asked[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunModel, "predict", predict)
        yield rows


def with_token(url: str, **options: Any) -> ScoringEndpoint:
    return ScoringEndpoint(url=url, dialect="azureml", headers=lambda: {"Authorization": "Bearer good"}, **options)


@pytest.mark.slow
def test_an_endpoint_that_answers_as_azure_ml_passes(
    run_dir: str, azure_like: Callable[[Answer], str], rows_of: Callable[[np.ndarray], list[dict[str, float]]]
) -> None:
    def answer(windows: np.ndarray, headers: dict[str, str]) -> tuple[int, Any]:
        assert headers["azureml-model-deployment"] == "version-7"
        return (200, rows_of(windows)) if headers.get("Authorization") == "Bearer good" else (401, {"message": "who?"})

    endpoint = with_token(azure_like(answer), public_headers={"azureml-model-deployment": "version-7"})
    check = check_endpoint(endpoint, Candidate(run_dir))
    assert check.passed, check.message
    names = ["answers", "schema", "equality", "refusal", "authorisation"]
    assert [item.name for item in check.findings] == names
    measured = {"rows", "max_relative_difference", "max_relative_difference_to_training"}
    assert (check.measured["rows"], set(check.measured)) == (32, measured)
    assert set(check.figures()) == {"message", "url", *names, *measured}
    assert "good" not in repr(endpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "finding", "says"),
    [
        ("other numbers", "equality", "NOT with the model's numbers"),
        ("a column less", "schema", "answers with"),
        ("takes anything", "refusal", "a value that is not finite"),
        ("open to all", "authorisation", "status 200 without credentials"),
        ("an error", "answers", "status 500: no model was found"),
    ],
)
def test_an_endpoint_with_a_fault_does_not_pass(
    run_dir: str,
    azure_like: Callable[[Answer], str],
    rows_of: Callable[[np.ndarray], list[dict[str, float]]],
    fault: str,
    finding: str,
    says: str,
) -> None:
    def answer(windows: np.ndarray, headers: dict[str, str]) -> tuple[int, Any]:
        if fault != "open to all" and headers.get("Authorization") != "Bearer good":
            return 401, {"message": "who?"}
        if fault == "an error":
            return 500, {"error": {"message": "no model was found"}}
        if fault == "takes anything":
            try:
                return 200, rows_of(windows)
            except ValueError:
                return 200, [{"mu": 0.0}]
        rows = rows_of(windows)
        if fault == "other numbers":
            rows = [{**row, "sigma": row["sigma"] * 1.01} for row in rows]
        elif fault == "a column less":
            rows = [{name: value for name, value in row.items() if name != "nu"} for row in rows]
        return 200, rows

    check = check_endpoint(with_token(azure_like(answer)), Candidate(run_dir))
    failed = {item.name: item.message for item in check.findings if not item.passed}
    assert list(failed) == [finding], failed
    assert says in failed[finding]
    assert not check.passed
    assert says in check.message


@pytest.mark.slow
def test_nobody_there_is_a_finding(run_dir: str) -> None:
    check = check_endpoint(ScoringEndpoint(url="http://127.0.0.1:9/invocations"), Candidate(run_dir))
    assert [item.name for item in check.findings] == ["answers"]
    assert "cannot be reached" in check.message


@pytest.mark.slow
def test_the_command_says_what_it_found_and_exits_with_it(
    run_dir: str,
    azure_like: Callable[[Answer], str],
    rows_of: Callable[[np.ndarray], list[dict[str, float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from click.testing import CliRunner

    from dtrain_dagster.registry.endpoints import endpoint

    def answer(windows: np.ndarray, headers: dict[str, str]) -> tuple[int, Any]:
        return (200, rows_of(windows)) if headers.get("Authorization") == "Bearer a-good-token" else (401, {})

    monkeypatch.setenv("DTRAIN_TOKEN", "a-good-token")
    command = ["check", run_dir, "--url", azure_like(answer), "--dialect", "azureml"]
    good = CliRunner().invoke(endpoint, [*command, "--token", "env:DTRAIN_TOKEN"])
    assert (good.exit_code, good.output.count("ok  "), "a-good-token" in good.output) == (0, 5, False), good.output
    without = CliRunner().invoke(endpoint, command)
    assert (without.exit_code, "FAIL answers: status 401" in without.output) == (1, True)
    plain = CliRunner().invoke(endpoint, [*command, "--token", "a-good-token"])
    assert (plain.exit_code, "say where the token is" in plain.output) == (2, True)
    unset = CliRunner().invoke(endpoint, [*command, "--token", "env:DTRAIN_NO_TOKEN"])
    assert (unset.exit_code, "env:DTRAIN_NO_TOKEN is empty or not set" in unset.output) == (2, True)
