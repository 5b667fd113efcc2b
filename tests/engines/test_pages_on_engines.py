"""The blocks of commands of the pages on engines are run as they stand, each on a real engine.

What a page leaves to its reader is filled in: a partition, the size of a node, an address, an image.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from harness.engines.kubernetes_access import NAMESPACE, log_in, provide_claim
from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_image import IMAGE
from harness.engines.machines import Machines, Pods, missing, open_machines, variables
from tests.docs.checkout import make_checkout
from tests.docs.page import Page, run_in
from tests.dtrain_dagster.told_json import TOLD, fields_in
from tests.e2e.conftest import small_prices
from trainer.rundir import LAUNCH, RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]
SMALL = "DTRAIN_NODES=3 DTRAIN_THREADS_PER_RANK=1"
ONE_EPOCH = {"--nodes 3": "--nodes 3 --epochs 1"}
INSTALLING = "docs/installing.md"
ANY_ENGINE, SLURM, KUBERNETES, RAY = slice(4, 5), slice(5, 6), slice(6, 7), slice(8, 9)
"""Its blocks for an engine's users."""
OF_IMAGE = ("DTRAIN_NODE_PYTHON", "DTRAIN_KUBERNETES_OPTIONS")
"""Settings of a cluster without a registry and without Python in its images, which comes from the machine."""
OF_NODES = (
    "KUBECONFIG",
    "DTRAIN_KUBERNETES_IMAGE",
    "DTRAIN_KUBERNETES_VOLUMES",
    "DTRAIN_NODE_CPUS",
    "DTRAIN_NODE_MEMORY_GIB",
)
LITTLE = "export DTRAIN_PRICES=$PWD/../my_prices.csv"
"""Prices of four tickers."""


def exported(*names: str) -> str:
    """Return the command that sets these variables."""
    return "export " + " ".join(f"{name}='{{{name}}}'" for name in names)


PAGES: dict[str, list[Page]] = {
    "slurm": [
        Page(INSTALLING, filled={
            "DTRAIN_NODES=4": SMALL, "DTRAIN_SLURM_PARTITION=gpu": "DTRAIN_SLURM_PARTITION=main",
            "DTRAIN_NODE_GPUS=1": "DTRAIN_NODE_GPUS=0", "DTRAIN_NODE_CPUS=8": "DTRAIN_NODE_CPUS=1",
            "DTRAIN_NODE_MEMORY_GIB=32": "DTRAIN_NODE_MEMORY_GIB=1",
            "time_limit_minutes=240": "time_limit_minutes=60"}, blocks=SLURM),
        Page(INSTALLING, filled=ONE_EPOCH, blocks=ANY_ENGINE),
    ],
    "ray": [
        Page(INSTALLING, filled={
            "ray start --head  ": "export DTRAIN_RAY_ADDRESS={DTRAIN_RAY_ADDRESS}  ", "DTRAIN_NODES=4": SMALL,
            "DTRAIN_NODE_CPUS=8": "DTRAIN_NODE_CPUS=1", "DTRAIN_NODE_GPUS=1": "DTRAIN_NODE_GPUS=0"},
            blocks=RAY, left_out={"pip install 'dtrain[ray]'": "asks a package index"}),
        Page(INSTALLING, "export DTRAIN_RAY_ADDRESS={DTRAIN_RAY_ADDRESS}", {
            "DTRAIN_CLUSTER=slurm": "DTRAIN_CLUSTER=ray", **ONE_EPOCH}, ANY_ENGINE),
    ],
    "kubernetes": [
        Page(INSTALLING, f"{exported('KUBECONFIG', *OF_IMAGE)}\n{LITTLE}", {
            "DTRAIN_NODES=4": SMALL, "DTRAIN_HOME=/data/dtrain": "DTRAIN_HOME=$PWD/.dtrain",
            "registry.example/dtrain-nodes:1": "{DTRAIN_KUBERNETES_IMAGE}",
            "pvc:shared:/data": "{DTRAIN_KUBERNETES_VOLUMES}", "DTRAIN_NODE_GPUS=1": "DTRAIN_NODE_GPUS=0",
            "DTRAIN_NODE_CPUS=8": "DTRAIN_NODE_CPUS=0.1",
            "DTRAIN_NODE_MEMORY_GIB=32": "DTRAIN_NODE_MEMORY_GIB=1"}, KUBERNETES),
        Page(INSTALLING, exported(*OF_NODES, *OF_IMAGE), {
            "DTRAIN_CLUSTER=slurm": "DTRAIN_CLUSTER=kubernetes", **ONE_EPOCH}, ANY_ENGINE),
    ],
}  # fmt: skip
"""The pages of an engine, in the order in which they are run in one home. ``{DTRAIN_…}`` in what is filled in is the
value by which the engine is reached."""
ADMINISTRATOR = Page(
    INSTALLING, "export KUBECONFIG={kubeconfig} PATH={tools}:$PATH", blocks=slice(7, 8),
    left_out={"docker build ": "needs a Docker engine"},
)  # fmt: skip
"""What prepares a Kubernetes. `deploy` does the same for all other tests."""


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[Machines, dict[str, str], Path]]:
    """An engine, the variables by which it is reached, and a copy of the repository beside it."""
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        options = machines.options(folder)
        values = variables(kind, options)
        if isinstance(machines, Pods):
            small_prices(folder)
            provide_claim(machines.cluster, "shared", folder)
            of_image = [one for one in options["volumes"] if one["read_only"]]
            read = variables(kind, {"volumes": of_image})
            values["DTRAIN_KUBERNETES_VOLUMES"] = f"pvc:shared:{folder},{read['DTRAIN_KUBERNETES_VOLUMES']}"
        yield machines, values, make_checkout(folder / "dtrain")


