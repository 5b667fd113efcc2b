"""Measure a tick of each sensor with 10, 1,000 and 10,000 past jobs, on the local cluster and in SQLite.

Run `python -m benchmarks.sensors`. Past jobs are synthetic records: run directories as a cluster of two nodes and the
trainer leave them, written by the same code, of jobs that never ran (``"synthetic": true`` in their ``plan.json``).
Each has a finished Dagster run in the instance, and a materialization of the checkpoint. Beside them one real job runs,
followed by a live run, and one run waits for capacity, so that every sensor has something to look at.

    tick_seconds_N      of the slowest sensor with N past jobs: the median of its ticks without the first
    flat                the largest ``tick_seconds_N``, divided by that of the fewest jobs
    first_tick_seconds  the slowest first tick after jobs have been added: caches are cold
    sensors             the median of each sensor, by N

Wanted: at most 1 s, and ``flat`` at most 2.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import sqlalchemy

from benchmarks.host import note, options_of, tell
from dtrain_dagster.automation.capacity_queue import WaitingList, new_ticket
from dtrain_dagster.automation.retraining import TRAIN_JOB
from dtrain_dagster.clusters.base import OWNER, GPUClusterManager, JobSpec, JobState
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.jobs.progress import CLAIM, REGISTRATION
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, RESULT, STATUS, RunDir, event

SIZES = (10, 1000, 10000)
"""Numbers of past jobs."""
SKU, NODES, HOUR = "Standard_NC6s_v3", 2, 3600.0
TICKS = 7
"""Ticks of each sensor that count, with each number of past jobs."""
LIVE_JOB = "train-11111111-live0000"


def _add_run(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    asked = frozenset({dg.AssetKey("trained_checkpoint")})
    return instance.add_run(dg.DagsterRun(job_name=TRAIN_JOB, status=status, asset_selection=asked))


def write_past_job(settings: Settings, number: int, run_id: str, now: float) -> None:
    """Write the records of a training of an hour that ended ``number`` hours ago, without checkpoints and
    predictions."""
    job_id = f"train-{number % 97:08x}-{number:08x}"
    rundir, ended = RunDir(f"{settings.jobs_uri}/{job_id}"), now - number * HOUR
    times = {"started_at": ended - HOUR, "ended_at": ended}
    rundir.write_json(
        LAUNCH,
        {
            "job_id": job_id,
            "node_count": NODES,
            "launch": 1,
            "sku": SKU,
            "cluster_name": settings.cluster_name,
            "token": f"{number:032x}",
            "submitted_at": ended - HOUR,
        },
    )
    for node_id in range(NODES):
        rundir.write_node(NodePresence(node_id=node_id, launch=1, last_seen_at=ended, exit_codes=(0,), **times))
    rundir.append_events(1, 0, 1, [event("end", 0, 1, status="succeeded")])
    rundir.write_json(
        STATUS,
        {"job_id": job_id, "state": JobState.SUCCEEDED, "message": "", "launch": 1, "exit_code": 0,
         "exit_codes": {"0": 0, "1": 0}, "stop_grace_seconds": 8.0, "pid": 1, **times},
    )  # fmt: skip
    rundir.write_json(PLAN, plan(synthetic=True))
    rundir.write_json(RESULT, {"status": "succeeded", "launch": 1, "steps": 1000})
    rundir.write_json(OWNER, {"dagster_run_id": run_id})
    rundir.write_json(CLAIM, {"dagster_run_id": run_id, "claimed_at": ended})
    rundir.write_json(REGISTRATION, {"name": "stock", "version": str(number), "alias": "challenger"})


def plan(**more: Any) -> dict[str, Any]:
    """Return a plan as `cost_estimate` writes it."""
    usd = {"low": 5.0, "expected": 6.12, "high": 8.0}
    seconds = {"low": 3000.0, "expected": HOUR, "high": 4500.0}
    estimate = {"usd": usd, "seconds": seconds, "usd_per_node_hour": 3.06, "node_count": NODES}
    return {"tier": "dedicated", "sku": SKU, "node_count": NODES, "estimate": estimate, "work": {"steps": 1000}, **more}


def write_past_run(instance: dg.DagsterInstance, number: int) -> str:
    """Add a finished run of the whole graph and its materialization of a checkpoint, and return the run's id."""
    run = _add_run(instance, dg.DagsterRunStatus.SUCCESS)
    metadata = {"synthetic": True, "job_id": f"train-{number:08x}"}
    instance.report_runless_asset_event(dg.AssetMaterialization("trained_checkpoint", metadata=metadata))
    return str(run.run_id)


