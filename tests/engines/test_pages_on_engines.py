"""The blocks of commands of the pages on engines are run as they stand, each on a real engine.

What a page leaves to its reader is filled in: a partition, the size of a node, an address, an image.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import pytest

from tests.docs.blocks import ROOT, read_blocks
from tests.docs.checkout import environment_in, make_checkout
from tests.dtrain_dagster.told_json import TOLD, fields_in
from tests.engines.kubernetes_access import NAMESPACE, log_in, provide_claim
from tests.engines.kubernetes_cluster import KubernetesCluster
from tests.engines.kubernetes_image import IMAGE
from tests.engines.machines import Machines, Pods, missing, open_machines, variables
from trainer.rundir import LAUNCH, RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]


class Page(NamedTuple):
    """Blocks of a page, and what makes their commands ones that can be run here."""

    name: str
    filled: Mapping[str, str] = {}
    """Parts of the page, and what is written instead. ``{DTRAIN_…}`` is the value by which the engine is reached."""
    before: str = ""
    """Commands that are run first, with the same values."""
    blocks: slice = slice(None)

    def script(self, values: Mapping[str, str]) -> str:
        """Return the commands of the page. AssertionError if it has lost a part that is filled in."""
        text = (ROOT / "docs" / self.name).read_text()
        for old, new in self.filled.items():
            assert old in text, f"{old!r} is no longer in {self.name}"
            text = text.replace(old, new.format_map(values))
        commands = [block.script for block in read_blocks(text)[self.blocks]]
        assert commands, f"{self.name} has no such block"
        return "\n".join([self.before.format_map(values), *commands])


SMALL = "DTRAIN_NODES=3 DTRAIN_THREADS_PER_RANK=1"
ONE_EPOCH = {"--nodes 3": "--nodes 3 --epochs 1"}
OF_IMAGE = ("PULL_POLICY", "PYTHON", "USER")
"""Settings of a cluster without a registry and without Python in its images, which comes from the machine."""


def exported(*names: str) -> str:
    """Return the command that sets these variables of Kubernetes."""
    return "export " + " ".join(f"DTRAIN_KUBERNETES_{name}={{DTRAIN_KUBERNETES_{name}}}" for name in names)


PAGES: dict[str, list[Page]] = {
    "slurm": [
        Page("slurm.md", {
            "DTRAIN_NODES=4": SMALL, "DTRAIN_SLURM_PARTITION=gpu": "DTRAIN_SLURM_PARTITION=main",
            "DTRAIN_SLURM_GPUS=1": "DTRAIN_SLURM_GPUS=0", "DTRAIN_SLURM_CPUS=8": "DTRAIN_SLURM_CPUS=1",
            "DTRAIN_SLURM_MEMORY=32G": "DTRAIN_SLURM_MEMORY=1G",
            "DTRAIN_SLURM_TIME_LIMIT_MINUTES=240": "DTRAIN_SLURM_TIME_LIMIT_MINUTES=60"}),
        Page("clusters.md", ONE_EPOCH),
    ],
    "ray": [
        Page("ray.md", {
            "pip install 'dtrain[ray]'  ": "python -c 'import ray'  ",
            "ray start --head  ": "export DTRAIN_RAY_ADDRESS={DTRAIN_RAY_ADDRESS}  ", "DTRAIN_NODES=4": SMALL,
            "DTRAIN_RAY_CPUS=8": "DTRAIN_RAY_CPUS=1", "DTRAIN_RAY_GPUS=1": "DTRAIN_RAY_GPUS=0"}),
        Page("clusters.md", {"DTRAIN_CLUSTER=slurm": "DTRAIN_CLUSTER=ray", **ONE_EPOCH},
             "export DTRAIN_RAY_ADDRESS={DTRAIN_RAY_ADDRESS}"),
    ],
    "kubernetes": [
        Page("kubernetes.md", {
            "DTRAIN_NODES=4": SMALL, "DTRAIN_HOME=/data/dtrain": "DTRAIN_HOME=$PWD/.dtrain",
            "registry.example/dtrain-nodes:1": "{DTRAIN_KUBERNETES_IMAGE}",
            "pvc:shared:/data": "{DTRAIN_KUBERNETES_VOLUMES}", "DTRAIN_KUBERNETES_GPUS=1": "DTRAIN_KUBERNETES_GPUS=0",
            "DTRAIN_KUBERNETES_CPU=8": "DTRAIN_KUBERNETES_CPU=100m",
            "DTRAIN_KUBERNETES_MEMORY=32Gi": "DTRAIN_KUBERNETES_MEMORY=1Gi"},
            exported("KUBECONFIG", *OF_IMAGE), slice(1)),
        Page("clusters.md", {"DTRAIN_CLUSTER=slurm": "DTRAIN_CLUSTER=kubernetes", **ONE_EPOCH},
             exported("KUBECONFIG", "IMAGE", "VOLUMES", "CPU", "MEMORY", *OF_IMAGE)),
    ],
}  # fmt: skip
"""The pages of an engine, in the order in which they are run in one home. The block for the administrator of a
Kubernetes has a test of its own."""


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[Machines, dict[str, str], Path]]:
    """An engine, the variables by which it is reached, and a copy of the repository beside it."""
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind, nodes=3) as machines:
        options = machines.options(folder)
        values = variables(kind, options)
        if isinstance(machines, Pods):
            provide_claim(machines.cluster, "shared", folder)
            of_image = [one for one in options["volumes"] if one["read_only"]]
            read = variables(kind, {"volumes": of_image})
            values["DTRAIN_KUBERNETES_VOLUMES"] = f"pvc:shared:{folder},{read['DTRAIN_KUBERNETES_VOLUMES']}"
        yield machines, values, make_checkout(folder / "dtrain")


def run(checkout: Path, script: str, **variables: str) -> str:
    """Run commands as in a shell of the checkout with these variables, and return what they print."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nexport PATH=$PWD/.venv/bin:$PATH\n{script}"],
        cwd=checkout, env=environment_in(checkout) | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_an_administrators_block_prepares_a_kubernetes(tmp_path: Path) -> None:
    """A cluster that has nothing of ours takes nodes after it. The image is left out: no Docker engine can run here."""
    if why := missing("kubernetes"):
        pytest.skip(why)
    checkout = make_checkout(tmp_path / "dtrain")
    _, administrators = read_blocks((ROOT / "docs" / "kubernetes.md").read_text())
    [apply] = [line for line in administrators.script.splitlines() if not line.startswith("docker build ")]
    with KubernetesCluster(nodes=1) as cluster:
        with pytest.raises(HTTPError, match="not found"):
            cluster.ask("GET", f"/api/v1/namespaces/{NAMESPACE}")
        said = run(
            checkout, f"export PATH={cluster.programs / 'bin'}:$PATH\n{apply}", KUBECONFIG=str(cluster.kubeconfig)
        )
        assert said.count(" created") == len(said.splitlines()) == 6, said
        own = {"DTRAIN_KUBERNETES_KUBECONFIG": str(log_in(cluster)), "DTRAIN_KUBERNETES_IMAGE": IMAGE}
        assert "takes nodes from this identity" in run(checkout, "dtrain kubernetes check", **own)


@pytest.mark.parametrize("kind", PAGES)
def test_the_blocks_of_the_pages_run(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (machines, values, checkout):
        for page in PAGES[kind]:
            run(checkout, page.script(values))
        jobs = [RunDir(str(folder)) for folder in (checkout / ".dtrain" / "storage" / "jobs").iterdir()]
        assert len(jobs) >= 1 + len(PAGES[kind]), "a probe, and a training of each page"
        for rundir in jobs:
            launch = rundir.read_json(LAUNCH) or {}
            assert launch["engine"] == kind, rundir.uri
            assert {node.node_id for node in rundir.nodes()} == set(range(3)), rundir.uri
            assert all(job.state == "ended" for job in machines.jobs(launch)), rundir.uri
        words = f"dtrain {kind} check"
        answer = json.loads(run(checkout, f"{words} --json 2>{tmp_path}/said", **values))
        assert fields_in(words, [answer]) == set(TOLD[words])
        assert answer["usable"], answer