def test_an_administrators_block_prepares_a_kubernetes(tmp_path: Path) -> None:
    """A cluster that has nothing of ours takes nodes after it."""
    if why := missing("kubernetes"):
        pytest.skip(why)
    checkout = make_checkout(tmp_path / "dtrain")
    with KubernetesCluster(nodes=1) as cluster:
        with pytest.raises(HTTPError, match="not found"):
            cluster.ask("GET", f"/api/v1/namespaces/{NAMESPACE}")
        values = {"kubeconfig": str(cluster.kubeconfig), "tools": str(cluster.programs / "bin")}
        heading, *made = run_in(checkout, ADMINISTRATOR.script(values)).splitlines()
        assert (heading, len(made)) == ("=== block 1", 6), made
        assert all(line.endswith(" created") for line in made), made
        own = exported("KUBECONFIG", "DTRAIN_KUBERNETES_IMAGE").format(
            KUBECONFIG=log_in(cluster), DTRAIN_KUBERNETES_IMAGE=IMAGE
        )
        assert "takes nodes from this identity" in run_in(checkout, f"{own}\ndtrain doctor")


@pytest.mark.parametrize("kind", PAGES)
def test_the_blocks_of_the_pages_run(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (machines, values, checkout):
        for page in PAGES[kind]:
            run_in(checkout, page.script(values))
        jobs = [RunDir(str(folder)) for folder in (checkout / ".dtrain" / "storage" / "jobs").iterdir()]
        assert len(jobs) >= 1 + len(PAGES[kind]), "a probe, and a training of each page"
        for rundir in jobs:
            launch = rundir.read_json(LAUNCH) or {}
            assert launch["engine"] == kind, rundir.uri
            assert {node.node_id for node in rundir.nodes()} == set(range(3)), rundir.uri
            assert all(job.state == "ended" for job in machines.jobs(launch)), rundir.uri
        settings = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        answer = json.loads(run_in(checkout, f"{settings}dtrain doctor --json 2>said.txt"))
        assert fields_in("dtrain doctor", [answer]) <= set(TOLD["dtrain doctor"])
        assert answer["counts"]["ok"], answer
