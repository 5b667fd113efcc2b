"""Play random fault scripts against the Azure path, with real clients, an emulated workspace and trainings on Azurite.

Run `python -m benchmarks.azure_faults`. It measures no time: it counts runs that violate a property, which must be 0.
Each run provisions a cluster and trains a small model on two nodes, while one to four faults from a seeded script
strike: refusals, no capacity, throttling, errors and lost answers of the service, nodes lost or preempted, odd states,
operations that hang, an orchestrator that dies, a person who cancels. After the run, with the faults cleared, the
benchmark checks what remains. A run that fails is named by its seed: `--seed SEED --runs 1` plays it again.

    runs, violations, failed_seeds   runs played; runs that violated a property; seeds of those
    outcomes                         ends of runs: succeeded, failed (with a message), cancelled, no_capacity, refused
    faults                           number of faults in the scripts, by kind
    launches                         jobs that were bought, one for each launch that was asked for
    orphan_node_minutes              minutes that a job's nodes were alive after the job had ended for its owner
    left_alive, left_failed          nodes alive after the idle time; computes left in state Failed

The properties: every run ends, in success or with a message; a run that succeeded did all its steps and has equal
weights on all ranks; only jobs that were asked for were bought; nothing is alive afterwards, and no compute is left
Failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager  # noqa: E402
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions  # noqa: E402
from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState, JobStatus, NoCapacityError  # noqa: E402
from tests.azure.azurite import missing  # noqa: E402
from tests.azure.emulator import ENVIRONMENT_OF_OTHERS, Emulator  # noqa: E402
from tests.azure.emulator.refused import NESTINGS  # noqa: E402
from tests.dtrain_dagster.small_job import write_dataset  # noqa: E402
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig  # noqa: E402
from trainer.rundir import LAUNCH, RESULT, RunDir  # noqa: E402

RESULTS = Path(__file__).parent / "results"
STEPS, NODES, SKU = 40, 2, "Standard_NC6s_v3"
LONGEST_SECONDS = 240.0
ENDED, GONE = ("Completed", "Failed", "Canceled"), ("leaving", "preempted", "unusable")
SETTLE_SECONDS = 30.0
"""Longest time from the end of a job for its owner to the end of its nodes in the service."""
OPERATIONS = ("compute.put", "compute.get", "compute.list", "job.put", "job.get", "code.*", "environment.*", "*")


@dataclass
class Script:
    """The faults of one run. Seconds are those of the emulator's clock, which here is the real one."""

    faults: list[dict[str, Any]]
    dies_after: float | None = None
    """Seconds until the orchestrator is replaced by another one, which knows the run directory only; None: never."""
    cancels_after: float | None = None
    """Seconds until a person cancels the job; None: never."""


