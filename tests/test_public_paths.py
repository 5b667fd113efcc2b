"""Names that users import, and those that the design gives, stay importable where they are.

A module may move; then its old path stays as a thin module, and the table here does not change. What the names do is
tested where they live.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "trainer": (
        "DistributedConfig",
        "FitResult",
        "HorovodTrainer",
        "PyTorchDDPTrainer",
        "RayTrainer",
        "TensorFlowDistributedTrainer",
        "Trainer",
        "TrainingFailedError",
    ),
    "trainer.fit": ("DistributedConfig", "FitResult", "Trainer", "TrainingFailedError"),
    "trainer.task": ("SupervisedTask", "Task"),
    "trainer.run": ("DistributedTrainer", "run_job"),
    "trainer.losses": (
        "GaussianLoss",
        "LastDimCrossEntropyLoss",
        "MeanSquaredError",
        "Predictive",
        "StudentTLoss",
        "build_loss",
        "student_t_cdf",
        "student_t_nll",
        "student_t_quantile",
    ),
    "trainer.spec": ("DataSpec",),
    "trainer.config": ("ConfigError", "DistributedTrainingConfig", "JobConfig", "parse_job"),
    "trainer.errors": ("DamagedError",),
    "trainer.rundir": ("RunDir",),
}
"""What a model, a loss or a script of one's own imports."""
DESIGN: dict[str, tuple[str, tuple[str, ...]]] = {
    "GPUClusterManager": (
        "dtrain_dagster.clusters.base",
        ("provision_cluster", "scale_cluster", "monitor_health", "cleanup_cluster"),
    ),
    "ClusterConfig": (
        "dtrain_dagster.clusters.base",
        (
            "cluster_name",
            "node_count",
            "gpu_type",
            "auto_scale_enabled",
            "min_nodes",
            "max_nodes",
            "idle_timeout_minutes",
        ),
    ),
    "ClusterHealth": ("dtrain_dagster.clusters.base", ()),
    "ResourceOptimizer": ("dtrain_dagster.planning.optimizer", ()),
    "CostTracker": ("dtrain_dagster.costs.tracker", ()),
    "CostMetrics": (
        "dtrain_dagster.costs.tracker",
        (
            "cluster_name",
            "total_cost_usd",
            "cost_per_node_hour",
            "training_duration_hours",
            "cost_per_epoch",
            "estimated_total_cost",
        ),
    ),
    "PerformanceDashboard": ("dtrain_dagster.dashboard.series", ()),
    "DistributedTrainer": (
        "trainer.run",
        ("initialize_distributed", "setup_data_parallel", "train_epoch", "synchronize_metrics"),
    ),
    "DataShardManager": ("trainer.data.shards", ()),
    "GradientSynchronizer": ("trainer.parallel.synchronizer", ()),
    "CheckpointManager": ("trainer.checkpoint.manager", ()),
    "DistributedTrainingConfig": (
        "trainer.config",
        (
            "world_size",
            "backend",
            "master_addr",
            "master_port",
            "batch_size_per_gpu",
            "gradient_accumulation_steps",
            "checkpoint_frequency",
        ),
    ),
    "NodeMonitor": (
        "trainer.observability.node_monitor",
        ("collect_gpu_metrics", "collect_network_metrics", "collect_training_metrics", "send_to_dashboard"),
    ),
    "GPUMetrics": ("trainer.observability.node_monitor", ()),
    "NetworkMetrics": ("trainer.observability.node_monitor", ()),
    "TrainingMetrics": (
        "trainer.observability.node_monitor",
        (
            "node_id",
            "epoch",
            "step",
            "loss",
            "gpu_utilization",
            "gpu_memory_used",
            "throughput_samples_per_sec",
            "communication_time_ms",
            "timestamp",
        ),
    ),
    "CommunicationProfiler": ("trainer.observability.comm_profiler", ()),
}
"""Class of the design → its module, and the methods and fields that the design names."""
COMMANDS = ("trainer", "trainer.tuning", "dtrain_dagster.data.leakage_check")
"""What is started as ``python -m``, here and on nodes."""


@pytest.mark.parametrize("module", PUBLIC)
def test_what_users_import(module: str):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []


def test_the_public_losses_are_all_in_the_table():
    assert tuple(importlib.import_module("trainer.losses").__all__) == PUBLIC["trainer.losses"]


@pytest.mark.parametrize("name", DESIGN)
def test_names_of_the_design(name: str):
    module, members = DESIGN[name]
    found = getattr(importlib.import_module(module), name)
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    assert [member for member in members if member not in fields and not callable(getattr(found, member, None))] == []


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_are_found(module: str):
    found = importlib.util.find_spec(module)
    assert found is not None
    if found.submodule_search_locations:
        assert importlib.util.find_spec(f"{module}.__main__") is not None


@pytest.mark.slow
def test_the_contract_imports_no_torch():
    """In a fresh process; `.importlinter` has the same wall for imports that a run does not reach."""
    modules = ["config", "documents.reader", "errors", "printable", "rundir", "secrets.resolve", "storage.base"]
    order = (
        "import sys, trainer; "
        + "; ".join(f"import trainer.{name}" for name in modules)
        + "; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", order], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "False"
