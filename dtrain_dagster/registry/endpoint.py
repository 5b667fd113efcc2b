"""The check that a scoring endpoint is compatible with the model that a job trained.

One check serves any scoring address: MLflow's own server, which is started here, a managed online endpoint of Azure ML,
any server with one of their protocols. It sends real windows of the job's test split and judges the answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import psutil

from dtrain_dagster.clusters.azure_ml.client import words
from dtrain_dagster.registry.smoke_test import (
    TRAINING_TOLERANCE,
    AnswerError,
    Candidate,
    Sample,
    compare_answers,
    read_answer,
)
from dtrain_dagster.support.secrets import IDENTITY, check_token, redact, resolve
from trainer.isolation.runner import clean_environment, kill_session, limit_command
from trainer.runtime.scratch import scratch_folder
from trainer.secrets.azure_token import credential

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    Samples: TypeAlias = NDArray[Any] | pd.DataFrame
    """Windows, or rows of a table, as `smoke_test.as_registered` gives them."""


ENDPOINT_TOLERANCE = 1e-4
"""The largest allowed difference from the job's weights computed here, as a fraction of a column's root mean square:
float32 on another processor, with other kernels."""
ANSWER_BYTES = 64 << 20
"""The greatest size of an answer: the server may run a model's own code, which may never end it."""
SCORING_SCOPE = "https://ml.azure.com/.default"
_INFINITE = "a value that is not finite"


class ServingError(RuntimeError):
    """A scoring server's failure to start or to answer. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringEndpoint:
    """An address that takes windows and returns forecasts."""

    url: str = field(repr=False)
    """The complete address, ``https://…/score`` or ``http://…/invocations``."""
    dialect: Literal["mlflow", "azureml"] = "mlflow"
    """The protocol: a request's content is ``inputs``, or ``input_data`` where Azure ML made the scoring script
    itself."""
    headers: Callable[[], Mapping[str, str]] = field(default=dict, repr=False)
    """A function called for each request, since tokens expire: authorisation, and the deployment that is meant."""
    public_headers: Mapping[str, str] = field(default_factory=dict)
    """The headers of every request, also of one without authorisation."""
    timeout_seconds: float = 60.0
    """The longest time of an answer."""
    is_local: bool = False
    """Whether it was started here, see `scoring_server`."""

    def post(self, windows: Samples, authorised: bool = True) -> tuple[int, bytes]:
        """Send one request; return (status, body). Raise `ServingError` where nothing answers, and for an answer that
        does not end in time or is too long."""
        import requests
        from urllib3.exceptions import HTTPError

        headers = {"Content-Type": "application/json", **self.public_headers, **(self.headers() if authorised else {})}
        deadline, body = time.monotonic() + self.timeout_seconds, b""
        try:
            with requests.Session() as session:
                session.trust_env = not self.is_local  # a proxy of the environment is not for this machine
                content = json.dumps(_payload(windows, self.dialect), default=_text_of_date)
                with session.post(
                    self.url, content, headers=headers, timeout=self.timeout_seconds, stream=True
                ) as answer:
                    while piece := answer.raw.read1(1 << 16, decode_content=True):
                        body += piece
                        if len(body) > ANSWER_BYTES:
                            raise ServingError(f"{redact(self.url)} answered with more than {ANSWER_BYTES:,} bytes")
                        if time.monotonic() > deadline:
                            raise ServingError(
                                f"{redact(self.url)} did not end its answer within {self.timeout_seconds:g} s"
                            )
                    return answer.status_code, body
        except (requests.RequestException, HTTPError) as error:
            raise ServingError(f"{redact(self.url)} cannot be reached: {redact(str(error))}") from None


def authorisation(token: str) -> Callable[[], dict[str, str]]:
    """Return a function that gives the headers of each request. ``token`` is a reference to a secret, or ``identity``
    for this machine's own. Raise `SecretError` for anything else, and for a secret that cannot be read."""
    check_token(token)
    if token == IDENTITY:
        return lambda: {"Authorization": f"Bearer {_own_token()}"}
    secret = resolve(token)
    return lambda: {"Authorization": f"Bearer {secret}"}


