"""The blocks of commands of the pages on engines are run as they stand, each on a real engine.

What a page leaves to its reader is filled in: a partition, the size of a node, an address, an image.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.checkout import make_checkout
from tests.docs.page import Page, run_in
from tests.dtrain_dagster.told_json import TOLD, fields_in
from tests.engines.machines import Machines, missing, open_machines, variables
from trainer.rundir import LAUNCH, RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]
SMALL = "DTRAIN_NODES=3 DTRAIN_THREADS_PER_RANK=1"
ONE_EPOCH = {"--nodes 3": "--nodes 3 --epochs 1"}
PAGES: dict[str, list[Page]] = {
    "slurm": [
        Page("docs/slurm.md", filled={
            "DTRAIN_NODES=4": SMALL, "DTRAIN_SLURM_PARTITION=gpu": "DTRAIN_SLURM_PARTITION=main",
            "DTRAIN_SLURM_GPUS=1": "DTRAIN_SLURM_GPUS=0", "DTRAIN_SLURM_CPUS=8": "DTRAIN_SLURM_CPUS=1",
            "DTRAIN_SLURM_MEMORY=32G": "DTRAIN_SLURM_MEMORY=1G",
            "DTRAIN_SLURM_TIME_LIMIT_MINUTES=240": "DTRAIN_SLURM_TIME_LIMIT_MINUTES=60"}),
        Page("docs/clusters.md", filled=ONE_EPOCH),
    ],
    "ray": [
        Page("docs/ray.md", filled={
            "ray start --head  ": "export DTRAIN_RAY_ADDRESS={DTRAIN_RAY_ADDRESS}  ", "DTRAIN_NODES=4": SMALL,
            "DTRAIN_RAY_CPUS=8": "DTRAIN_RAY_CPUS=1", "DTRAIN_RAY_GPUS=1": "DTRAIN_RAY_GPUS=0"},
            left_out={"pip install 'dtrain[ray]'": "asks a package index"}),
        Page("docs/clusters.md", "export DTRAIN_RAY_ADDRESS={DTRAIN_RAY_ADDRESS}", {
            "DTRAIN_CLUSTER=slurm": "DTRAIN_CLUSTER=ray", **ONE_EPOCH}),
    ],
}  # fmt: skip
"""The pages of an engine, in the order in which they are run in one home. ``{DTRAIN_…}`` in what is filled in is the
value by which the engine is reached."""


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[Machines, dict[str, str], Path]]:
    """An engine, the variables by which it is reached, and a copy of the repository beside it."""
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        values = variables(kind, machines.options(folder))
        yield machines, values, make_checkout(folder / "dtrain")


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
        words = f"dtrain {kind} check"
        settings = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        answer = json.loads(run_in(checkout, f"{settings}{words} --json 2>said.txt"))
        assert fields_in(words, [answer]) == set(TOLD[words])
        assert answer["usable"], answer
