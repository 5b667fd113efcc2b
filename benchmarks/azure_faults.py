"""Play random fault scripts against the Azure path, with real clients, an emulated workspace and trainings on Azurite.

Run `python -m benchmarks.azure_faults`. It counts runs that violate an invariant, which must be 0. Each run provisions
a cluster and trains a small model on two nodes, while one to four faults from a seeded script strike
(`benchmarks.azure_faults_scripts` has the kinds). An orchestrator may die, a person may cancel. Whatever has not ended
after a while goes on without faults. After the run, with the faults cleared, the invariants of
`benchmarks.azure_faults_judgement` are checked. A run that fails is named by its seed: `--seed SEED --runs 1` plays it
again.

    runs, violations, failed_seeds   runs played; runs that violated an invariant; seeds of those
    invariants                       number of runs that violated each invariant; all of them are named
    outcomes                         ends of runs: succeeded, failed (with a message), cancelled, no_capacity, refused
    faults                           number of faults in the scripts, by kind
    lifted                           runs that ended only after their faults were cleared
    launches                         jobs that were bought, one for each launch that was asked for
    orphan_node_minutes              minutes that a job's nodes were alive after the job had ended for its owner
    lost_usd                         list price of those minutes, and of nodes that stayed after the idle time
    left_alive, left_failed          nodes alive after the idle time; computes left in state Failed
    seconds_per_run                  of this machine, under whatever load it had
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.azure_faults_judgement import ENDED, GONE, SETTLE_SECONDS, Campaign, RunFacts
from benchmarks.azure_faults_scripts import NODES, SKU, make_script
from benchmarks.host import note, options_of, tell
from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
from dtrain_dagster.clusters.azure_ml.sku_chain import DEFAULT_CHAIN
from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState, JobStatus, NoCapacityError
from dtrain_dagster.costs.prices import PriceError, price_of
from dtrain_dagster.settings.azure import AzureMLOptions
from dtrain_dagster.settings.cluster_kinds import tier_of
from harness.azure.azurite import missing
from harness.azure.emulator import ENVIRONMENT_OF_OTHERS, Emulator
from harness.small_job import write_dataset
from trainer.config import DatasetRef, DistributedTrainingConfig, JobConfig, TrackingConfig
from trainer.rundir import LAUNCH, RESULT, RunDir

ROOT = Path(__file__).parents[1]
STEPS = 40
LONGEST_SECONDS, LIFT_SECONDS = 240.0, 90.0
"""Seconds after which a run has not ended, and after which its faults are lifted, as people repair things."""
STRANGER = "people-gpu"
"""A compute of somebody else in the workspace."""


class Run:
    """A run of the campaign: its cluster, its job and its script."""

    def __init__(self, seed: int, emulator: Emulator, dataset: str, folder: Path) -> None:
        self.seed, self.emulator, self.folder = seed, emulator, folder
        self.script = make_script(seed)
        self._planned = list(self.script.faults)
        self.job_id, self.lifted = f"faults-{seed}", False
        self.troubles: list[str] = []
        own = {name.removeprefix("DTRAIN_AZURE_").lower(): value for name, value in emulator.environment.items()}
        self.options = AzureMLOptions(
            **{name: own[name] for name in ("subscription_id", "resource_group", "workspace")},
            storage_uri=emulator.environment["DTRAIN_STORAGE"],
            cluster_name=f"s{seed % 10**6}", chain=DEFAULT_CHAIN, image="emulated/dtrain:1",
            poll_seconds=0.3, polling_interval_seconds=1,
            queue_deadline_seconds=15, allocation_patience_seconds=6, silence_seconds=20, start_seconds=15,
            missing_seconds=12, patience_seconds=20, look_patience_seconds=5, operation_seconds=10, cancel_seconds=30,
            max_resubmissions=4,
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
        self._begin_faults(None)
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
            self._begin_faults(time.monotonic() - started)
            status = manager.job_status(self.job_id)
            if status.state.is_final:
                return _outcome(status), status.message
            now = time.monotonic()
            if now - began > LONGEST_SECONDS:
                return "never_ended", status.message
            if now - began > LIFT_SECONDS and not self.lifted:
                self.lifted = True
                self.emulator.control("clear")
            if dies is not None and now - started > dies:
                manager, dies = self.manager("run-2"), None
            if cancels is not None and now - started > cancels:
                cancels = None
                try:
                    manager.cancel_job(self.job_id)
                except ClusterError as error:  # the job is cancelled as soon as the service answers again
                    note(f"seed {self.seed}: cancelling: {error}")
            time.sleep(0.3)

    def _begin_faults(self, seconds: float | None) -> None:
        """Begin the faults that are due so many seconds after the submission; None: those that are there before it.
        None begins after all were lifted."""
        for fault in list(self._planned):
            is_due = fault.after_seconds is None or (seconds is not None and seconds >= fault.after_seconds)
            if is_due and not self.lifted:
                self._planned.remove(fault)
                self.emulator.control(fault.verb, **fault.fields)

    def look(self, outcome: str, message: str) -> RunFacts:
        """Return the facts of a run that is over, and clean up after it."""
        ended_at = self.emulator.control("bought")["now"]
        self.emulator.control("clear")
        result = self.rundir.read_json(RESULT) or {}
        self._settle()
        jobs = {name: job["status"] for name, job in self._jobs().items()}
        launch = (self.rundir.read_json(LAUNCH) or {}).get("launch", 0)
        counted = self._after_the_end() if launch and outcome != "never_ended" else 0.0
        failed = [name for name, it in self._computes().items() if it["state"] == "Failed"]
        before = self.emulator.control("bought")["now"]
        self.emulator.control("clock", advance_seconds=self.options.idle_seconds + 60)
        time.sleep(1.0)
        nodes = sum(node["state"] not in GONE for it in self._computes().values() for node in it["nodes"])
        bought = self.emulator.control("bought")
        try:
            self.manager("run-3").cleanup_cluster()
        except ClusterError as error:
            self.troubles.append(f"cleaning up: {error}")
        if STRANGER not in self.emulator.control("state")["computes"]:
            self.troubles.append("somebody else's compute is gone")
        stays = [stay for stay in bought["stays"] if stay["compute"].startswith(f"{self.options.cluster_name}-")]
        return RunFacts(
            outcome=outcome, message=message, may_end=self.script.may_end, steps=STEPS, result=result,
            launch=launch, job_id=self.job_id, nodes=NODES, jobs=jobs, failed_computes=failed, live_nodes=nodes,
            left_computes=sorted(self._computes()), ended_at=ended_at,
            released_at=before + self.options.idle_seconds + 60, stays=stays, now=bought["now"],
            counted_minutes=counted, prices=prices_of(stays), troubles=self.troubles,
        )  # fmt: skip

    def _after_the_end(self) -> float:
        """Return the node-minutes that we count, and cancel what has ended where the script says so."""
        manager = self.manager("run-3")
        try:
            if self.script.cancels_ended:
                before = manager.job_status(self.job_id).state
                manager.cancel_job(self.job_id)
                if (after := manager.job_status(self.job_id).state) is not before:
                    self.troubles.append(f"cancelling what had ended made {before} {after}")
            return sum(usage.ended_at - usage.started_at for usage in manager.node_usage(self.job_id)) / 60
        except ClusterError as error:
            self.troubles.append(f"after the end: {error}")
            return 0.0

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


def prices_of(stays: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Return size and tier → US dollars per hour of these stays, without those that have no known price."""
    found = {}
    for size, tier in {(stay["vm_size"], stay["tier"]) for stay in stays}:
        try:
            found[size, tier] = price_of(size).usd_per_hour(tier_of(tier))
        except PriceError as error:
            note(str(error))
    return found


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
        runpy.run_path(str(ROOT / "harness/azure/resolver/sitecustomize.py"))
        emulator.control("timing", allocation_retry_seconds=0.5, grace_seconds=3.0)
        yield emulator


