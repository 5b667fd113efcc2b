"""Measure the cost of training under Dagster: materializing ``trained_checkpoint`` against the bare trainer.

Run `python -m benchmarks.orchestration`. The bare trainer is the same number of ranks of ``python -m trainer --config
job.json``, started directly with the job.json of the asset: same data, settings, threads and tracking. Both are whole
processes, run alternately, with a short and a long training. CPU seconds are those of all processes that descend from
the command: the benchmark adopts orphans, so it waits for supervisors and nodes, which outlive the process that started
them, and gets their usage from the kernel.

    extra_cpu_seconds, extra_wall_seconds   mean over pairs of what training under Dagster took more than the bare
                                            trainer beside it; ``…_low``, ``…_high``: 95 % interval; ``…_by_steps``: the
                                            three for each length
    import_ratio                            CPU of loading the code location over that of ``import dagster``, each ended
                                            by ``os._exit``, without the cost of a process's end. Bytecode of both is
                                            cached, as where Python may write it: installed packages always have it
    rows                                    each pair: steps, and the seconds of both
    failed                                  parts without figures, and the reasons
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import scipy
import yaml

from benchmarks.host import free_port, in_parts, note, options_of, stop_on_signals, tell
from trainer.rundir import JOB, LAUNCH, RunDir

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PR_SET_CHILD_SUBREAPER = 36
MODULE = "dtrain_dagster.definitions"
QUIET = {"loggers": {"console": {"config": {"log_level": "WARNING"}}}}
"""Run configuration that makes Dagster log warnings only."""
EPOCHS = 10**4
RANKS, SHORT_STEPS = 2, 48
"""Ranks of each training, and steps of a short one."""
LOADS = {
    "dagster_import": "import dagster, os; os._exit(0)",
    "location_import": f"import {MODULE}, os; os._exit(0)",
}
"""Programs whose CPU time is compared."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Time and exit code of a command, with all its descendants."""

    wall: float
    """Wall-clock seconds until the command had ended."""
    cpu: float
    """Seconds of CPU of the command and all its descendants."""
    code: int
    """Exit code: the largest of all commands in absolute value."""


def run(*commands: tuple[Sequence[str], Mapping[str, str]], log: Path) -> Usage:
    """Run commands, all at once, and wait for them and for every process that they leave behind."""
    with open(log, "ab") as file:
        began = time.monotonic()
        started = [
            subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file).pid
            for command, env in commands
        ]
        wall, cpu, codes = 0.0, 0.0, []
        try:
            while True:
                try:
                    pid, status, used = os.wait4(-1, 0)
                except ChildProcessError:  # no child is left
                    return Usage(wall=wall, cpu=cpu, code=max(codes, key=abs))
                cpu += used.ru_utime + used.ru_stime
                if pid in started:
                    wall = time.monotonic() - began
                    codes.append(os.waitstatus_to_exitcode(status))
        finally:  # after an exception some may be left: all descendants end with this process
            while left := psutil.Process().children(recursive=True):
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(left)


@dataclass
class BenchmarkHome:
    """A home of its own, in which everything up to the plan is materialized."""

    home: Path
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DTRAIN_", "DAGSTER_"))}
        self.env = inherited | {
            "DTRAIN_HOME": str(self.home),
            "DAGSTER_HOME": str(self.home / "dagster"),
            "DTRAIN_NODES": str(RANKS),
            "DTRAIN_THREADS_PER_RANK": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }
        (self.home / "dagster").mkdir(parents=True)
        (self.home / "dagster" / "dagster.yaml").write_bytes((ROOT / "dagster.yaml").read_bytes())
        self.jobs = self.home / "storage" / "jobs"
        self.log = self.home / "benchmark.log"

    def materialize(self, assets: str, **options: Any) -> Usage:
        """Materialize these assets by the command line; raise RuntimeError with the end of the log if that fails."""
        path = self.home / "run.yaml"
        path.write_text(yaml.safe_dump(QUIET | ({"ops": {"cost_estimate": {"config": options}}} if options else {})))
        command = [f"{BIN}/dagster", "asset", "materialize", "-m", MODULE, "--select", assets, "--config", str(path)]
        usage = run((command, self.env), log=self.log)
        if usage.code:
            raise RuntimeError(f"materializing {assets} failed:\n{self.log.read_text()[-3000:]}")
        return usage

    def plan(self, steps: int) -> None:
        """Materialize everything up to the plan of a training of ``steps`` steps."""
        self.materialize("stock_prices,sharded_dataset,cost_estimate", epochs=EPOCHS, more={"max_steps": steps})

    def checkpoint(self) -> tuple[Usage, RunDir]:
        """Materialize ``trained_checkpoint`` alone; return its usage and the job that it started."""
        before = set(self.jobs.glob("train-*"))
        usage = self.materialize("trained_checkpoint")
        [made] = set(self.jobs.glob("train-*")) - before
        return usage, RunDir(str(made))

    def bare(self, like: RunDir, name: str) -> Usage:
        """Train the same job without Dagster and supervisor, and return its usage."""
        job, launch = like.read_json(JOB), like.read_json(LAUNCH)
        rundir = RunDir(str(self.home / "bare" / name))
        rundir.write_json(JOB, job | {"job_id": name, "run_dir": rundir.uri})
        world = {"WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_WORLD_SIZE": 1}
        common = self.env | launch["env"] | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = (sys.executable, "-m", "trainer", "--config", f"{rundir.uri}/{JOB}")
        places = [world | {"RANK": rank, "NODE_RANK": rank, "LOCAL_RANK": 0} for rank in range(RANKS)]
        usage = run(*((command, common | {key: str(at[key]) for key in at}) for at in places), log=self.log)
        if usage.code:
            raise RuntimeError(f"the bare trainer ended with {usage.code}:\n{self.log.read_text()[-3000:]}")
        return usage


