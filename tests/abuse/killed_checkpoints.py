"""Kill processes that write checkpoints at seeded moments and steps; the next start must resume from the last good one.

The sha256 of a checkpoint is checked here without the project's own code. Half of the rounds are trainings that save as
often as storage allows, and whose weights must equal those of an undisturbed training bit for bit; in the others a
process only saves, so that a kill always meets a save.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.abuse.forks import Forks
from tests.abuse.tally import Tally

JOB = "train-00000000-killed"
KEPT = 2
"""Checkpoints that a job keeps."""
SAVES = 6
"""Saves of one start that only saves."""
WITNESS = "witness.txt"
"""File of the steps that were reported as saved: each line is on disk as soon as it is written, whatever is killed
then."""


def warm() -> None:
    """Import the modules that a training needs."""
    import torch

    torch.set_num_threads(1)


def prepare(folder: Path) -> None:
    """Make a small dataset, and the job."""
    from harness import small_job
    from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
    from trainer.rundir import RunDir

    rundir = RunDir(str(folder / "jobs" / JOB))
    job = JobConfig(
        job_id=JOB,
        run_dir=rundir.uri,
        dataset=DatasetRef(uri=str(small_job.write_dataset(folder / "dataset"))),
        model=FactoryConfig(factory="tcn"),
        loss=FactoryConfig(factory="student_t"),
        training=DistributedTrainingConfig(
            world_size=1, batch_size_per_gpu=512, max_steps=12, warmup_steps=2, threads_per_rank=1,
            checkpoint_frequency=1, eval_frequency=4, keep_checkpoints=KEPT,
        ),
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip
    rundir.write_job(job)


def train(folder: Path) -> dict[str, Any]:
    """Start the job once; return the checkpoint from which it resumed, and the sha256 of its weights."""
    from trainer.engine.run_job import run_job
    from trainer.rundir import RunDir

    os.environ["DTRAIN_CACHE"] = str(folder / "cache")
    rundir = RunDir(str(folder / "jobs" / JOB))
    before = len(_resumed(rundir))
    code = run_job(rundir.read_job())
    result = rundir.read_json("result.json") or {}
    return {"code": code, "from": _resumed(rundir)[before:], "weights": result.get("weights_sha256"),
            "best": result.get("checkpoint"), "error": result.get("error")}  # fmt: skip


def _resumed(rundir: Any) -> list[str]:
    return [str(event["path"]) for event in rundir.events() if event["kind"] == "resume"]


def save(folder: Path, numbers: int) -> dict[str, Any]:
    """Load the latest checkpoint, check its content, and save a few more; raise ValueError if the content is wrong."""
    import torch

    from trainer.checkpoint.manager import CheckpointManager
    from trainer.rundir import RunDir

    def state(step: int) -> dict[str, Any]:
        values = torch.randn(numbers, generator=torch.Generator().manual_seed(step))
        return {"model": {"weight": values}, "progress": {"step": step}}

    def report(kind: str, **fields: Any) -> None:
        if kind == "checkpoint":
            with open(folder / WITNESS, "ab", buffering=0) as file:
                file.write(b"%d\n" % fields["step"])

    checkpoints = CheckpointManager(RunDir(str(folder / "jobs" / JOB)), KEPT, "this", report)
    found = checkpoints.load_latest()
    step = found[1]["progress"]["step"] if found else 0
    if found and not torch.equal(found[1]["model"]["weight"], state(step)["model"]["weight"]):
        raise ValueError(f"{found[0]} was loaded, and is not what was saved")
    generation = 1 + max((int(name[-15:-11]) for name in checkpoints.folders()), default=0)
    checkpoints.fence(generation)
    for number in range(step + 1, step + 1 + SAVES):
        checkpoints.save(state(number), number, generation, is_best=number % 3 == 0)
        checkpoints.wait()
    checkpoints.close()
    return {"code": 0, "from": [found[0]] if found else [], "weights": ""}


def good(folder: Path) -> dict[str, bool]:
    """Return the checkpoints that claim to be whole, and whether their files have the sha256 of their manifest."""
    judged = {}
    for path in sorted((folder / "jobs" / JOB / "checkpoints").glob("g*/manifest.json")):
        files = json.loads(path.read_text())["files"].items()
        judged[f"checkpoints/{path.parent.name}"] = all(
            hashlib.sha256((path.parent / name).read_bytes()).hexdigest() == said["sha256"] for name, said in files
        )
    return judged


def latest(folder: Path) -> str | None:
    """Return the path that LATEST names; None if it does not exist."""
    try:
        return json.loads((folder / "jobs" / JOB / "checkpoints" / "LATEST.json").read_text())["path"]
    except FileNotFoundError:
        return None


def wrong_between(folder: Path) -> str:
    """Return the faults that a kill has left; empty for none."""
    found, last = good(folder), latest(folder)
    if not all(found.values()):
        return f"whole by their manifest, and damaged: {[name for name, is_good in found.items() if not is_good]}"
    if last is not None and last not in found:
        return f"LATEST points to {last}, which is not whole"
    told = (folder / WITNESS).read_text().split() if (folder / WITNESS).exists() else []
    if told and (last is None or int(last[-9:]) < int(told[-1])):
        return f"step {told[-1]} was reported as saved, and LATEST points to {last}"
    return ""


def wrong_after(folder: Path) -> str:
    """Return the faults that are left after the job was finished; empty for none."""
    there = folder / "jobs" / JOB / "checkpoints"
    names = sorted(path.name for path in there.iterdir() if path.is_dir() and path.suffix != ".lock")
    half = [name for name in names if not good(folder).get(f"checkpoints/{name}")]
    litter = [str(path.relative_to(there)) for path in there.rglob("*.tmp")]
    many = names if len(names) > KEPT + 1 else []
    return "; ".join(
        f"{what}: {left}" for what, left in (("half", half), ("litter", litter), ("too many", many)) if left
    )


def attack(random: random.Random, rounds: int) -> Tally:
    """Start ``rounds`` jobs, kill each one to three times, and then finish it."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="dtrain-abuse-") as scratch, Forks(__name__) as forks:
        home, fresh = Path(scratch) / "home", Path(scratch) / "fresh"
        home.mkdir()
        _done(forks.run("prepare", home))
        shutil.copytree(home, fresh)
        whole = _done(forks.run("train", home))
        weights = whole["gave"]["weights"]
        for number in range(rounds):
            shutil.rmtree(home)
            shutil.copytree(fresh, home)
            name, limits, arguments = "train", whole, dict[str, Any]()
            if number % 2:
                name, arguments = "save", {"numbers": random.choice((1_000, 100_000, 2_000_000))}
                limits = {"seconds": arguments["numbers"] * 4e-7 + 0.2, "steps": 60}
            said, at = list[str](), list[str]()
            for _ in range(random.randint(1, 3)):
                when: dict[str, Any] = {"seconds": random.uniform(0.0, limits["seconds"])}
                if random.random() < 0.6:
                    when = {"step": random.randint(1, limits["steps"])}
                at.append(" ".join(f"{key} {value:.4g}" for key, value in when.items()))
                before = latest(home)
                said += _of_start(forks.run(name, home, **arguments, **when), before)
                said.append(wrong_between(home))
            for left in (home / "jobs" / JOB).rglob("*.tmp"):  # as if a day had passed
                os.utime(left, (time.time() - 86400,) * 2)
            tally.tried += 1
            before = latest(home)
            again = forks.run(name, home, **arguments)
            said += [*_of_start(again, before), wrong_between(home), wrong_after(home)]
            if again["code"] or again["gave"]["code"]:
                said.append(f"it fails: {again.get('error') or again['gave']['error']}")
            elif name == "train" and again["gave"]["weights"] != weights:
                said.append("its weights are not those of a training that nobody killed")
            elif name == "train" and again["gave"]["best"] not in {None, *good(home)}:
                said.append(f"its result names the checkpoint {again['gave']['best']}")
            if any(said):
                tally.outages += 1
                tally.findings.append(f"{name}, killed at {', '.join(at)}: {'; '.join(filter(None, said))}")
    return tally


def _of_start(found: dict[str, Any], before: str | None) -> list[str]:
    """Return the faults of a start that may have been killed, with the checkpoint that LATEST named before it."""
    said = [f"{name} outlives it" for name in found["orphans"]]
    if "error" in found:
        said.append(found["error"])
    elif "gave" in found and before and found["gave"]["from"] != [before]:  # without LATEST, any whole one is right
        said.append(f"it went on from {found['gave']['from']}, and LATEST had pointed to {before}")
    return said


def _done(found: dict[str, Any]) -> dict[str, Any]:
    if found["code"] or (found["gave"] or {}).get("code"):
        raise ValueError(f"it fails by itself: {found}")
    return found