def play(options: argparse.Namespace) -> dict[str, Any]:
    """Play the runs one after the other, and return their counts."""
    began, campaign = time.monotonic(), Campaign()
    with tempfile.TemporaryDirectory(prefix="azure-faults-") as scratch, emulated(Path(scratch) / "cloud") as emulator:
        dataset = str(write_dataset(Path(scratch) / "dataset"))
        for seed in range(options.seed, options.seed + options.runs):
            if time.monotonic() - began > options.seconds:
                break
            run = Run(seed, emulator, dataset, Path(scratch))
            if seed == options.seed:
                place_stranger(run)
            facts = run.look(*run.play())
            wrong = campaign.add(seed, run.script, run.lifted, facts)
            names = ", ".join(fault.name for fault in run.script.faults)
            first = facts.message.splitlines()[0] if facts.message else ""
            note(f"seed {seed}: {facts.outcome} ({names}) {wrong or ''} {first}"[:600])
    return campaign.as_dict()


def place_stranger(run: Run) -> None:
    """Create somebody else's compute, which has none of our tags."""
    from azure.ai.ml.entities import AmlCompute

    ml = run.manager("people").service.ml
    ml.compute.begin_create_or_update(AmlCompute(name=STRANGER, size=SKU, min_instances=0, max_instances=1)).result()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a run violated an invariant, else 0."""
    parser = options_of("azure_faults", __doc__)
    parser.add_argument("--runs", type=int, default=100, help="number of runs (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; others follow it (0)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds after which no run begins (3600)")
    options = parser.parse_args(arguments)
    if why := missing():
        parser.error(why)
    began = time.monotonic()
    counts = play(options)
    seconds = time.monotonic() - began
    figures = {
        **counts,
        "first_seed": options.seed,
        "seconds": round(seconds, 1),
        "seconds_per_run": round(seconds / max(1, counts["runs"]), 1),
        "what": "an emulated workspace on this machine; real clients, real training processes",
    }
    tell("azure_faults", figures, options.save)
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
