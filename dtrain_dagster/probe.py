"""A short run of the very training that is planned, on the very cluster: what the estimate rests on, and a rehearsal.

The probe goes through all that the training will go through (data, model, steps, evaluation, checkpoint, report), so a
model that raises or a disk that is full shows here, before the training is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobState
from dtrain_dagster.costs.estimate import Probe
from dtrain_dagster.jobs import follow_job, start_job
from trainer.config import JobConfig, TrackingConfig
from trainer.rundir import RESULT, NodePresence, RunDir

PROBE_STEPS = 24
LOG_EVERY = 2


def probe_job(job: JobConfig, jobs_uri: str, mark: str) -> JobConfig:
    """The same training, cut to ``PROBE_STEPS`` steps and one evaluation, tracked nowhere.

    ``mark`` tells what was measured from what would be measured anew: the training, and what it runs on.
    """
    job_id = f"probe-{mark}"
    training = replace(
        job.training,
        max_steps=min(PROBE_STEPS, job.training.max_steps or PROBE_STEPS),
        eval_frequency=PROBE_STEPS,
        checkpoint_frequency=PROBE_STEPS,
        log_frequency=LOG_EVERY,
    )
    tracking = TrackingConfig(tensorboard=False)
    return replace(job, job_id=job_id, run_dir=f"{jobs_uri}/{job_id}", training=training, tracking=tracking)


def measure(
    manager: GPUClusterManager, job: JobConfig, node_count: int, processes_per_node: int, env: dict[str, str]
) -> tuple[Probe, bool]:
    """Run the probe, or read the one that was run before: (what it took, whether it ran now)."""
    ran = run(manager, job, node_count, processes_per_node, env)
    rundir = RunDir(job.run_dir)
    return read_probe(list(rundir.events()), rundir.nodes()), ran


def run(
    manager: GPUClusterManager, job: JobConfig, node_count: int, processes_per_node: int, env: dict[str, str]
) -> bool:
    """Carry out a short job, and wait for its end; False if it had been carried out before.

    Raises `ClusterError` with the job's own message where it fails.
    """
    rundir = RunDir(job.run_dir)
    done = rundir.read_json(RESULT)
    if done and done["status"] == "succeeded":
        return False
    start_job(manager, job, node_count, processes_per_node, env)
    try:
        status, _ = list(follow_job(manager, rundir, job.job_id))[-1]
    except BaseException:
        manager.cancel_job(job.job_id)
        raise
    if status.state is not JobState.SUCCEEDED:
        raise ClusterError(f"job {job.job_id}, a short run to measure this training, {status.state}: {status.message}")
    return True


def of_last_launch(
    events: Sequence[dict[str, Any]], nodes: Sequence[NodePresence]
) -> tuple[list[dict[str, Any]], list[NodePresence]]:
    """What belongs to the last launch. It is the time that tells: events' generations count regroups, not launches."""
    launch = max(node.launch for node in nodes)
    nodes = [node for node in nodes if node.launch == launch]
    begin = min(node.started_at for node in nodes)
    return [item for item in events if item["time"] >= begin], nodes


def read_probe(events: Sequence[dict[str, Any]], nodes: Sequence[NodePresence]) -> Probe:
    """What a finished short run took, from its records: those of the last launch. Pure."""
    events, nodes = of_last_launch(events, nodes)
    begin = min(node.started_at for node in nodes)
    steps = [item for item in events if item["kind"] == "step"]
    evaluations = [item["seconds"] for item in events if item["kind"] == "evaluation" and item["split"] == "valid"]
    checkpoints = [
        item["stall_seconds"] for item in events if item["kind"] == "checkpoint"
    ]  # the rest is in the background
    end = max(node.ended_at or node.started_at for node in nodes)
    step_seconds = tuple(item["step_seconds"] for item in steps)
    first_step = steps[0]["time"] - step_seconds[0] * LOG_EVERY
    return Probe(
        startup_seconds=max(0.0, first_step - begin),
        step_seconds=step_seconds[1:] or step_seconds,  # the first stretch warms caches up
        evaluation_seconds=max(evaluations, default=0.0),
        checkpoint_seconds=max(checkpoints, default=0.0),
        finish_seconds=max(0.0, end - steps[-1]["time"] - sum(evaluations) - sum(checkpoints)),
    )
