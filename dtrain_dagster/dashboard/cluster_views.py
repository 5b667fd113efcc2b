"""How a job is looked at with its cluster's own tools: Ray's dashboard, and the commands of SLURM, Kubernetes and Ray.

A run directory may hold anything: of it only names of this project's own form are used, and no address. Addresses,
hosts and namespaces are those of this orchestrator's own settings. What other programs' pages there are, whatever the
cluster, belongs in `job_links`. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.clusters.kubernetes.objects import LAUNCH as LAUNCH_LABEL
from dtrain_dagster.clusters.ray import ACTOR
from dtrain_dagster.clusters.supervision.engine import NAME_DIGITS, name_launch

MOST_IDS = 20
"""The most jobs of SLURM that a command names: those that were submitted last."""
_TOKEN = re.compile(r"[0-9a-z]{1,64}")
_SLURM_LOG = re.compile(r"slurm-(?P<launch>dtrain-[0-9a-z]+-l\d+)-n\d+-s\d+-(?P<id>\d{1,12})\.out")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlace:
    """Where the cluster of this orchestrator's settings is reached; "" for what is not set."""

    kind: str = ""
    """Its kind, see `dtrain_dagster.settings.cluster_kinds`."""
    slurm_host: str = ""
    namespace: str = ""
    """The namespace of Kubernetes."""
    kubeconfig: str = ""
    context: str = ""
    """The context of the kubeconfig."""
    ray_dashboard: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCommand:
    """A command that shows a job in the cluster's own words. It changes nothing."""

    command: str
    note: str
    """What it shows, and where it is given."""


def place_of_options(kind: str, options: Mapping[str, Any]) -> ClusterPlace:
    """Return the place of a cluster from the options of its engine (`dtrain_dagster.settings.engines`)."""
    return ClusterPlace(
        kind=kind,
        slurm_host=str(options.get("host") or "") if kind == "slurm" else "",
        namespace=str(options.get("namespace") or "") if kind == "kubernetes" else "",
        kubeconfig=str(options.get("kubeconfig") or "") if kind == "kubernetes" else "",
        context=str(options.get("context") or "") if kind == "kubernetes" else "",
        ray_dashboard=str(options.get("dashboard") or "").rstrip("/") if kind == "ray" else "",
    )


def launch_name(launch: Mapping[str, Any]) -> str:
    """Return the name with which the names of all jobs of a launch begin; "" where ``launch.json`` has none of this
    project's form."""
    token, number = launch.get("token"), launch.get("launch")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token[-NAME_DIGITS:]):
        return ""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 10**9:
        return ""
    return name_launch({"token": token, "launch": number})


def ray_page(place: ClusterPlace, launch: Mapping[str, Any]) -> str:
    """Return the address of a job's nodes on Ray's dashboard; "" where the job is none of Ray, or the address is not
    set."""
    is_there = launch.get("engine") == place.kind == "ray" and place.ray_dashboard and launch_name(launch)
    return f"{place.ray_dashboard}/#/actors" if is_there else ""


def cluster_commands(
    place: ClusterPlace, launch: Mapping[str, Any], logs: Iterable[str], runs: bool
) -> list[JobCommand]:
    """Return the commands that show a job's nodes. ``launch``: its ``launch.json``; ``logs``: the names of the files in
    its folder of logs, where SLURM's output tells ids; ``runs``: whether it has not ended."""
    name, kind = launch_name(launch), launch.get("engine")
    own = place if place.kind == kind else ClusterPlace()
    if not name:
        return []
    if kind == "slurm":
        return _slurm(own, name, logs, runs)
    if kind == "kubernetes":
        where = ["--kubeconfig", own.kubeconfig] if own.kubeconfig else []
        where += ["--context", own.context] if own.context else []
        where += ["--namespace", own.namespace] if own.namespace else []
        nodes = ["get", "jobs,pods", "--output=wide", "--selector", f"{LAUNCH_LABEL}={name}"]
        # Not `describe`: it gets each pod by its name, and the role of deploy/kubernetes may only list them.
        events = shlex.join(["kubectl", *where, "get", "events", "--sort-by=.lastTimestamp"])
        return [
            JobCommand(
                command=shlex.join(["kubectl", *where, *nodes]), note="its nodes, and the machines that they run on"
            ),
            JobCommand(command=f"{events} | grep {name}-", note="why a node waits or ended; kept for about an hour"),
        ]
    if kind == "ray":
        where = ["--address", own.ray_dashboard] if own.ray_dashboard else []
        return [
            JobCommand(
                command=shlex.join(["ray", "list", "actors", *where, "--filter", f"class_name={ACTOR}"]),
                note=f"its nodes are the actors {name}-…" + ("" if where else "; on a machine of the cluster"),
            )
        ]
    return []


def _slurm(place: ClusterPlace, name: str, logs: Iterable[str], runs: bool) -> list[JobCommand]:
    found = (match for log in logs if (match := _SLURM_LOG.fullmatch(log)) and match["launch"] == name)
    ids = sorted({int(match["id"]) for match in found})[-MOST_IDS:]
    all_ids = ",".join(map(str, ids))

    def given(*words: str) -> str:
        return shlex.join(["ssh", place.slurm_host, *words] if place.slurm_host else words)

    if not runs:
        return (
            [JobCommand(command=given("sacct", f"--jobs={all_ids}"), note="how its nodes ended, from the accounting")]
            if ids
            else []
        )
    all_mine = given("squeue", "--me", "--states=all", "--Format=JobID:12,Name:60,State:14,Reason:40")
    waiting = JobCommand(
        command=f"{all_mine} | grep {name}-",
        note="its nodes, those that wait included; as the user who submitted them",
    )
    if not ids:
        return [waiting]
    return [
        waiting,
        JobCommand(command=given("squeue", f"--jobs={all_ids}"), note="its nodes that have begun"),
        JobCommand(command=given("scontrol", "show", "job", str(ids[-1])), note="all of the node that began last"),
    ]
