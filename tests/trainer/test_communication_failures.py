"""Communication that fails although nobody is lost: retries, parameter-server mode and the way back (D3); TLS (D6)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import Job

from trainer.membership import generations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NewJob = Callable[..., Job]


def start_nodes(job: Job, faults: list[dict[str, Any]] = (), nodes: int = 3) -> Job:  # type: ignore[assignment]
    """Each process is a node of its own, as a cluster starts it."""
    path = job.write()
    for node in range(nodes):
        environment = {
            **os.environ,
            **job.environment,
            "RANK": str(node),
            "LOCAL_RANK": "0",
            "NODE_RANK": str(node),
            "WORLD_SIZE": str(nodes),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # of no use: members find each other through the run directory
            "DTRAIN_LAUNCH": "1",
            "DTRAIN_FAULTS": json.dumps(list(faults)),
        }
        with open(job.run_dir / f"log-{node}.txt", "a") as log:
            command = [sys.executable, "-m", "trainer", "--config", str(path)]
            job.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0))  # type: ignore[arg-type]
    return job


def weights(job: Job) -> dict[str, torch.Tensor]:
    return torch.load(job.run_dir / "model" / "weights.pt", weights_only=True)


def assert_same_training(job: Job, whole: Job) -> None:
    """Weights within 1e-5, and the very same samples."""
    mine, theirs = weights(job), weights(whole)
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, rtol=1e-5, atol=1e-6), name
    assert job.result()["consumed"] == whole.result()["consumed"]


@pytest.fixture(scope="module")
def whole(dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The training that nothing disturbed."""
    job = Job(tmp_path_factory.mktemp("whole"), dataset, environment={"DTRAIN_CACHE": str(cache)})
    assert job.run_here() == 0, job.result()
    return job


def test_a_step_is_retried_then_goes_through_one_rank_and_all_reduce_comes_back(new_job: NewJob, whole: Job) -> None:
    """Node 1 comes too late to its all-reduce four times in a row; nobody is lost."""
    late = {"kind": "sleep", "at": "all_reduce", "step": 7, "node": 1, "seconds": 2.5}
    job = new_job(
        collective_timeout_seconds=1, peer_timeout_seconds=15, health_check_seconds=1, allreduce_retry_seconds=0.2
    )
    start_nodes(job, [late] * 4)
    assert job.wait() == [0, 0, 0], job.log()
    history = generations(job.rundir.storage)
    assert [item.attempt for item in history[:5]] == [0, 1, 2, 3, 4]
    assert [item.topology for item in history[:5]] == ["mesh"] * 4 + ["star"], (
        "three retries, then parameter-server mode"
    )
    assert {item.topology for item in history[5:]} == {"mesh"}, "and all-reduce again when it works"
    assert all(len(item.members) == 3 for item in history), "nobody was left out"
    assert [item.step for item in history[:5]] == [0, 7, 7, 7, 7]
    errors = [item for item in job.events("communication_error") if item["generation"] == history[0].number]
    assert {item["rank"] for item in errors} >= {0, 2}
    said = errors[0]
    assert "gradient bucket 0" in said["operation"]
    assert said["waited_seconds"] >= 0.9
    assert said["error"]
    assert len(said["peers"]) == 2
    assert all(view.startswith("here") for view in said["peers"].values())
    assert_same_training(job, whole)


def make_certificates(folder: Path) -> dict[str, str]:
    """An authority and a node's certificate, made by openssl."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(*new_key, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
    openssl(*new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    sign = ("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(*sign, "-out", "node.pem")
    names = {"certificate": "node.pem", "key": "node.key", "ca": "ca.pem"}
    return {name: str(folder / file) for name, file in names.items()}


def test_with_tls_the_same_training_goes_on_without_the_rank_0_that_is_killed(
    new_job: NewJob, whole: Job, tmp_path: Path
) -> None:
    job = new_job(tls=make_certificates(tmp_path))
    start_nodes(job, [{"kind": "kill", "at": "all_reduce", "step": 7, "node": 0}])
    assert job.wait() == [-9, 0, 0], job.log(1)
    [_, told] = (
        job.events("membership")[-2:] if len(job.events("membership")) > 1 else [None, *job.events("membership")]
    )
    assert told["topology"] == "star", "gloo of torch's own builds has no TLS"
    timing = job.events("timing")
    assert {item["topology"] for item in timing} == {"star"}
    names = [[one["name"] for one in item["collectives"]] for item in timing]
    assert names == [["which gradients there are", "bucket 0", "commit"]] * len(timing)
    assert {one["bandwidth_bytes_per_second"] for item in timing for one in item["collectives"]} == {None}
    assert not job.events("link")
    assert_same_training(job, whole)


def test_a_certificate_that_cannot_be_read_is_named(new_job: NewJob, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    job = new_job(tls={**files, "key": str(tmp_path / "no.key")})
    start_nodes(job, nodes=1)
    assert job.wait() == [2], job.log()
    assert "no.key" in job.result()["error"]
    assert "training.tls" in job.result()["error"]
