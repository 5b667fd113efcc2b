"""The engines that tests run for real: each is started once per file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.kubernetes_cluster import KubernetesCluster
from tests.engines.kubernetes_parts import missing
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.slurm_cluster import missing as missing_slurm


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[KubernetesCluster]:
    """A Kubernetes with two machines; skips, and says why, where none can run."""
    if why := missing():
        pytest.skip(why)
    with KubernetesCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A SLURM with three machines; skips, and says why, where none can run."""
    if why := missing_slurm():
        pytest.skip(why)
    with SlurmCluster(nodes=3) as cluster:
        yield cluster
