"""Hostile files in a run directory, and code in a model that is allowed and takes what it gets.

A small training is ordered and carried out. Then every file that its nodes may write is replaced, variant by variant,
and a process of its own (this module, run as a program) reads it as registration and its checks do. An audit hook in
that process records imports, started programs and connections. A variant must be refused with a message, or have no
effect.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.abuse.tally import Tally

ROOT = Path(__file__).parents[2]
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


def attack(random: random.Random, rounds: int) -> Tally:
    """Read ``rounds`` hostile run directories, and one with `OWN_MODEL`."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as name:
        place = Place(Path(name))
        kinds = list(VARIANTS)
        for number in range(rounds):
            kind = kinds[number % len(kinds)] if rounds >= len(kinds) else random.choice(kinds)
            run_dir = place.fresh(f"{number:04d}")
            VARIANTS[kind](random, Path(run_dir), place.marker)
            for found in place.victims([run_dir]):
                place.judge(kind, found, tally)
        place.attack_from_within(tally)
    return tally


class Place:
    """A home with one finished training, which attacks change."""

    def __init__(self, folder: Path) -> None:
        from dtrain_dagster.jobs.orders import keep_order
        from harness import small_job
        from trainer.rundir import RunDir

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

    def victims(self, run_dirs: Sequence[str]) -> list[dict[str, Any]]:
        """Read these run directories in a process of its own, and return what that process did with each."""
        order = {"home": str(self.home), "run_dirs": list(run_dirs), "cache": self.cache}
        beside = os.pathsep.join([str(ROOT), *run_dirs])
        done = subprocess.run(
            [sys.executable, "-m", "tests.abuse.hostile_nodes", json.dumps(order)],
            cwd=run_dirs[0], env=os.environ | {"PYTHONPATH": beside}, capture_output=True, timeout=300, check=False,
        )  # fmt: skip
        found = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode != 0:
            found.append({"crash": done.stderr.decode(errors="replace")[-1000:]})
        return found

    def judge(self, kind: str, found: dict[str, Any], tally: Tally) -> None:
        """Count a variant, and its fault if it had an effect or was believed."""
        tally.tried += 1
        if "crash" in found:
            tally.outages += 1
            tally.findings.append(f"{kind}: the process that read it ended: {found['crash']}")
            return
        if self.marker.exists() or found["started"] or found["imported"] or found["connected"]:
            tally.executed += 1
            tally.findings.append(f"{kind}: something was executed: {found}")
            self.marker.unlink(missing_ok=True)
        if not found["error"] and kind not in HARMLESS_KINDS:
            tally.accepted += 1
            tally.findings.append(f"{kind}: it was believed")
        if "<script" in found.get("card", "").lower() or "](javascript" in found.get("card", "").lower():
            tally.accepted += 1
            tally.findings.append(f"{kind}: markup of the nodes is in the model card")

    def attack_from_within(self, tally: Tally) -> None:
        """Let the code of an allowed model look for secrets, and take more memory and time than it may."""
        told, error, seconds = self.folder / "told.json", None, 5.0
        with open(self.canary) as canary, mock.patch.dict(os.environ, {"DTRAIN_ABUSE_SECRET": "secret-81c0"}):
            os.set_inheritable(canary.fileno(), True)
            while not told.exists() and seconds < 100:  # on a busy machine imports alone take long
                seconds *= 2
                error = self.ask(told, seconds)
        tally.tried += 1
        if not told.exists():
            tally.outages += 1
            tally.findings.append(f"a model of one's own was not asked: {error}")
            return
        found = json.loads(told.read_text())
        for what in ("environment", "descriptors"):
            if "secret-81c0" in str(found[what]) or self.canary.name in str(found[what]):
                tally.leaked += 1
                tally.findings.append(f"{what}: {found[what]}")
        if found["memory"] != "no more":
            tally.accepted += 1
            tally.findings.append("memory: it got twice its limit")
        if error != f"the model took longer than {seconds:g} s and was stopped":
            tally.accepted += 1
            tally.findings.append(f"time: it was not stopped: {error}")

    def ask(self, told: Path, seconds: float) -> str | None:
        """Ask the model that looks and takes, and return the error; None if it answers."""
        import numpy as np

        from trainer.isolation.runner import Isolated, IsolationError

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
    import torch

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
    import numpy as np

    path = folder / "predictions.npz"
    kind = random.choice(("object", "promise", "other", "none", "pickle"))
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
    elif kind == "other":
        np.savez(path, **{name: np.zeros(3) for name in ("row", "mu", "sigma", "nu")})
    else:
        path.write_bytes(b"" if kind == "none" else pickle.dumps(Marker(marker)))


def _texts(random: random.Random, folder: Path, marker: Path) -> None:
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
    "texts": _texts,
    "a damaged description": _description,
}
"""Hostile changes of a run directory, by description."""
HARMLESS_KINDS = {"texts"}
"""Variants that are shown as they are, without effect."""


def be_victim(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Read run directories as registration, its checks and the model card do; yield what happened in this process for
    each."""
    import numpy  # noqa: F401 - imported before the audit hook, which would record it
    import torch  # noqa: F401

    from dtrain_dagster import registry
    from dtrain_dagster.jobs.orders import order_of
    from dtrain_dagster.registry.smoke_test import load_sample
    from trainer.evaluation.gate import gate
    from trainer.rundir import EVALUATION, RESULT, RunDir

    seen: dict[str, list[str]] = {"started": [], "imported": [], "connected": []}
    named = {target.partition(":")[0] for target in TARGETS} - set(sys.modules)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in STARTING or (event == "subprocess.Popen" and tuple(args[1][:2]) != HARMLESS):
            seen["started"].append(f"{event} {args!r}")
        elif event == "import" and args[0] in named:
            seen["imported"].append(str(args[0]))
        elif event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
            seen["connected"].append(f"{event} {args[1:]!r}")

    sys.addaudithook(hook)
    for run_dir in order["run_dirs"]:
        rundir, error, card = RunDir(run_dir), "", ""
        for happened in seen.values():
            happened.clear()
        try:
            ordered = order_of(order["home"], rundir)
            evaluation, result = rundir.read_json(EVALUATION), rundir.read_json(RESULT)
            dataset = Path(registry.ordered_job(rundir, ordered).dataset.uri)
            manifest = json.loads((dataset / "manifest.json").read_text())
            provenance = registry.TrainingProvenance(
                nodes=1, node_hours=1.0, cost_usd="$1", code_version="x", dagster_run_id="y"
            )
            job, verdict = registry.ordered_job(rundir, ordered), gate(evaluation)
            card = registry.model_card("m", job, result, evaluation, manifest, provenance, verdict)
            load_sample(run_dir, order["cache"], 4, ordered)
        except (ValueError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        yield {"error": error[-2000:], "card": card, **seen}


if __name__ == "__main__":
    for happened in be_victim(json.loads(sys.argv[1])):
        print(json.dumps(happened), flush=True)
