"""What a job's page says of its cluster's own tools: from launch documents as the product writes them, and from no
other word of a run directory."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.clusters.kubernetes.objects import group_object, node_object
from dtrain_dagster.clusters.slurm import commands
from dtrain_dagster.clusters.supervision.engine import name_job
from dtrain_dagster.clusters.supervision.submit import LaunchSettings, describe_launch
from dtrain_dagster.dashboard.cluster_views import ClusterPlace, cluster_commands, launch_name, place_of_options
from dtrain_dagster.dashboard.job_facts import read_facts
from dtrain_dagster.dashboard.job_links import Places, links_of
from dtrain_dagster.settings.kubernetes import KubernetesSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings
from trainer.rundir import RunDir


def recorded(folder: Path, kind: str) -> dict[str, Any]:
    """The ``launch.json`` of a job of two nodes, as a cluster of this kind records it."""
    rundir = RunDir(str(folder / "jobs" / "mine"))
    spec = JobSpec(job_id="mine", run_dir=rundir.uri, command=("python", "-m", "trainer"), node_count=2, elastic=True)
    Path(rundir.uri).mkdir(parents=True, exist_ok=True)
    rundir.write_json(
        "launch.json", describe_launch(spec, Path(rundir.uri), rundir) | asdict(LaunchSettings(engine=kind))
    )
    return rundir.read_json("launch.json") or {}


def test_kubectl_selects_what_the_engine_has_labelled(tmp_path: Path) -> None:
    launch = recorded(tmp_path, "kubernetes")
    options = KubernetesSettings.of(
        {"image": "x", "namespace": "team a", "context": "gpu", "kubeconfig": "/my kube.yaml"}
    )
    place = place_of_options("kubernetes", options.options())
    shown = [shlex.split(item.command) for item in cluster_commands(place, launch, [], runs=True)]
    where = ["kubectl", "--kubeconfig", "/my kube.yaml", "--context", "gpu", "--namespace", "team a"]
    assert [words[:7] for words in shown] == [where] * 2
    key, value = shown[0][-1].split("=")
    assert name_job(launch, 1, 2).startswith(shown[1][-1]), "events are those of objects of such names"
    node = node_object(options, launch, 1, 2, ["python"], 30.0)
    for labelled in (node, node["spec"]["template"], group_object(options, launch, "/x")):
        assert labelled["metadata"]["labels"][key] == value
    elsewhere = cluster_commands(ClusterPlace(kind="slurm", slurm_host="login"), launch, [], runs=True)
    assert elsewhere[0].command == f"kubectl get jobs,pods --output=wide --selector {key}={value}"


def test_slurms_commands_name_the_jobs_that_the_engine_has_submitted(tmp_path: Path) -> None:
    launch = recorded(tmp_path, "slurm")
    place = place_of_options("slurm", {"host": "me@login"})
    [waiting] = cluster_commands(place, launch, ["node-0.log"], runs=True)
    pattern = waiting.command.rpartition("grep ")[2]
    submitted = commands.submit(SlurmSettings(), launch, 1, 1, "x")
    assert any(word.startswith(f"--job-name={pattern}") for word in submitted)
    assert waiting.command.startswith("ssh me@login squeue --me ")
    logs = [f"slurm-{name_job(launch, node, 1)}-{100 + node}.out" for node in (0, 1)]
    logs += [f"slurm-{name_job({**launch, 'launch': 9}, 0, 1)}-77.out", "slurm-x-5;reboot.out", "supervisor.log"]
    running = [item.command for item in cluster_commands(ClusterPlace(kind="slurm"), launch, logs, runs=True)]
    assert running[1:] == ["squeue --jobs=100,101", "scontrol show job 101"], "of this launch, and of no other"
    ended = [item.command for item in cluster_commands(ClusterPlace(kind="slurm"), launch, logs, runs=False)]
    assert ended == ["sacct --jobs=100,101"]
    assert cluster_commands(ClusterPlace(kind="slurm"), launch, [], runs=False) == []


def test_rays_dashboard_is_that_of_the_settings(tmp_path: Path) -> None:
    launch = recorded(tmp_path, "ray")
    options = RaySettings(cluster="ml/trainings").options()
    places = Places(cluster=place_of_options("ray", options))
    [link] = links_of(places, {}, {}, {}, launch)
    assert (link.label, link.url) == ("Ray's dashboard", "http://trainings-head-svc.ml.svc:8265/#/actors")
    assert name_job(launch, 0, 1).startswith(link.note.removeprefix("its nodes are the actors ").removesuffix("…"))
    [command] = cluster_commands(places.cluster, launch, [], runs=True)
    assert "--address http://trainings-head-svc.ml.svc:8265" in command.command
    hostile = {**launch, "dashboard": "http://evil.example", "ray_dashboard": "http://evil.example"}
    assert links_of(Places(cluster=ClusterPlace(kind="ray")), {}, {}, {}, hostile) == []
    assert "address" not in cluster_commands(ClusterPlace(kind="ray"), hostile, [], runs=True)[0].command
    assert links_of(places, {}, {}, {}, {**launch, "engine": "local"}) == []


@pytest.mark.parametrize(
    "change",
    [
        {"token": "x; rm -rf ~"}, {"token": "$(reboot)"}, {"token": ""}, {"token": None}, {"token": "A" * 40},
        {"launch": "1"}, {"launch": True}, {"launch": -1}, {"launch": 10**12}, {"engine": "local"}, {"engine": ["ray"]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_no_other_word_of_a_run_directory_becomes_part_of_a_command(
    tmp_path: Path, kind: str, change: dict[str, Any]
) -> None:
    launch = {**recorded(tmp_path, kind), **change}
    assert cluster_commands(ClusterPlace(kind=kind), launch, ["slurm-dtrain-x-l1-n0-s1-5.out"], runs=True) == []
    assert "engine" in change or launch_name(launch) == ""


def test_a_jobs_facts_have_them(tmp_path: Path) -> None:
    launch = recorded(tmp_path, "slurm")
    rundir = RunDir(str(tmp_path / "jobs" / "mine"))
    rundir.storage.write(f"logs/slurm-{name_job(launch, 0, 1)}-42.out", b"")
    facts = read_facts(rundir, "running", {}, None, Places(cluster=ClusterPlace(kind="slurm")))
    assert "scontrol show job 42" in [item["command"] for item in facts["commands"]]
    assert facts["damaged"] == []
