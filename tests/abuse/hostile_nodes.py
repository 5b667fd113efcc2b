"""Hostile files in a run directory, and code in a model that is allowed and takes what it gets.

A small training is ordered and carried out. Then the files that its nodes may write are replaced, variant by variant,
and a fork reads them as registration and its checks do. An audit hook in the fork records imports, started programs
and connections.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from dtrain_dagster.jobs.orders import keep_order, order_of
from dtrain_dagster.registry.run_model import ordered_job
from dtrain_dagster.registry.smoke_test import Candidate, read_predictions
from dtrain_dagster.registry.versions import TrainingProvenance, model_card
from harness import small_job
from tests.abuse.killed import in_fork
from trainer.evaluation.gate import gate
from trainer.isolation.runner import Isolated, IsolationError
from trainer.rundir import EVALUATION, RESULT, RunDir

JOB_ID = "train-00000000-abuse"
TARGETS = (
    *("os:system", "subprocess:Popen", "builtins:eval", "builtins:exec", "uvicorn:Config", "importlib:import_module"),
    *("pty:spawn", "beside:make", "shutil:rmtree", "runpy:run_path", "beside.inner:make", "webbrowser:open"),
)
"""Factories that must not be imported."""
HARMLESS = (sys.executable, "-I")
"""First words of the commands that the reading process starts by itself: it asks a model in a process of its own."""
STARTING = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")
"""Audit events of a program that starts."""
OWN_MODEL = """
import json, os, signal
from trainer.model.stock import tcn

def make(spec, outputs, tell=""):
    found = {
        "environment": dict(os.environ),
        "descriptors": [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")],
        "memory": "all",
    }
    held = []
    try:
        for _ in range(16):
            held.append(bytearray(1 << 28))
    except MemoryError:
        found["memory"] = "no more"
    with open(tell, "w") as file:
        json.dump(found, file)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        signal.pause()
"""
"""Module of an allowed model that asks for what there is, takes all that it gets, and does not end."""
LIMIT_BYTES = 2 << 30
"""Memory that this model gets; it wants twice that."""


class Marker:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Place:
    """A home with one finished training, which attacks change."""

    def __init__(self, folder: Path) -> None:
        self.home, self.marker, self.canary = folder / "home", folder / "marker", folder / "canary"
        self.canary.write_text("canary-5d1f")
        self.cache = str(folder / "cache")
        with mock.patch.dict(os.environ, {"DTRAIN_CACHE": self.cache}):
            self.good = small_job.train(self.home, small_job.write_dataset(folder / "dataset"), JOB_ID, steps=5)
        keep_order(self.home, RunDir(self.good).read_job(), None)
        (folder / "own").mkdir()
        (folder / "own" / "own_hostile.py").write_text(OWN_MODEL)
        self.own, self.folder = folder / "own", folder

    def fresh(self, name: str) -> str:
        """Return a copy of the run directory under the job's own name, with a module of the nodes beside it."""
        target = self.folder / "copies" / name / JOB_ID
        shutil.copytree(self.good, target)
        (target / "beside.py").write_text(f"import os\nos.system('touch {self.marker}')\ndef make(*_, **__): ...\n")
        return str(target)

    def read(self, run_dir: str, asks_model: bool) -> dict[str, Any]:
        """Read a run directory in a fork, and return what happened there: the ``error`` that refused it, the model
        ``card``, and what was ``done`` by the way."""
        found, _ = in_fork(lambda: _read_as_registration(self, run_dir, asks_model), self.folder / "nowhere")
        return dict(found)

    def ask(self, told: Path, seconds: float) -> str | None:
        """Ask the model that looks and takes, and return the error; None if it answers."""
        folder = self.folder / "within"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(self.good) / "model", folder)
        model = {"factory": "own_hostile:make", "args": {"tell": str(told)}}
        edit_json(folder / "model.json", lambda value: value | {"model": model})
        asked = Isolated(
            folder=folder, modules=("own_hostile",), path=(self.own,), seconds=seconds, memory_bytes=LIMIT_BYTES,
            threads=1,
        )  # fmt: skip
        try:
            asked.predict(np.zeros((2, 12, 8), dtype=np.float32))
        except IsolationError as error:
            return str(error)
        return None


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Replace the value in a JSON file by that which ``change`` returns."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _factory(random: random.Random, folder: Path, marker: Path) -> None:
    """Name a hostile factory in model.json, in job.json, or in both, so that they agree."""
    part, target = random.choice(("model", "loss")), random.choice(TARGETS)
    args = random.choice(({}, {"command": f"touch {marker}"}, {"args": ["touch", str(marker)]}))
    for name in random.choice((("model/model.json",), ("job.json",), ("model/model.json", "job.json"))):
        edit_json(folder / name, lambda value: value | {part: {"factory": target, "args": args}})


def _arguments(random: random.Random, folder: Path, marker: Path) -> None:
    edit_json(folder / "model/model.json", lambda value: value | {"model": {"factory": "tcn", "args": {"channels": 8}}})


def _other_stock(random: random.Random, folder: Path, marker: Path) -> None:
    for name in ("model/model.json", "job.json"):
        edit_json(folder / name, lambda value: value | {"model": {"factory": "lstm", "args": {}}})