@contextmanager
def at_work(settings: Settings, instance: dg.DagsterInstance) -> Iterator[GPUClusterManager]:
    """Yield a cluster with one job, which a live run follows, while another run waits for capacity."""
    manager = build_resources(settings)["cluster"].manager()  # type: ignore[attr-defined]
    manager.provision_cluster(NODES, SKU)
    run = _add_run(instance, dg.DagsterRunStatus.STARTED)
    rundir = RunDir(f"{settings.jobs_uri}/{LIVE_JOB}")
    rundir.write_json(PLAN, plan())
    rundir.write_json(OWNER, {"dagster_run_id": run.run_id})
    ticket = new_ticket(run.run_id, [], {}, "no capacity", time.time(), 24 * HOUR, time.time() + 24 * HOUR)
    WaitingList(settings.shared_uri).put(ticket)
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    manager.submit_job(JobSpec(job_id=LIVE_JOB, run_dir=rundir.uri, command=command, node_count=NODES))
    try:
        yield manager
    finally:
        manager.cleanup_cluster()


@contextmanager
def in_haste() -> Iterator[None]:
    """Skip the syncing of files and databases within: records need not outlive a power cut."""

    def hurry(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", hurry)
    with mock.patch("os.fsync"):
        yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", hurry)


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return, in seconds, the median of each sensor's ticks by size, and the slowest first tick."""
    medians: dict[str, dict[int, float]] = {}
    firsts: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dtrain-sensors-") as folder:
        prices = Path(folder, "prices.csv")
        prices.write_text("date,A\n2020-01-02,1\n")
        settings = Settings(home=Path(folder, "home"), nodes=NODES, prices=str(prices))
        definitions = build_defs(settings)
        Path(folder, "dagster").mkdir()
        instance = dg.DagsterInstance.local_temp(str(Path(folder, "dagster")))
        with instance, at_work(settings, instance):
            written, cursors = 0, dict[str, str | None]()
            for size in sizes:
                with in_haste():
                    for number in range(written + 1, size + 1):
                        write_past_job(settings, number, write_past_run(instance, number), time.time())
                written = size
                for sensor in definitions.sensors or ():
                    assert isinstance(sensor, dg.SensorDefinition)
                    seconds = [tick(sensor, definitions, instance, settings, cursors) for _ in range(1 + TICKS)]
                    firsts.append(seconds[0])
                    medians.setdefault(sensor.name, {})[size] = statistics.median(seconds[1:])
                    note(f"{size} jobs, {sensor.name}: {medians[sensor.name][size]:.3f} s")
    return {"medians": medians, "first": max(firsts)}


def tick(
    sensor: dg.SensorDefinition,
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    settings: Settings,
    cursors: dict[str, str | None],
) -> float:
    """Return the seconds of one evaluation with the cursor of the last, as the daemon does it."""
    made = build_resources(settings)
    resources = {key: value for key, value in made.items() if key in sensor.required_resource_keys}
    began = time.perf_counter()
    with dg.build_sensor_context(
        instance=instance,
        cursor=cursors.get(sensor.name),
        resources=resources,
        definitions=definitions,
        sensor_name=sensor.name,
    ) as context:
        result = sensor.evaluate_tick(context)
    seconds = time.perf_counter() - began
    cursors[sensor.name] = result.cursor
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = options_of("sensors", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of past jobs, ascending")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    sizes = tuple(sorted(options.sizes))
    found = measure(sizes)
    worst = {size: max(by_size[size] for by_size in found["medians"].values()) for size in sizes}
    result: dict[str, Any] = {
        "dagster": dg.__version__,
        "jobs": "synthetic records",
        **{f"tick_seconds_{size}": round(seconds, 4) for size, seconds in worst.items()},
        "flat": round(max(worst.values()) / worst[sizes[0]], 2),
        "first_tick_seconds": round(found["first"], 4),
        "sensors": {
            name: {str(size): round(seconds, 4) for size, seconds in by_size.items()}
            for name, by_size in found["medians"].items()
        },
    }
    tell("sensors", result, options.save)


if __name__ == "__main__":
    main()