@dataclass
class Campaign:
    """The counts of all runs so far, and the violations by seed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    orphan_minutes: float = 0.0
    left_alive: int = 0
    left_failed: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)


def make_script(seed: int) -> Script:
    """Return the script of a seed: the same seed gives the same script."""
    dice = random.Random(seed)
    kinds = {
        "throttle": lambda: {
            "operation": dice.choice(OPERATIONS), "count": dice.randint(1, 4),
            "retry_after_seconds": dice.randint(0, 2),
        },
        "error": lambda: {
            "operation": dice.choice(OPERATIONS), "count": dice.randint(1, 3), "status": dice.choice((500, 502, 503)),
            "moment": dice.choice(("before", "after")),
        },
        "drop": lambda: {
            "operation": dice.choice(OPERATIONS), "count": dice.randint(1, 3),
            "moment": dice.choice(("before", "after")),
        },
        "slow": lambda: {"operation": dice.choice(OPERATIONS), "count": 2, "seconds": dice.uniform(0.5, 3)},
        "refuse": lambda: {
            "vm_size": dice.choice((SKU, "Standard_N[CV]*", "*")), "how": dice.choice(("sync", "async", "settled")),
            "nesting": dice.choice(NESTINGS), "count": dice.choice((1, 2, None)),
        },
        "capacity": lambda: {
            "vm_size": dice.choice((SKU, "*")), "nodes": dice.randint(0, 1), "count": dice.choice((2, 5, None)),
        },
        "stuck": lambda: {"operation": dice.choice(("compute.create", "compute.delete"))},
        "status": lambda: {
            "status": dice.choice(("NotResponding", "Paused")), "after_seconds": dice.uniform(0, 3),
            "seconds": dice.choice((2, 60)),
        },
        "queue": lambda: {"seconds": dice.choice((3, None)), "job": "*-l1"},
        "preempt": lambda: _node_loss(dice),
        "lose": lambda: _node_loss(dice),
    }  # fmt: skip
    chosen = dice.choices(sorted(kinds), k=dice.randint(1, 4))
    faults = [{"fault": kind, **kinds[kind]()} for kind in chosen]
    return Script(
        faults=faults,
        dies_after=dice.uniform(0, 12) if dice.random() < 0.3 else None,
        cancels_after=dice.uniform(0, 12) if dice.random() < 0.15 else None,
    )


def _node_loss(dice: random.Random) -> dict[str, Any]:
    return {
        "node": dice.randrange(NODES),
        "after_seconds": dice.uniform(0, 8),
        "policy": dice.choice(("fail", "survive", "restart")),
    }


class Run:
    """A run of the campaign: its cluster, its job and its script."""

    def __init__(self, seed: int, emulator: Emulator, dataset: str, folder: Path) -> None:
        self.seed, self.emulator, self.folder = seed, emulator, folder
        self.script = make_script(seed)
        self.job_id = f"faults-{seed}"
        own = {name.removeprefix("DTRAIN_AZURE_").lower(): value for name, value in emulator.environment.items()}
        self.options = AzureMLOptions(
            **{name: own[name] for name in ("subscription_id", "resource_group", "workspace")},
            storage_uri=emulator.environment["DTRAIN_STORAGE"],
            cluster_name=f"s{seed % 10**6}", image="emulated/dtrain:1", poll_seconds=0.3, polling_interval_seconds=1,
            queue_deadline_seconds=15, allocation_patience_seconds=6, silence_seconds=20, start_seconds=15,
            patience_seconds=20, look_patience_seconds=5, operation_seconds=10, cancel_seconds=30, max_resubmissions=4,
        )  # fmt: skip
        self.rundir = RunDir(f"{self.options.jobs_uri}/{self.job_id}")
        training = DistributedTrainingConfig(
            world_size=NODES, max_steps=STEPS, epochs=100, checkpoint_frequency=10, warmup_steps=5, threads_per_rank=1
        )
        tracking = TrackingConfig(tensorboard=False)
        where = DatasetRef(uri=dataset)
        self.job = JobConfig(
            job_id=self.job_id, run_dir=self.rundir.uri, dataset=where, training=training, tracking=tracking
        )

    def manager(self, run_id: str) -> AzureMLClusterManager:
        """Return a manager of this run's cluster, as the orchestrator of the Dagster run ``run_id`` has it."""
        return AzureMLClusterManager(self.options, self.folder / "home", dagster_run_id=run_id)

    def play(self) -> tuple[str, str]:
        """Play the script, and return (outcome, message): how the run ended for its owner."""
        began = time.monotonic()
        self.rundir.write_job(self.job)
        manager = self.manager("run-1")
        command = (sys.executable, "-m", "trainer", "--config", f"{self.rundir.uri}/job.json")
        env = {"DTRAIN_CACHE": str(self.folder / "cache")}
        spec = JobSpec(
            job_id=self.job_id, run_dir=self.rundir.uri, command=command, node_count=NODES, elastic=True, env=env
        )
        for fault in self.script.faults:
            self.emulator.control("fault", **fault)
        try:
            manager.provision_cluster(NODES, SKU)
            manager.submit_job(spec)
        except NoCapacityError as error:
            return "no_capacity", str(error)
        except ClusterError as error:
            return "refused", str(error)
        dies, cancels = self.script.dies_after, self.script.cancels_after
        started = time.monotonic()
        while True:
            status = manager.job_status(self.job_id)
            if status.state.is_final:
                return _outcome(status), status.message
            now = time.monotonic()
            if now - began > LONGEST_SECONDS:
                return "never_ended", status.message
            if dies is not None and now - started > dies:
                manager, dies = self.manager("run-2"), None
            if cancels is not None and now - started > cancels:
                cancels = None
                try:
                    manager.cancel_job(self.job_id)
                except ClusterError as error:  # the job is cancelled as soon as the service answers again
                    print(f"seed {self.seed}: cancelling: {error}", file=sys.stderr)
            time.sleep(0.3)

    def judge(self, outcome: str, message: str, campaign: Campaign) -> list[str]:
        """Return the violated properties of a run that is over, add its counts to the campaign, and clean up."""
        wrong = []
        ended_at = self.emulator.control("bought")["now"]
        if outcome == "never_ended":
            wrong.append(f"it did not end within {LONGEST_SECONDS:.0f} s: {message}")
        elif outcome != "succeeded" and outcome != "cancelled" and not message:
            wrong.append(f"it {outcome} without a word")
        result = self.rundir.read_json(RESULT) or {}
        if outcome == "succeeded" and (result.get("steps") != STEPS or not result.get("weights_equal_on_ranks")):
            wrong.append(f"it succeeded with {result}")
        if outcome in ("no_capacity", "refused") and self._jobs():
            wrong.append(f"a job was bought: {sorted(self._jobs())}")
        self.emulator.control("clear")
        self._settle()
        asked = (self.rundir.read_json(LAUNCH) or {}).get("launch", 0)
        bought = set(self._jobs())
        if not bought <= {f"{self.job_id}-l{number}" for number in range(1, asked + 1)}:
            wrong.append(f"{asked} launches were asked for, bought were {sorted(bought)}")
        campaign.launches += len(bought)
        orphans = self._minutes_after(ended_at)
        if orphans > SETTLE_SECONDS / 60 * NODES:
            campaign.orphan_minutes += orphans
            wrong.append(f"nodes worked on for {orphans:.2f} minutes after the end")
        if alive := [name for name, job in self._jobs().items() if job["status"] not in ENDED]:
            wrong.append(f"still alive: {alive}")
        failed = [name for name, it in self._computes().items() if it["state"] == "Failed"]
        campaign.left_failed += len(failed)
        if failed:
            wrong.append(f"left Failed: {failed}")
        self.emulator.control("clock", advance_seconds=self.options.idle_seconds + 60)
        time.sleep(1.0)
        nodes = sum(node["state"] not in GONE for it in self._computes().values() for node in it["nodes"])
        campaign.left_alive += nodes
        if nodes:
            wrong.append(f"{nodes} nodes alive after the idle time")
        self.manager("run-3").cleanup_cluster()
        if self._computes():
            wrong.append(f"not cleaned up: {sorted(self._computes())}")
        return wrong

    def _jobs(self) -> dict[str, Any]:
        jobs = self.emulator.control("state")["jobs"]
        return {name: job for name, job in jobs.items() if name.startswith(f"{self.job_id}-l")}

    def _computes(self) -> dict[str, Any]:
        computes = self.emulator.control("state")["computes"]
        return {name: it for name, it in computes.items() if name.startswith(f"{self.options.cluster_name}-")}

    def _settle(self) -> None:
        """Wait until the service has ended all jobs that have ended for their owner."""
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            if all(job["status"] in ENDED for job in self._jobs().values()):
                return
            time.sleep(0.2)

    def _minutes_after(self, ended_at: float) -> float:
        bought = self.emulator.control("bought")
        minutes = 0.0
        for stay in bought["stays"]:
            for name, start, end in stay["jobs"]:
                if name.startswith(f"{self.job_id}-l"):
                    minutes += max(0.0, (end or bought["now"]) - max(start, ended_at)) / 60
        return minutes