def paired_difference(gaps: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of differences within pairs, and its 95 % interval (Student's t). One pair has no interval: its
    ends are infinite."""
    mean = statistics.fmean(gaps)
    if len(gaps) < 2:
        return mean, -math.inf, math.inf
    half = float(scipy.stats.t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return mean, mean - half, mean + half


def extra_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a training under Dagster took more than the bare one of its pair, in seconds, with a 95 % interval:
    over all pairs, and for each length alone. No line is fitted: where a short and a long run differ by seconds only,
    its slope would be noise, and its intercept with it."""
    found: dict[str, Any] = {}
    for kind in ("cpu", "wall"):
        of = {
            steps: [row[kind] - row[f"bare_{kind}"] for row in rows if row["steps"] == steps]
            for steps in sorted({row["steps"] for row in rows})
        }
        mean, low, high = paired_difference([gap for gaps in of.values() for gap in gaps])
        found |= {
            f"extra_{kind}_seconds": round(mean, 2),
            f"extra_{kind}_low": round(low, 2),
            f"extra_{kind}_high": round(high, 2),
            f"extra_{kind}_by_steps": {
                str(steps): [round(value, 2) for value in paired_difference(gaps)] for steps, gaps in of.items()
            },
        }
    return found


def runs(bench: BenchmarkHome, rounds: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Train under Dagster and bare alternately, short and long; return what the former costs more."""
    rows = []
    for steps in lengths:
        bench.plan(steps)
        _, like = bench.checkpoint()
        for number in range(rounds):
            if number % 2:
                bare = bench.bare(like, f"{steps}-{number}")
            under, _ = bench.checkpoint()
            if not number % 2:
                bare = bench.bare(like, f"{steps}-{number}")
            pair = {"wall": under.wall, "bare_wall": bare.wall, "cpu": under.cpu, "bare_cpu": bare.cpu}
            rows.append({"steps": steps, **{name: round(seconds, 3) for name, seconds in pair.items()}})
            note(f"{rows[-1]}")
    return {**extra_seconds(rows), "rows": rows}


def loads(rounds: int, log: Path) -> dict[str, float]:
    """Return the medians of CPU seconds of `LOADS` over ``rounds``, and their ratio."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in LOADS}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(log.parent / "bytecode")}
    for number in range(rounds + 1):
        for name in order.sample(sorted(LOADS), len(LOADS)):
            usage = run(([sys.executable, "-c", LOADS[name]], env), log=log)
            if usage.code:
                raise RuntimeError(f"{LOADS[name]!r} failed:\n{log.read_text()[-3000:]}")
            if number:  # the first round compiles
                seconds[name].append(usage.cpu)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "import_ratio": round(medians["location_import"] / medians["dagster_import"], 3),
        **{f"{name}_cpu_seconds": round(value, 3) for name, value in medians.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a part failed, else 0."""
    parser = options_of("orchestration", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of trainings of each length (3)")
    parser.add_argument("--long", type=int, default=480, help="steps of a long training (480)")
    parser.add_argument("--loads", type=int, default=7, help="times that each import is measured (7)")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.loads < 1 or options.long <= SHORT_STEPS:
        parser.error(f"--rounds must be 2 or more, --loads 1 or more, and --long more than {SHORT_STEPS}")
    stop_on_signals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    spent = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orchestration-") as temporary:
        bench = BenchmarkHome(Path(temporary) / "home")
        lengths = (SHORT_STEPS, options.long)
        parts = {"loads": lambda: loads(options.loads, bench.log), "runs": lambda: runs(bench, options.rounds, lengths)}
        figures, failed = in_parts(parts)
    tell("orchestration", figures | {"failed": failed, "seconds": round(time.monotonic() - spent, 1)}, options.save)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