def _own_token() -> str:
    from azure.core.exceptions import AzureError

    try:
        return str(credential().get_token(SCORING_SCOPE).token)
    except AzureError as error:
        raise ServingError(f"cannot be asked: this machine's identity gets no token: {words(error)}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one question to an endpoint."""

    name: str
    passed: bool
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointCheck:
    """The findings in the order of the questions. The list ends at the first failure that makes the rest
    meaningless."""

    url: str
    findings: tuple[Finding, ...]
    measured: Mapping[str, int | float] = field(default_factory=dict)
    """``rows`` that were asked for, ``max_relative_difference`` from the job's weights, which the tolerance judges, and
    ``max_relative_difference_to_training``, from what training wrote, as far as they were measured."""

    @property
    def passed(self) -> bool:
        """Whether every finding passed, and there is one."""
        return bool(self.findings) and all(item.passed for item in self.findings)

    @property
    def message(self) -> str:
        """The failures, or a sentence that there are none."""
        failed = [f"{item.name}: {item.message}" for item in self.findings if not item.passed]
        return "; ".join(failed) or f"{self.url} passed: {', '.join(item.name for item in self.findings)}"

    def figures(self) -> dict[str, int | float | str]:
        """Return metadata: the message, the findings, every measured figure."""
        told = {item.name: ("passed: " if item.passed else "FAILED: ") + item.message for item in self.findings}
        return {"message": self.message, "url": self.url, **told, **self.measured}


def check_endpoint(
    endpoint: ScoringEndpoint, trained: Candidate, tolerance: float = ENDPOINT_TOLERANCE
) -> EndpointCheck:
    """Ask the endpoint for the model of a job; return the findings:

    - ``answers``: it takes real windows, authorisation included
    - ``schema``: a row of named, finite numbers for each window
    - ``equality``: the numbers of the job's weights, within ``tolerance``, and those that training itself wrote
    - ``refusal``: inputs of a wrong shape, or with a value that is not finite, are refused, not answered
    - ``authorisation``: a request without credentials is refused (where credentials are used at all)

    A fault of the endpoint is a finding; only a fault of the run directory raises (`RunModelError`, `AnswerError`).
    """
    sample, findings, measured = trained.sample, list[Finding](), dict[str, int | float]()

    def note(name: str, passed: bool, message: str) -> bool:
        findings.append(Finding(name=name, passed=passed, message=message))
        return passed

    try:
        status, body = endpoint.post(sample.windows)
        if note("answers", status == 200, f"status {status}" + ("" if status == 200 else f": {_words(body)}")):
            measured["rows"] = len(sample.windows)
            served = read_answer(body, len(sample.windows))
            found, to_training = compare_answers(sample, served)
            measured |= {"max_relative_difference": found, "max_relative_difference_to_training": to_training}
            note("schema", True, f"{len(sample.windows)} rows of {', '.join(served)}")
            is_equal = found <= tolerance and to_training <= TRAINING_TOLERANCE
            note(
                "equality",
                is_equal,
                f"it answered {len(sample.windows)} test windows {'with' if is_equal else 'NOT with'} the model's "
                f"numbers: off by at most {found:.1e} of a column's size from the job's weights (allowed "
                f"{tolerance:.0e}) and {to_training:.1e} from training's own predictions (allowed "
                f"{TRAINING_TOLERANCE:.0e}; compared: {', '.join(sample.trained) or 'no column'})",
            )
            _refusals(endpoint, sample, note)
            if endpoint.headers():
                open_to, _ = endpoint.post(sample.windows[:1], authorised=False)
                note("authorisation", open_to in (401, 403), f"status {open_to} without credentials")
    except AnswerError as error:
        note("schema", False, f"it {error}")
    except ServingError as error:
        note("answers", False, str(error))
    return EndpointCheck(url=redact(endpoint.url), findings=tuple(findings), measured=measured)


def _refusals(endpoint: ScoringEndpoint, sample: Sample, note: Callable[[str, bool, str], bool]) -> None:
    wrong = _wrong(sample.windows)
    if sample.takes_infinite:
        wrong.pop(_INFINITE, None)
    statuses = {what: endpoint.post(value)[0] for what, value in wrong.items()}
    taken = [what for what, status in statuses.items() if status < 400]
    note("refusal", not taken, f"it answers {' and '.join(taken)}" if taken else f"status {[*statuses.values()]}")


def _wrong(windows: Samples) -> dict[str, Samples]:
    """Return inputs that a server has to refuse, and what is wrong with each. A row may lack a number, so not every
    value that is not a number is wrong."""
    import numpy as np

    if isinstance(windows, np.ndarray):
        broken = windows[:1].astype(np.float64)
        broken.flat[0] = float("inf")
        return {
            "inputs of a wrong shape": windows[:1, 1:] if windows.ndim > 1 else windows[:1, None],
            _INFINITE: broken,
        }
    wrong: dict[str, Samples] = {"values without the names of columns": np.zeros((1, windows.shape[1] + 1))}
    for name, kind in windows.dtypes.items():
        if kind.kind == "f":
            return wrong | {_INFINITE: windows[:1].assign(**{str(name): np.inf})}
    return wrong


def _payload(windows: Samples, dialect: str) -> dict[str, Any]:
    """Return a request's content: a tensor, or the columns of a table by name."""
    import numpy as np

    if isinstance(windows, np.ndarray):
        return {"inputs" if dialect == "mlflow" else "input_data": windows.tolist()}
    table = windows.astype(object).where(windows.notna(), None).to_dict("split")
    return {"dataframe_split" if dialect == "mlflow" else "input_data": table}


def _text_of_date(at: Any) -> str:
    """Return a date as text, always of one form: MLflow's server reads a column by the form of its first value."""
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f")


def _words(body: bytes) -> str:
    """Return an error answer's message, without a traceback and without secrets."""
    text = body.decode(errors="replace")
    try:
        document = json.loads(text)
        if isinstance(document, Mapping):
            error = document.get("error", document)
            text = str(error.get("message", error) if isinstance(error, Mapping) else error)
    except ValueError:
        pass
    return redact(text)[:1000]


HOST = "127.0.0.1"
SERVER_CPU_SECONDS, SERVER_FILE_BYTES = 3600, 64 << 20


@contextlib.contextmanager
def scoring_server(folder: Path, *, timeout_seconds: float = 120.0) -> Iterator[ScoringEndpoint]:
    """Run the server of ``mlflow models serve`` for the MLflow model in a folder, on a free port of loopback until the
    block ends; then no process of it is left.

    It runs in an empty folder, without ``PYTHONPATH`` and without secrets, and its time, memory and files are limited
    (`trainer.isolation.limited`): a model that finds its code only on this machine fails here rather than where it is
    deployed. Raise `ServingError`, with the end of its log, if it ends or does not answer in time.
    """
    from mlflow.pyfunc.scoring_server import get_cmd

    with scratch_folder("serve") as scratch:
        log_path, empty = scratch / "server.log", scratch / "empty"
        empty.mkdir()
        host: Any = HOST  # annotated as a number there
        served, inherited = get_cmd(str(folder), host=host, nworkers=1)
        own = {name: inherited[name] for name in inherited.keys() - os.environ.keys()}  # MLflow's name of the model
        command = [sys.executable, "-I", "-m", *shlex.split(served), "--port", "0"]
        memory_bytes = max(2 << 30, psutil.virtual_memory().total // 2)
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                limit_command(command, memory_bytes, SERVER_CPU_SECONDS, SERVER_FILE_BYTES),
                cwd=empty,
                env=clean_environment(empty, min(4, os.cpu_count() or 1)) | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_seconds
        try:
            while (port := listening_port(process.pid)) is None:
                ended = process.poll()
                if ended is not None or time.monotonic() > deadline:
                    why = "did not answer in time" if ended is None else f"ended with exit code {ended}"
                    said = log_path.read_text(errors="replace").splitlines()[-20:]
                    raise ServingError("\n".join([f"the scoring server {why}:", *said]))
                time.sleep(0.1)
            yield ScoringEndpoint(url=f"http://{HOST}:{port}/invocations", is_local=True)
        finally:
            kill_session(process)


def listening_port(pid: int) -> int | None:
    """Return the port at which a process listens, as the system tells it: its log may name another's. None for none."""
    with contextlib.suppress(psutil.Error):
        for found in psutil.Process(pid).net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN:
                return int(found.laddr.port)
    return None
