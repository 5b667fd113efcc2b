"""A dry run prints what the engine then gets: both come from one function, and secrets are struck out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dtrain_dagster.clusters.base import ClusterError, JobSpec
from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.managers import EngineClusterManager, LocalClusterManager, open_engine
from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.submission import DRAWN, masked, shell_line, yaml_text
from dtrain_dagster.clusters.supervision.engine import agent_command
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from dtrain_dagster.settings.kubernetes import CONTAINER, KubernetesSettings
from dtrain_dagster.settings.ray import RaySettings
from dtrain_dagster.settings.slurm import SlurmSettings
from dtrain_dagster.support.secrets import STRUCK

LAUNCH = {
    "job_id": "night", "launch": 1, "token": "d" * 16 + DRAWN, "node_count": 3, "processes_per_node": 2,
    "command": ["python", "-m", "trainer", "--api-key", "very-secret"],
    "env": {"PYTHONPATH": "/shared/code", "API_KEY": "very-secret"},
}  # fmt: skip


def agent(launch: Mapping[str, Any], node_id: int, incarnation: int) -> list[str]:
    return agent_command(launch, "/shared/jobs/night", "/home/me/secrets/night", node_id, incarnation)


def without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("# "))


def test_slurm_gets_the_command_and_the_script_that_were_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlurmEngine(SlurmSettings(partition="gpu", gpus=2, setup="module load cuda"), str(tmp_path), agent)
    asked: list[tuple[list[str], str]] = []

    def run(command: list[str], what: str = "", given: str = "") -> str:
        if command[0] != "sbatch":
            return ""
        asked.append((command, given))
        return "41"

    monkeypatch.setattr(engine, "run", run)
    [request] = engine.describe(LAUNCH)
    engine.submit(LAUNCH, 0, 1)
    command, script = asked[-1]
    line, _, rest = request.text.partition(" << 'BATCH'\n")
    assert shlex.split(line) == command
    assert rest.partition("BATCH\n")[0] == script
    engine.submit(LAUNCH, 2, 1)
    other, of_other = asked[-1]
    told = "nodes 1 to 2: the same, with --node K, and -nK- in their names"
    assert told in request.text
    assert [word.replace("-n2-", "-n0-") for word in other] == command
    assert of_other.replace("--node 2", "--node 0") == script
    assert "very-secret" not in request.text
    assert request.text.count(STRUCK) == 2, "of the variable, and of the argument"


def test_kubernetes_gets_the_manifests_that_were_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = {
        "spec": {"containers": [{"name": CONTAINER, "env": [{"name": "WANDB_API_KEY", "value": "very-secret"}]}]}
    }
    options = KubernetesSettings(image="registry/dtrain:1", pod_template=template, gpus=1)
    engine = KubernetesEngine(options, "/shared/jobs/night", agent)
    made: list[dict[str, Any]] = []

    def create(space: str, body: dict[str, Any], **raw: Any) -> None:
        made.append(body)

    monkeypatch.setitem(engine.__dict__, "_batch", SimpleNamespace(create_namespaced_job=create))
    text = "".join(request.written() for request in engine.describe(LAUNCH))
    for node in range(3):
        engine.submit(LAUNCH, node, 1)
    printed = list(yaml.safe_load_all(text))
    assert [item["kind"] for item in printed] == ["Job", "Job", "Job"]
    assert printed == [masked(item) for item in made]
    assert "very-secret" not in text
    [container] = printed[0]["spec"]["template"]["spec"]["containers"]
    assert {"name": "WANDB_API_KEY", "value": STRUCK} in container["env"]


def test_ray_gets_the_actor_that_was_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RayEngine(RaySettings(gpus=1, memory_gib=2.0, resources={"fast": 1.0}), str(tmp_path), agent)
    asked: list[dict[str, Any]] = []

    def ask(do: str, **given: Any) -> str:
        asked.append(given)
        return "name"

    monkeypatch.setattr(engine, "_ask", ask)
    [request] = engine.describe(LAUNCH)
    assert not (tmp_path / "logs").exists(), "nothing is made"
    engine.submit(LAUNCH, 0, 1)
    assert json.loads(without_comments(request.text)) == {"class": "DtrainNode"} | {
        name: value for name, value in asked[0].items() if name != "excluded"
    }
    options = asked[0]["options"]
    assert (options["num_cpus"], options["num_gpus"], options["memory"]) == (1.0, 1.0, 2.0 * 2**30)
    assert (options["resources"], options["lifetime"]) == ({"fast": 1.0}, "detached")
    assert "very-secret" not in request.text


def engines(tmp_path: Path) -> Iterator[EngineClusterManager]:
    for kind, options in (
        ("slurm", SlurmSettings().model_dump()),
        ("kubernetes", KubernetesSettings(image="registry/dtrain:1").model_dump()),
        ("ray", RaySettings().model_dump()),
    ):
        yield EngineClusterManager(tmp_path / kind, LaunchSettings(engine=kind), options)


def test_options_of_another_version_are_refused() -> None:
    with pytest.raises(ClusterError, match="cpu, memory: no options of kubernetes in this version"):
        open_engine("kubernetes", {"image": "registry/dtrain:1", "cpu": "8", "memory": "32Gi"}, "", "")


def test_a_dry_run_makes_no_file_on_any_engine(tmp_path: Path) -> None:
    for manager in [*engines(tmp_path), LocalClusterManager(tmp_path / "local")]:
        run_dir = f"{manager.home}/storage/jobs/night"
        spec = JobSpec(job_id="night", run_dir=run_dir, command=("python", "x.py"), node_count=2, env={"A": "1"})
        requests = manager.describe_submission(spec, "Standard_NC6s_v3", {"model": {"factory": "mlp"}})
        assert requests[0].text
        assert not manager.home.exists()


def test_the_launch_that_is_shown_is_the_launch_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = next(engines(tmp_path))
    run_dir = f"{manager.home}/storage/jobs/night"
    spec = JobSpec(job_id="night", run_dir=run_dir, command=("python", "x.py"), node_count=2, env={"A": "1"})
    shown: list[Mapping[str, Any]] = []
    monkeypatch.setattr(manager, "preview_launch", lambda launch, *_: shown.append(launch) or [])
    monkeypatch.setattr("dtrain_dagster.clusters.managers.start_supervisor", lambda launch, *_: shown.append(launch))
    manager.describe_submission(spec, "Standard_NC6s_v3", None)
    manager.submit_job(spec)
    dry, real = ({name: value for name, value in each.items() if name != "submitted_at"} for each in shown)
    assert dry["token"].endswith(DRAWN)
    assert dry == real | {"token": dry["token"]}
    assert Path(real["env"]["PYTHONPATH"]).is_dir()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"kind": "Secret", "data": {"a": "b"}}, {"kind": "Secret", "data": {"a": STRUCK}}),
        ([{"name": "DB_PASSWORD", "value": "x"}], [{"name": "DB_PASSWORD", "value": STRUCK}]),
        ({"env": {"HF_TOKEN": "x", "PLAIN": "y"}}, {"env": {"HF_TOKEN": STRUCK, "PLAIN": "y"}}),
        ({"url": "https://u:pw12345@host/x"}, {"url": f"https://u:{STRUCK}@host/x"}),
    ],
)
def test_secrets_are_struck_out_of_documents(document: Any, expected: Any) -> None:
    assert masked(document) == expected
    assert yaml.safe_load(yaml_text(document)) == expected


def test_secrets_are_struck_out_of_commands() -> None:
    line = shell_line(["python", "x.py", "--token", "abcdef123"], {"API_KEY": "zzz", "A": "b c"})
    assert line == f"env 'API_KEY={STRUCK}' 'A=b c' python x.py --token {STRUCK}"
