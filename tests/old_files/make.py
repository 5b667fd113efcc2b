"""Make ``home.tar.xz`` again, in a checkout of the commit before the modules moved into rooms, with its packages:

    git archive COMMIT | tar -x -C BEFORE && cd BEFORE && python …/tests/old_files/make.py …/tests/old_files

It runs the whole graph of that checkout on a small market (three tickers, one rank, a tiny model) in a home of its own,
keeps what the tests read, and packs it. README.md says what is kept, and how it differs from what the old code wrote.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HOME = "@HOME@"
"""Stands for the path of the home in all texts, and in MLflow's database."""
CONFIG = {
    "ops": {
        "sharded_dataset": {"config": {"window": 12, "shards": 1}},
        "cost_estimate": {
            "config": {
                "model_args": {"channels": 4},
                "checkpoint_frequency": 20,
                "more": {"max_steps": 40, "warmup_steps": 5, "keep_checkpoints": 1},
            }
        },
    }
}
VALUES = ("stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint", "registered_model")
LEFT_OUT = ("predictions.npz", "tensorboard", "logs", "reports", "supervisor.lock")
TABLES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "model_versions": ("source", "storage_location"),
    "logged_models": ("artifact_location",),
}


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dtrain-old-files-") as scratch:
        home = Path(scratch) / "home"
        make_home(home, Path(scratch))
        kept = Path(scratch) / "kept"
        keep(home, kept)
        with tarfile.open(target / "home.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(item for item in kept.rglob("*") if item.is_file()):
                info = tarfile.TarInfo(path.relative_to(kept).as_posix())
                data = path.read_bytes()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def make_home(home: Path, scratch: Path) -> None:
    import exchange_calendars as xc
    import numpy as np
    import pandas as pd

    dagster_home = home / "dagster"
    dagster_home.mkdir(parents=True)
    shutil.copy("dagster.yaml", dagster_home)
    random = np.random.default_rng(0)
    calendar = xc.get_calendar("XNYS", start="2010-01-01", end="2024-12-31")
    days = calendar.sessions_window(pd.Timestamp("2015-01-02"), 640)
    walks = 50 * np.exp(np.cumsum(random.normal(0, 0.01, (len(days), 3)), axis=0))
    pd.DataFrame(np.round(walks, 3), index=pd.Index(days, name="date"), columns=["AAA", "BBB", "CCC"]).to_csv(
        scratch / "prices.csv"
    )
    (scratch / "run.json").write_text(json.dumps(CONFIG))
    env = os.environ | {
        "DTRAIN_HOME": str(home),
        "DAGSTER_HOME": str(dagster_home),
        "DTRAIN_PRICES": str(scratch / "prices.csv"),
        "DTRAIN_NODES": "1",
        "DTRAIN_THREADS_PER_RANK": "1",
        "PYTHONPATH": os.getcwd(),
    }
    arguments = ["-m", "dtrain_dagster.definitions", "--select", "not group:studies", "-c", str(scratch / "run.json")]
    # The gate fails, since forty steps teach nothing: the model is registered all the same.
    subprocess.run([sys.executable, "-m", "dagster", "asset", "materialize", *arguments], env=env, check=False)


def keep(home: Path, kept: Path) -> None:
    """What the tests read, with `HOME` for the home's path."""
    for path in sorted(item for item in (home / "storage").rglob("*") if item.is_file()):
        name = path.relative_to(home)
        if not any(part in LEFT_OUT or part.startswith("probe-") for part in name.parts):
            copy(path, kept / name, home)
    for path in sorted(item for item in (home / "orders").rglob("*") if item.is_file()):
        copy(path, kept / path.relative_to(home), home)
    for value in VALUES:
        copy(home / "dagster" / "storage" / value, kept / "dagster" / "storage" / value, home)
    [model] = (home / "mlartifacts").glob("*/artifacts/model")
    used = modules_of_model(model)
    for path in sorted(item for item in model.rglob("*") if item.is_file()):
        name = path.relative_to(model).as_posix()
        if not name.startswith("code/") or name.removeprefix("code/") in used:
            copy(path, kept / path.relative_to(home), home)
    packed = kept / model.relative_to(home)
    copy_database(home, kept / "mlflow.db", packed)


def modules_of_model(model: Path) -> set[str]:
    """The files of the packed code that are imported when it answers."""
    order = f"""
import sys
sys.path.insert(0, {str(model / "code")!r})
import mlflow.pyfunc
mlflow.pyfunc.load_model({str(model)!r})
for module in list(sys.modules.values()):
    if str(getattr(module, "__file__", "")).startswith({str(model / "code")!r}):
        print(module.__file__)
"""
    said = subprocess.run([sys.executable, "-P", "-c", order], cwd=model, stdout=subprocess.PIPE, text=True, check=True)
    return {Path(line).relative_to(model / "code").as_posix() for line in said.stdout.splitlines()}


def copy(source: Path, target: Path, home: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    if target.suffix in (".json", ".jsonl") and "mlartifacts" not in target.parts:
        data = data.replace(str(home).encode(), HOME.encode())
    target.write_bytes(data)


def copy_database(home: Path, target: Path, packed: Path) -> None:
    """MLflow's database, with `HOME`, and with the digest of the packed files that were kept; as SQL."""
    from dtrain_dagster.registry.packed import PACKED_TAG, folder_digest

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "mlflow.db"
        shutil.copy(home / "mlflow.db", path)
        database = sqlite3.connect(path)
        for table, columns in TABLES.items():
            for column in columns:
                database.execute(f"update {table} set {column} = replace({column}, ?, ?)", (str(home), HOME))
        database.execute("update model_version_tags set value = ? where key = ?", (folder_digest(packed), PACKED_TAG))
        database.execute("delete from metrics where key like 'system/%'")
        database.commit()
        target.with_suffix(".sql").write_text("\n".join(database.iterdump()))
        database.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