def _outcome(status: JobStatus) -> str:
    return {JobState.SUCCEEDED: "succeeded", JobState.CANCELLED: "cancelled"}.get(status.state, "failed")


@contextmanager
def emulated(folder: Path) -> Iterator[Emulator]:
    """Run the emulator and yield it; meanwhile this process takes it for Azure."""
    import runpy

    with Emulator(folder) as emulator:
        for name in ENVIRONMENT_OF_OTHERS:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in emulator.environment.items() if name != "PYTHONPATH"})
        os.environ["AZUREML_CURRENT_CLOUD"] = "EmulatedCloud"
        runpy.run_path(str(ROOT / "tests/azure/resolver/sitecustomize.py"))
        emulator.control("timing", allocation_retry_seconds=0.5, grace_seconds=3.0)
        yield emulator


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a run violated a property, else 0."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.azure_faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50, help="number of runs (50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; others follow it (0)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds after which no run begins (3600)")
    parser.add_argument("--out", action="store_true", help="also write the line to benchmarks/results")
    options = parser.parse_args(arguments)
    if why := missing():
        parser.error(why)
    began, campaign, played = time.monotonic(), Campaign(), 0
    with tempfile.TemporaryDirectory(prefix="azure-faults-") as scratch, emulated(Path(scratch) / "cloud") as emulator:
        dataset = str(write_dataset(Path(scratch) / "dataset"))
        for seed in range(options.seed, options.seed + options.runs):
            if time.monotonic() - began > options.seconds:
                break
            played += 1
            run = Run(seed, emulator, dataset, Path(scratch))
            campaign.faults.update(fault["fault"] for fault in run.script.faults)
            campaign.faults["death"] += run.script.dies_after is not None
            campaign.faults["cancel"] += run.script.cancels_after is not None
            outcome, message = run.play()
            campaign.outcomes[outcome] += 1
            wrong = run.judge(outcome, message, campaign)
            kinds = ", ".join(fault["fault"] for fault in run.script.faults)
            first = message.splitlines()[0] if message else ""
            print(f"seed {seed}: {outcome} ({kinds}) {wrong or ''} {first}"[:400], file=sys.stderr, flush=True)
            if wrong:
                campaign.failed[seed] = wrong
    line = json.dumps(
        {
            "benchmark": "azure_faults",
            "runs": played,
            "violations": len(campaign.failed),
            "failed_seeds": sorted(campaign.failed),
            "first_seed": options.seed,
            "outcomes": dict(sorted(campaign.outcomes.items())),
            "faults": dict(sorted(campaign.faults.items())),
            "launches": campaign.launches,
            "orphan_node_minutes": round(campaign.orphan_minutes, 3),
            "left_alive": campaign.left_alive,
            "left_failed": campaign.left_failed,
            "seconds": round(time.monotonic() - began, 1),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "what": "an emulated workspace on this machine; real clients, real training processes",
        }
    )
    print(line)
    if options.out:
        (RESULTS / "azure_faults.json").write_text(line + "\n")
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
