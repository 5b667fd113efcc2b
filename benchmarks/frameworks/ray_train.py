"""The loop of Ray Train: a TorchTrainer whose workers run the plain loop, prepared as its documentation says.

Ray serves on loopback only, without a dashboard, and sends no usage statistics.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch

from benchmarks.frameworks.protocol import Case, Turns
from benchmarks.frameworks.workload import Workload


def train(case: Case, turns: Turns) -> None:
    """Train the case in turns, until it is over."""
    assert ray.train.get_context().get_world_size() == case.ranks
    workload = Workload(case)
    model = ray.train.torch.prepare_model(workload.module, parallel_strategy_kwargs=case.ddp)
    loader = ray.train.torch.prepare_data_loader(workload.loader())
    optimizer = workload.optimizer()
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        total = 0.0
        for windows, target in loader:
            if not turns.step():
                return
            total += workload.step(model, optimizer, windows, target)
        epoch += 1


def worker() -> None:
    """Serve cases as one of Ray's workers."""
    from benchmarks.frameworks.serve import serve

    serve("ray", ray.train.get_context().get_world_rank())


def drive(ranks: int) -> None:
    """Start Ray on this machine and the workers in it, and return when these have ended."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"}
    # Between its turns all of Ray is stopped: a process that was silent meanwhile is not dead.
    os.environ |= {"RAY_health_check_failure_threshold": "100000", "RAY_health_check_timeout_ms": "600000"}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        try:
            ray.train.torch.TorchTrainer(
                worker,
                torch_config=ray.train.torch.TorchConfig(backend="gloo"),
                scaling_config=ray.train.ScalingConfig(num_workers=ranks),
                run_config=ray.train.RunConfig(storage_path=folder, name="benchmark"),
            ).fit()
        finally:
            ray.shutdown()
