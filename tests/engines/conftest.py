"""The engines that tests run for real: each is started once per file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.engines.kubernetes_cluster import KubernetesCluster
from harness.engines.kubernetes_parts import missing
from harness.engines.ray_cluster import RayCluster
from harness.engines.ray_cluster import missing as missing_ray
from harness.engines.slurm_cluster import SlurmCluster
from harness.engines.slurm_cluster import missing as missing_slurm


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[KubernetesCluster]:
    """A Kubernetes with two machines; skips, and says why, where none can run."""
    if why := missing():
        pytest.skip(why)
    with KubernetesCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray cluster with a head and three machines, and the right to use it; skips, and says why, where none can
    run."""
    if why := missing_ray():
        pytest.skip(why)
    with RayCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.access.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A SLURM with three machines; skips, and says why, where none can run."""
    if why := missing_slurm():
        pytest.skip(why)
    with SlurmCluster(nodes=3) as cluster:
        yield cluster
