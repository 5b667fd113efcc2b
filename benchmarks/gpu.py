"""Train on this machine's GPU: whether bits and losses are right in every precision, and how fast it is beside bare
loops.

Run `python -m benchmarks.gpu`, or with only the package ``trainer`` at hand `python -m benchmarks.gpu --dataset
FOLDER`, FOLDER being a dataset of windows. For bits, each training is a process of one rank, of ``--steps`` steps of
768 samples of the default model.

    collectives         NCCL's sum, broadcast and gather on one rank, by the trainer's own transport
    same_bits           whether a second training, one with its data in the host's memory, and one that was killed after
                        half of the steps and resumed, end with the weights of the first; with CUDA graphs alike
    trainings           each: the milliseconds of a step (median), the last loss, the largest difference of any loss to
                        that of the CPU, and the NLL on the test split
    speed               see `benchmarks.gpu_speed`
    two_ranks           where two ranks on this machine train with ``training.backend = "gloo"``: on the CPU
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.gpu_speed import measure_speed
from benchmarks.host import note, options_of, real_dataset, tell
from trainer.comm.torch_transport import make_torch_transport
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.model.allowed_factories import usual_parts
from trainer.rundir import EVALUATION, RESULT, RunDir
from trainer.spec import WINDOWS

ROOT = Path(__file__).parents[1]
BATCH, WARM_STEPS = 768, 20
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "fp32_again": {},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "data_in_host_memory": {"data_on_device": False},
    "reduce_overhead": {"compile": "reduce-overhead"},
    "cuda_graphs": {"cuda_graphs": "on"},
    "cuda_graphs_again": {"cuda_graphs": "on"},
}
ALIKE = {
    "fp32_again": "fp32",
    "data_in_host_memory": "fp32",
    "killed_and_resumed": "fp32",
    "cuda_graphs_again": "cuda_graphs",
    "cuda_graphs_killed_and_resumed": "cuda_graphs",
}
"""Trainings, and the one whose bits they must end with."""


class Trainings:
    """Trainings of the default model on a dataset, in processes of their own."""

    def __init__(self, folder: Path, dataset: DatasetRef, steps: int, seconds: float) -> None:
        """``seconds``: how long one may take."""
        self._folder, self._dataset, self._steps, self._seconds = folder, dataset, steps, seconds

    def prepare(self, name: str, **training: Any) -> RunDir:
        """Write a job, and return its run directory."""
        model, loss = usual_parts(WINDOWS, None)
        usual: dict[str, Any] = {
            "world_size": 1,
            "batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 1,
            "max_steps": self._steps,
            "epochs": 10**4,
            "eval_frequency": self._steps // 2,
            "log_frequency": 1,
            "checkpoint_frequency": self._steps // 3,
        }
        job = JobConfig(
            job_id=name,
            run_dir=str(self._folder / name),
            dataset=self._dataset,
            model=FactoryConfig(factory=model),
            loss=FactoryConfig(factory=loss),
            training=DistributedTrainingConfig(**{**usual, **training}),
            tracking=TrackingConfig(tensorboard=False),
        )
        rundir = RunDir(job.run_dir)
        rundir.write_job(job)
        return rundir

    def start(self, rundir: RunDir, ranks: int = 1, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the job of a run directory."""
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "trainer", "--config", f"{rundir.uri}/job.json"],
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, rundir: RunDir, ranks: int = 1, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return what came of the job. Raise RuntimeError where it fails."""
        process = self.start(rundir, ranks, env)
        _, errors = process.communicate(timeout=self._seconds)
        result = rundir.read_json(RESULT) or {}
        if process.returncode or result.get("status") != "succeeded":
            raise RuntimeError(f"{rundir.uri}: {result.get('error') or errors[-500:]}")
        steps = [item for item in rundir.events() if item["kind"] == "step"]
        seconds = [item["step_seconds"] for item in steps]
        return {
            "device": result["device"],
            "step_ms": round(1000 * statistics.median(seconds[WARM_STEPS:]), 3),
            "seconds": seconds,
            "weights": result["weights_sha256"],
            "test_nll": (rundir.read_json(EVALUATION) or {})["model"]["nll"],
            "losses": [item["loss"] for item in steps],
        }

    def kill_and_resume(self, name: str, **training: Any) -> dict[str, Any]:
        """Return what came of a job that was killed after half of its steps, and started again."""
        rundir = self.prepare(name, **training)
        process = self.start(rundir)
        deadline = time.monotonic() + self._seconds
        while sum(item["kind"] == "step" for item in rundir.events()) < self._steps // 2:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the training that was to be killed has not come to half of its steps")
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return self.run(rundir)


def try_collectives() -> bool:
    """Return whether NCCL's operations on one rank give what they should."""
    gpu = torch.device("cuda", 0)
    store = dist.PrefixStore("gpu", dist.HashStore())
    transport = make_torch_transport(store, 0, 1, gpu, 30.0, 30.0, "127.0.0.1", key=bytes(32))
    values = torch.full((1 << 20,), 3.0, device=gpu)
    transport.all_reduce(values)
    transport.broadcast(values, 0)
    torch.cuda.synchronize(gpu)
    return bool((values == 3.0).all()) and transport.all_gather_object({"rank": 0}) == [{"rank": 0}]


