"""What a dry run prints is taken by the real engines, and is what they then have of the job."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.supervision.engine import name_job
from harness.engines.kubernetes_access import NAMESPACE
from harness.engines.machines import Machines, Pods, Slurmds, missing, open_machines, variables
from trainer.rundir import LAUNCH, RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["slurm", "ray", "kubernetes"])
def test_what_is_printed_is_what_the_engine_has(kind: str, tmp_path: Path) -> None:
    if why := missing(kind):
        pytest.skip(why)
    home, script = tmp_path / "home", tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(120)\n")
    with open_machines(kind) as machines, pytest.MonkeyPatch.context() as patch:
        options = machines.options(tmp_path)
        options |= {"extra": " ".join(options["extra"])} if "extra" in options else {}
        for name, value in variables(kind, options).items():
            patch.setenv(name, value)
        patch.setenv("DTRAIN_CLUSTER", kind)
        patch.setenv("DTRAIN_HOME", str(home))
        words = ["launch", "--nodes", "2", "--name", "night"]
        dry = CliRunner().invoke(main, [*words, "--dry-run", str(script)])
        assert dry.exit_code == 0, dry.output
        assert f"ok: {kind}: " in dry.stderr
        assert not home.exists(), "nothing is left"
        before = machines.all_jobs()
        CHECK_TEXT[kind](machines, dry.stdout)
        assert machines.all_jobs() == before
        real = CliRunner().invoke(main, [*words, "--detach", str(script)])
        assert real.exit_code == 0, real.output
        try:
            launch = RunDir(f"{home}/storage/jobs/night").read_json(LAUNCH) or {}
            deadline = time.monotonic() + 60
            while len(machines.jobs(launch)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            text = dry.stdout.replace("0" * 24, launch["token"][-24:])
            CHECK_JOBS[kind](machines, text, [name_job(launch, node, 1) for node in range(2)])
        finally:
            CliRunner().invoke(main, ["cancel", "night"])


def sbatch_takes(machines: Machines, text: str) -> None:
    assert isinstance(machines, Slurmds)
    done = subprocess.run(
        ["sh"], input=text.replace("sbatch ", "sbatch --test-only ", 1), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def slurm_has(machines: Machines, text: str, names: list[str]) -> None:
    assert isinstance(machines, Slurmds)
    printed = text.partition(" << 'BATCH'\n")[2].partition("BATCH\n")[0]
    for node, name in enumerate(names):
        [job_id] = machines.cluster.ask("squeue", "--noheader", f"--name={name}", "--Format=JobID:20").split()
        script = machines.cluster.ask("scontrol", "write", "batch_script", job_id, "-")
        assert script.strip() == printed.replace("--node 0", f"--node {node}").strip()
        about = machines.cluster.ask("scontrol", "show", "job", job_id)
        assert f"JobName={name}" in about
        assert "Requeue=0" in about


def kubectl_takes(machines: Machines, text: str) -> None:
    assert isinstance(machines, Pods)
    cluster = machines.cluster
    command = [str(cluster.programs / "bin" / "kubectl"), f"--kubeconfig={cluster.kubeconfig}", "apply"]
    done = subprocess.run(
        [*command, "--dry-run=server", "-f", "-"], input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("created (server dry run)") == 2


def kubernetes_has(machines: Machines, text: str, names: list[str]) -> None:
    assert isinstance(machines, Pods)
    jobs, space = list(yaml.safe_load_all(text)), f"namespaces/{NAMESPACE}"
    assert [job["metadata"]["name"] for job in jobs] == names
    for job in jobs:
        found = machines.cluster.ask("GET", f"/apis/batch/v1/{space}/jobs/{job['metadata']['name']}")
        assert json.dumps(part_of(job, found), indent=1) == json.dumps(job, indent=1), "only defaults are added"


def part_of(wanted: Any, found: Any) -> Any:
    """What of a document stands where another has something. The cluster leaves out what is empty or false."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return {name: part_of(value, found.get(name)) for name, value in wanted.items()}
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) <= len(found):
        return [part_of(one, other) for one, other in zip(wanted, found, strict=False)]
    return wanted if (found is None and not wanted) or _is_same_quantity(wanted, found) else found


def _is_same_quantity(one: Any, other: Any) -> bool:
    """Whether both are the same amount of a resource, such as 0.1 and 100m."""
    from kubernetes.utils.quantity import parse_quantity  # not above: every worker would load the client

    try:
        return bool(parse_quantity(one) == parse_quantity(other))
    except (TypeError, ValueError):
        return False


def ray_takes(machines: Machines, text: str) -> None:
    actor = json.loads("\n".join(line for line in text.splitlines() if not line.startswith("# ")))
    assert actor["class"] == "DtrainNode"


def ray_has(machines: Machines, text: str, names: list[str]) -> None:
    actor = json.loads("\n".join(line for line in text.splitlines() if not line.startswith("# ")))
    found = {each["name"]: each for each in machines.asked._ask("list_actors", prefix=names[0][:-6])["actors"]}  # type: ignore[attr-defined]
    assert set(found) == set(names)
    assert actor["options"]["name"] == names[0]
    assert found[names[0]]["demand"]["CPU"] == actor["options"]["num_cpus"] == 2.0
    assert "night" in actor["output"]


CHECK_TEXT: dict[str, Callable[[Machines, str], None]] = {
    "slurm": sbatch_takes,
    "kubernetes": kubectl_takes,
    "ray": ray_takes,
}
CHECK_JOBS: dict[str, Callable[[Machines, str, list[str]], None]] = {
    "slurm": slurm_has,
    "kubernetes": kubernetes_has,
    "ray": ray_has,
}
