from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer.observability.node_monitor import NodeMonitor, over_gpus
from trainer.observability.reporter import Reporter
from trainer.rundir import RunDir


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    reporter = Reporter(RunDir(str(tmp_path)), 0, 1, [])
    yield reporter
    reporter.close()


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps a core busy and holds 200 MB."""
    program = "hold = b'x' * 200_000_000; print('on', flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_a_node_is_all_its_ranks_and_nothing_else(reporter: Reporter, busy: subprocess.Popen[bytes]) -> None:
    both = NodeMonitor(0, reporter, 1.0, [os.getpid(), busy.pid])
    alone = NodeMonitor(1, reporter, 1.0, [os.getpid()])
    time.sleep(0.5)
    with_peer, without = both.sample(), alone.sample()
    assert with_peer["memory_used_bytes"] - without["memory_used_bytes"] > 190e6
    assert with_peer["memory_percent"] == pytest.approx(
        100 * with_peer["memory_used_bytes"] / psutil.virtual_memory().total
    )
    assert with_peer["cpu_percent"] > without["cpu_percent"] + 5 / (psutil.cpu_count() or 1)
    assert with_peer["cpu_percent"] <= 100
    busy.kill()
    busy.wait()
    assert both.sample()["memory_used_bytes"] < with_peer["memory_used_bytes"], "a rank that has ended uses nothing"


def test_throughput_is_that_of_the_node_and_unknown_while_nothing_is_trained(reporter: Reporter) -> None:
    began = time.monotonic()
    monitor = NodeMonitor(2, reporter, 0.05, [os.getpid()])
    assert monitor.sample()["samples_per_second"] is None
    time.sleep(0.2)
    for step in (1, 2):
        monitor.update(0, step, 0.5, 64)
    rate = monitor.collect_training_metrics().throughput_samples_per_sec
    assert rate is not None
    assert 128 / (time.monotonic() - began) <= rate <= 128 / 0.2
    monitor.update(1, 3, 0.25, 64)  # the next epoch counts as well
    metrics = monitor.collect_training_metrics()
    assert metrics.throughput_samples_per_sec not in (None, rate)
    assert (metrics.node_id, metrics.epoch, metrics.step, metrics.loss) == (2, 1, 3, 0.25)
    time.sleep(0.2)
    assert monitor.collect_training_metrics().throughput_samples_per_sec is None


def test_it_samples_until_stopped_and_once_more(reporter: Reporter, tmp_path: Path) -> None:
    monitor = NodeMonitor(4, reporter, 0.02, [os.getpid()])
    monitor.start()
    time.sleep(0.2)
    monitor.stop()
    reporter.close()
    samples = list(RunDir(str(tmp_path)).events("node"))
    assert len(samples) >= 3
    assert {
        "node_id", "epoch", "step", "samples_per_second", "cpu_percent", "memory_used_bytes", "memory_percent",
        "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_percent", "gpu_temperature_celsius",
        "gpu_power_watts", "bytes_sent_per_second", "bytes_received_per_second", "loss", "learning_rate", "grad_norm",
        "communication_time_ms", "hostname", "disk_used_percent", "disk_read_bytes_per_second",
        "disk_written_bytes_per_second", "gpus",
    } <= set(samples[0])  # fmt: skip
    assert all(sample["bytes_sent_per_second"] >= 0 for sample in samples)
    assert all(0 < sample["disk_used_percent"] <= 100 for sample in samples)


def test_a_system_that_does_not_tell_costs_no_training_and_one_bad_sample_not_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(str(tmp_path))
    reporter = Reporter(rundir, 0, 1, [])

    def hidden(*_: object, **__: object) -> None:
        raise NotImplementedError("neither /proc/diskstats nor /sys/block here")

    monkeypatch.setattr(psutil, "disk_io_counters", hidden)
    monkeypatch.setattr(psutil, "net_io_counters", hidden)
    monitor = NodeMonitor(4, reporter, 0.02, [os.getpid()])
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", hidden)
        monitor.start()
        time.sleep(0.2)
    time.sleep(0.2)
    monitor.stop()
    reporter.close()
    [sample, *_] = rundir.events("node")
    assert sample["disk_read_bytes_per_second"] is sample["bytes_sent_per_second"] is None
    assert sample["disk_used_percent"] > 0


def test_a_sample_tells_of_the_last_step_and_of_its_communication(reporter: Reporter) -> None:
    monitor = NodeMonitor(0, reporter, 1.0, [os.getpid()])
    assert monitor.collect_training_metrics().communication_time_ms is None
    monitor.update(0, 7, 0.5, 64, 1e-3, 2.5)
    monitor.communication_time_ms = 12.5
    sample = monitor.sample()
    assert [sample[name] for name in ("step", "loss", "learning_rate", "grad_norm")] == [7, 0.5, 1e-3, 2.5]
    assert sample["communication_time_ms"] == monitor.collect_training_metrics().communication_time_ms == 12.5


def test_over_the_gpus_of_a_node_only_those_count_that_tell() -> None:
    def gpu(index: int, utilization: float | None, warmth: float | None) -> dict[str, Any]:
        return {
            "index": index, "utilization": utilization, "memory_used_bytes": 3, "memory_total_bytes": 4,
            "temperature_celsius": warmth, "power_watts": None,
        }  # fmt: skip

    found = over_gpus([gpu(0, 90, 60), gpu(1, None, 70), gpu(2, 30, None)])
    assert (found.gpu_utilization, found.gpu_temperature_celsius, found.gpu_power_watts) == (60, 70, None)
    assert (found.gpu_memory_used_bytes, found.gpu_memory_percent) == (9, 75)


def test_a_machine_without_a_gpu_has_nothing_to_say_of_one(reporter: Reporter) -> None:
    monitor = NodeMonitor(0, reporter, 1.0, [os.getpid()])
    found = monitor.collect_gpu_metrics()
    values = (found.gpu_utilization, found.gpu_memory_used_bytes, found.gpu_memory_percent)
    if monitor._gpus:
        assert all(value is not None for value in values)
    else:
        assert values == (None, None, None)