def measure(folder: Path, dataset: DatasetRef, steps: int, seconds: float) -> dict[str, Any]:
    """Return the figures, and the reasons of what failed."""
    trainings = Trainings(folder, dataset, steps, seconds)
    failed: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}

    def attempt(name: str, job: Any) -> None:
        try:
            found[name] = job()
        except (RuntimeError, subprocess.TimeoutExpired, KeyError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
        note(f"{name}: {failed.get(name, 'done')}")

    attempt("cpu", lambda: trainings.run(trainings.prepare("cpu"), env={"CUDA_VISIBLE_DEVICES": ""}))
    for name, settings in TRAININGS.items():
        attempt(name, lambda name=name, settings=settings: trainings.run(trainings.prepare(name, **settings)))
    attempt("killed_and_resumed", lambda: trainings.kill_and_resume("killed_and_resumed"))
    graphs = {"cuda_graphs": "on"}
    attempt("cuda_graphs_killed_and_resumed", lambda: trainings.kill_and_resume("graphs_killed_and_resumed", **graphs))
    attempt(
        "two_ranks",
        lambda: trainings.run(
            trainings.prepare("two_ranks", world_size=2, batch_size_per_gpu=BATCH // 2, backend="gloo"), ranks=2
        ),
    )
    usual = found.get("cpu", {}).get("losses", [])
    return {
        "gpu": torch.cuda.get_device_name(0),
        "steps": steps,
        "collectives": try_collectives(),
        "same_bits": {
            name: found[name]["weights"] == found.get(other, {}).get("weights")
            for name, other in ALIKE.items()
            if name in found
        },
        "two_ranks": found.get("two_ranks", {}).get("device"),
        "trainings": {
            name: {
                "device": item["device"],
                "step_ms": item["step_ms"],
                "last_loss": round(item["losses"][-1], 5),
                "largest_difference_to_cpu": largest_difference(item["losses"], usual),
                "test_nll": round(item["test_nll"], 5),
            }
            for name, item in found.items()
        },
        "failed": failed,
    }


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the largest difference of two curves, None where they differ in length."""
    if len(one) != len(other):
        return None
    return max((abs(mine - its) for mine, its in zip(one, other, strict=True)), default=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 where there is no GPU."""
    parser = options_of("gpu", __doc__)
    parser.add_argument("--dataset", type=Path, help="folder of a dataset of windows; default: of the bundled prices")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of each training")
    parser.add_argument("--only", choices=("bits", "speed"), help="one of the two parts; default: both")
    parser.add_argument("--tiny", action="store_true", help="speed alone, in small, to see that it runs; on a CPU, too")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that one training may take")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.tiny:
        note("this machine has no GPU that torch can use, so there is nothing to measure")
        return 2
    with tempfile.TemporaryDirectory(prefix="dtrain-gpu-") as folder:
        if options.dataset is None:
            dataset = real_dataset(Path(folder))
        else:
            manifest = json.loads((options.dataset / "manifest.json").read_text())
            dataset = DatasetRef(uri=str(options.dataset), dataset_id=manifest["dataset_id"])
        figures: dict[str, Any] = {}
        if options.only != "speed" and not options.tiny:
            figures |= measure(Path(folder), dataset, options.steps, options.seconds)
        if options.only != "bits":
            device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
            figures["speed"] = measure_speed(Path(folder), dataset, device, options.tiny)
    tell("gpu", figures, options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