def _spec(random: random.Random, folder: Path, marker: Path) -> None:
    def change(value: dict[str, Any]) -> dict[str, Any]:
        name = random.choice(("feature_mean", "window", "target_std", "features", "dataset_id"))
        value["spec"][name] = {"feature_mean": [9.0] * 8, "window": 10**9, "features": ["x"]}.get(name, 1e9)
        return value

    edit_json(folder / "model/model.json", change)


def _dataset(random: random.Random, folder: Path, marker: Path) -> None:
    uri = random.choice(("http://127.0.0.1:9/metadata", "/etc", "simplecache::http://127.0.0.1:9/x"))
    edit_json(folder / "job.json", lambda value: value | {"dataset": {"uri": uri, "dataset_id": None}})


def _weights(random: random.Random, folder: Path, marker: Path) -> None:
    buffer = io.BytesIO()
    kind = random.choice(("pickle", "torch", "compressed", "huge", "cut"))
    good = (folder / "model/weights.pt").read_bytes()
    if kind == "pickle":
        data = pickle.dumps(Marker(marker), protocol=2)
    elif kind == "torch":
        torch.save({"model": Marker(marker)}, buffer)
        data = buffer.getvalue()
    elif kind == "compressed":
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info) if "data/" not in info.filename else bytes(1 << 24))
        data = buffer.getvalue()
    elif kind == "huge":
        state = torch.load(io.BytesIO(good), weights_only=True)
        torch.save({name: torch.zeros(1).expand(10**12) for name in state}, buffer)
        data = buffer.getvalue()
    else:
        data = good[: random.randrange(len(good))]
    (folder / "model/weights.pt").write_bytes(data)
    edit_json(folder / "model/model.json", lambda value: value | {"file_sha256": hashlib.sha256(data).hexdigest()})


def _predictions(random: random.Random, folder: Path, marker: Path) -> None:
    path = folder / "predictions.npz"
    kind = random.choice(("object", "promise", "none", "pickle"))
    if kind == "object":
        objects = np.empty(3, dtype=object)
        objects[:] = [Marker(marker)] * 3
        np.savez(path, **{name: objects for name in ("row", "mu", "sigma", "nu")})
    elif kind == "promise":
        header = b"\x93NUMPY\x01\x00"
        text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }\n"
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("row", "mu", "sigma", "nu"):
                archive.writestr(f"{name}.npy", header + len(text).to_bytes(2, "little") + text)
    else:
        path.write_bytes(b"" if kind == "none" else pickle.dumps(Marker(marker)))


def change_texts(random: random.Random, folder: Path, marker: Path) -> None:
    """Put markup and what a terminal obeys into texts that a model card shows."""
    evil = random.choice(
        ("<script>alert(1)</script>", "[x](javascript:alert(1))", "![](http://127.0.0.1/x)", "a|b\n\n# c", "`\x1b[2J")
    )
    edit_json(folder / "evaluation.json", lambda value: value | {"notes": [evil], "last_date": evil})
    edit_json(folder / "result.json", lambda value: value | {"checkpoint": evil})


def _description(random: random.Random, folder: Path, marker: Path) -> None:
    texts = ("[]", "null", "{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass"), b"\x00" * 2_000_000)
    text = random.choice(texts)
    (folder / "model/model.json").write_bytes(text if isinstance(text, bytes) else text.encode())


VARIANTS: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "a factory": _factory,
    "arguments": _arguments,
    "another stock model": _other_stock,
    "what is said of the data": _spec,
    "the address of the data": _dataset,
    "weights": _weights,
    "predictions": _predictions,
    "a damaged description": _description,
}
"""Hostile changes of a run directory, by description."""


def _read_as_registration(place: Place, run_dir: str, asks_model: bool) -> dict[str, Any]:
    done: list[str] = []
    named = {target.partition(":")[0] for target in TARGETS} - set(sys.modules)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        starts = event in STARTING or (event == "subprocess.Popen" and tuple(args[1][:2]) != HARMLESS)
        connects = event in ("socket.connect", "socket.bind", "socket.getaddrinfo")
        if starts or connects or (event == "import" and args[0] in named):
            done.append(f"{event} {args!r}")

    os.chdir(run_dir)
    sys.path.insert(0, run_dir)
    sys.addaudithook(hook)
    rundir, error, card = RunDir(run_dir), "", ""
    try:
        ordered = order_of(place.home, rundir)
        evaluation, result = rundir.read_json(EVALUATION), rundir.read_json(RESULT)
        job, verdict = ordered_job(rundir, ordered), gate(evaluation)
        manifest = json.loads((Path(job.dataset.uri) / "manifest.json").read_text())
        provenance = TrainingProvenance(nodes=1, node_hours=1.0, cost_usd="$1", code_version="x", dagster_run_id="y")
        card = model_card("m", job, result, evaluation, manifest, provenance, verdict)
        read_predictions(rundir, ("row", "mu"))
        if asks_model:
            _ = Candidate(run_dir, ordered, place.cache).sample
    except (ValueError, OSError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return {"error": error[-2000:], "card": card, "done": done}
