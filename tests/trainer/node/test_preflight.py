"""The pre-flight of a node: what fails it, what is only warned of, and what is measured."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from trainer.node.preflight import (
    GIB,
    MIB,
    CommandEnd,
    Disk,
    Gpu,
    Measured,
    NodeNeeds,
    Peer,
    bus_of,
    judge_node,
    read_setting,
    usual_of,
)
from trainer.node.preflight_measures import (
    Errand,
    Measuring,
    _ask_gpu,
    _look_at_clock,
    _look_at_gpus,
    _reach,
    measure,
    multiplies_rightly,
    read_output,
    run_command,
    xids_in,
)

H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    used_bytes=4 * MIB,
    uncorrected_errors=0,
    remap_failed=False,
    remap_pending=False,
    tflops=790.0,
    copy_gb_per_second=50.0,
    pcie_width=16,
    pcie_most=16,
    product_is_right=True,
)
HEALTHY = Measured(
    memory_bytes=8 * GIB,
    disks=(Disk(path="/run", free_bytes=90 * GIB),),
    skew_seconds=0.01,
    product_is_right=True,
    product_gflops=40.0,
    copy_gb_per_second=9.0,
    gpus=(H100, replace(H100, bus="0000:3b:00")),
    peers=(Peer(address="10.0.0.2", how="reached"),),
    command=CommandEnd(code=0, last_line="fine"),
)


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpus": (H100, replace(H100, bus="0000:3b:00", **changes))}


@pytest.mark.parametrize(
    ("changes", "failed", "warned"),
    [
        ({}, "", ""),
        ({"memory_bytes": 511 * MIB}, "511 MiB of memory are free, of 512 that 2 rank(s) need", ""),
        ({"disks": (Disk(path="/run", error="Read-only file system"),)}, "/run cannot be written: Read-only", ""),
        ({"disks": (Disk(path="/run", free_bytes=MIB),)}, "/run has 1 MiB free", ""),
        ({"disks": (Disk(path="/run", free_bytes=GIB),)}, "", "/run has only 1024 MiB free"),
        ({"skew_seconds": -61.0}, "its clock is -61.0 s off", ""),
        ({"skew_seconds": 3.0}, "", "its clock is +3.0 s off"),
        ({"product_is_right": False}, "a matrix product on the CPU was wrong", ""),
        ({"product_gflops": 0.1}, "", "ran at 0.1 GFLOP/s"),
        ({"copy_gb_per_second": 0.1}, "", "copied at 0.1 GB/s"),
        ({"gpus": (H100,)}, "1 of 2 GPUs are there", ""),
        ({"gpus": (replace(H100, is_split=True, used_bytes=60 * GIB),)}, "", ""),
        ({"driver_errors": ("GPU 1: GPU is lost",)}, "GPU 1: GPU is lost", ""),
        ({"gpus": ()}, "0 of 2 GPUs are there", ""),
        (gpu(uncorrected_errors=3), "GPU 1 (NVIDIA H100 80GB HBM3): 3 uncorrected memory errors", ""),
        (gpu(remap_failed=True), "could not be remapped", ""),
        (gpu(remap_pending=True), "", "remapped at the next reset"),
        (gpu(retired_pages=62), "62 retired pages", ""),
        (gpu(retired_pages=61), "", ""),
        (gpu(throttled=("heat",)), "", "slowed down by heat"),
        (gpu(used_bytes=2 * GIB), "", "others hold 2.0 GiB"),
        (gpu(used_bytes=60 * GIB), "others hold 60.0 of 80.0 GiB", ""),
        (gpu(product_is_right=False), "a matrix product was wrong", ""),
        (gpu(pcie_width=8), "", "8 of 16 PCIe lanes"),
        (gpu(tflops=0.89 * 794), "", "707 TFLOP/s in a matrix product, usually 794"),
        (gpu(tflops=0.69 * 794), "548 TFLOP/s in a matrix product, usually 794", ""),
        (gpu(copy_gb_per_second=30.0), "30 GB/s from the host, usually 48", ""),
        (gpu(peer_gb_per_second=256.0), "", "256 GB/s to the next GPU, usually 335"),
        ({"xids": (("0000:3b:00", 13), ("0000:3b:00", 79))}, "GPU 1 (NVIDIA H100 80GB HBM3): XID 79 within two", ""),
        ({"xids": (("0000:3b:00", 13), ("0000:3b:00", 63))}, "", ""),
        ({"xids": (("0000:af:00", 79),)}, "", ""),  # of a GPU that another job has
        ({"peers": (Peer(address="10.0.0.2", how="unreachable", error="No route to host"),)}, "No route to host", ""),
        ({"peers": (Peer(address="10.0.0.2", how="silent", error="nothing"),)}, "", "does not answer: nothing"),
        ({"command": CommandEnd(code=3, last_line="IB port down")}, "the site's own check: IB port down", ""),
        ({"command": CommandEnd(code=3)}, "the site's own check: exit code 3", ""),
        ({"command": CommandEnd(code=None)}, "the site's own check: did not end in time", ""),
        ({"hung": "the GPUs"}, "the check of the GPUs did not end", ""),
    ],
)
def test_what_fails_a_node_and_what_is_only_warned_of(changes: dict[str, Any], failed: str, warned: str) -> None:
    judged = judge_node(replace(HEALTHY, **changes), NodeNeeds(ranks=2, gpus=2))
    for expected, found in ((failed, judged.failed), (warned, judged.warned)):
        assert len(found) == bool(expected), found
        assert expected in "".join(found)
    assert judged.skipped == []
    assert judged.why == "; ".join(judged.failed)


def test_what_is_not_known_fails_no_node() -> None:
    judged = judge_node(Measured(skipped=("GPUs: no driver",), gpus=()), NodeNeeds(ranks=4))
    assert (judged.failed, judged.warned, judged.skipped) == ([], [], ["GPUs: no driver"])
    judged = judge_node(Measured(driver_errors=("GPUs: Driver Not Loaded",), gpus=()), NodeNeeds(ranks=4))
    assert (judged.failed, judged.skipped) == ([], ["GPUs: Driver Not Loaded"])
    judged = judge_node(Measured(driver_errors=("GPUs: Driver Not Loaded",), gpus=()), NodeNeeds(gpus=1))
    assert judged.failed == ["GPUs: Driver Not Loaded", "0 of 1 GPUs are there"]
    judged = judge_node(Measured(gpus=(H100,)), NodeNeeds(ranks=4))  # they may train on CPUs
    assert (judged.failed, judged.warned) == ([], ["1 GPUs are there for 4 ranks"])
    judged = judge_node(Measured(gpus=(Gpu(name="Next Year's", tflops=5.0),)), NodeNeeds())
    assert judged.failed == judged.warned == []
    assert "no figure to compare with" in judged.skipped[0]


def test_too_little_room_fails_a_node() -> None:
    found = replace(HEALTHY, memory_bytes=MIB, disks=(Disk(path="/run", free_bytes=MIB),))
    assert len(judge_node(found, NodeNeeds()).failed) == 2


def test_a_peer_that_is_reached_clears_the_node_of_one_that_is_not() -> None:
    gone = Peer(address="10.0.0.3", how="unreachable", error="No route to host")
    judged = judge_node(replace(HEALTHY, peers=(*HEALTHY.peers, gone)), NodeNeeds())
    assert judged.failed == []
    assert "10.0.0.3" in judged.warned[0]


def test_the_figures_of_a_gpu_are_those_of_the_longest_name() -> None:
    table = {"NVIDIA A100": 1.0, "NVIDIA A100 80GB PCIe": 2.0}
    assert usual_of("NVIDIA A100 80GB PCIe", table) == 2.0
    assert usual_of("NVIDIA A100-SXM4-80GB", table) == 1.0
    assert usual_of("Tesla T4", table) is None


def test_a_setting_is_a_mode_and_perhaps_a_command() -> None:
    assert read_setting("") == ("quick", "")
    assert read_setting("full: /opt/check --all: yes") == ("full", "/opt/check --all: yes")
    assert read_setting(": /opt/check") == ("quick", "/opt/check")
    for wrong in ("light", "on", "/opt/check", "off: /opt/check"):
        with pytest.raises(ValueError, match=r"quick"):
            read_setting(wrong)


def test_a_measuring_that_ends_early_is_a_failure_only_where_it_hung() -> None:
    lines = "\n".join(map(json.dumps, ({"memory_bytes": 5}, {"at": "the GPUs"}))) + "\nImportError: torch"
    assert read_output(lines, None).hung == "the GPUs"
    assert read_output(lines, -9).hung == "the GPUs"
    ended = read_output(lines, 1)
    assert (ended.hung, ended.memory_bytes) == ("", 5)
    assert ended.skipped == ("what follows the GPUs: ImportError: torch",)
    assert read_output(lines + '\n{"done": true}', 0).skipped == ()
    assert read_output("", None).hung


class OldGpu:
    """What NVML says of a GPU from before rows were remapped, which is in trouble."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(pynvml, name)  # so that each name is one of the library's
        answers: dict[str, Any] = {
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:3B:00.0"),
            "nvmlDeviceGetName": b"Tesla V100-PCIE-16GB",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=16 * GIB, used=9 * GIB),
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRetiredPages": [0] * 40,
            "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonGpuIdle
            | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        }
        if name == "nvmlDeviceGetRemappedRows":
            return refuse
        return (lambda *_, **__: answers[name]) if callable(found) and name in answers else found


def refuse(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_gpu_is_asked_by_nvml_and_what_it_does_not_know_is_skipped() -> None:
    skipped: list[str] = []
    told = _ask_gpu(OldGpu(), None, 3, skipped)
    assert skipped == ["GPU 3, remapped rows: Not Supported"]
    assert told["bus"] == "0000:3b:00"
    judged = judge_node(Measured.of({"gpus": [told]}), NodeNeeds())
    about = "GPU 0 (Tesla V100-PCIE-16GB): "
    assert judged.failed == [
        about + "2 uncorrected memory errors",
        about + "80 retired pages",
        about + "others hold 9.0 of 16.0 GiB",
    ]
    assert judged.warned == [about + "slowed down by heat"]


def test_the_errors_of_the_driver_are_found_in_the_log_of_the_kernel() -> None:
    said = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    records = [
        f"3,100,{int(1e6)},-;{said}",  # three hours ago
        f"3,101,{int(10_000e6)},-;{said.replace('79', '13')}",
        " SUBSYSTEM=pci",
        f"3,102,{int(10_900e6)},-;{said}",
        "6,103,10950000000,-;usb 1-1: new device",
    ]
    assert xids_in(records, 10_950.0) == [("0000:3b:00", 13), ("0000:3b:00", 79)]
    assert bus_of("00000000:3B:00.0") == bus_of("0000:3b:00") == "0000:3b:00"
    assert Measured.of({"xids": [["0000:3b:00", 13]]}).xids == (("0000:3b:00", 13),)


def test_peers_that_refuse_a_connection_are_there_and_those_without_a_way_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as server:
        closed.bind(("127.0.0.1", 0))
        ports = closed.getsockname()[1], server.getsockname()[1]
        assert [_reach("127.0.0.1", port).how for port in ports] == ["reached", "reached"]
    errors: dict[str, OSError] = {"silent": TimeoutError(), "unreachable": OSError(errno.EHOSTUNREACH, "No route")}
    for how, error in errors.items():
        monkeypatch.setattr(socket, "create_connection", partial(throw, error))
        assert _reach("10.0.0.9", 1).how == how


def throw(error: OSError, *_: object) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, {"skipped": ["GPUs: NVML Shared Library Not Found"]}),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, {"gpus": [], "driver_errors": ["GPUs: Driver Not Loaded"]}),
    ],
)
def test_a_missing_library_is_skipped_and_a_missing_driver_told(
    monkeypatch: pytest.MonkeyPatch, error: int, found: dict[str, Any]
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert _look_at_gpus(Errand(run_dir="/")) == found


def test_a_gpu_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _look_at_gpus(Errand(run_dir="/"))["driver_errors"] == ["GPU 0: GPU is lost"]


def test_a_product_in_bfloat16_is_compared_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplies_rightly(torch, 512, "cpu")
    right = torch.mm

    def wrong(*given: Any) -> torch.Tensor:
        found = right(*given)
        found[-1, -1] += 1
        return found

    monkeypatch.setattr(torch, "mm", wrong)
    assert not multiplies_rightly(torch, 512, "cpu")


def test_this_machine_is_measured(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for line in measure(Errand(run_dir=str(tmp_path), command="echo so far; echo $UNSET port down >&2; exit 3")):
        found |= line
    measured = Measured.of(found)
    assert measured.product_is_right is True
    assert measured.product_gflops
    assert measured.memory_bytes
    assert [disk.error for disk in measured.disks] == ["", ""]
    assert measured.command == CommandEnd(code=3, last_line="port down")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_and_a_clock_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    for line in measure(Errand(run_dir=str(tmp_path / "missing"), mode="light")):
        found |= line
    assert Measured.of(found).disks[0].error == "No such file or directory"
    now = time.time
    monkeypatch.setattr("trainer.node.preflight_measures.time.time", lambda: now() + 100.0)
    assert 99.0 < _look_at_clock(Errand(run_dir=str(tmp_path)))["skew_seconds"] < 101.0


def test_a_command_has_a_limit() -> None:
    begun = time.monotonic()
    assert run_command("sleep 60", 0.1).code is None
    assert time.monotonic() - begun < 30.0


def test_a_measuring_is_a_process_of_its_own_of_which_nothing_is_left(tmp_path: Path) -> None:
    left = tmp_path / "left"
    command = f"sleep 300 & echo $! > {left}; echo broken; false"
    measuring = Measuring(Errand(run_dir=str(tmp_path), mode="light", command=command), os.environ)
    while not measuring.is_over():
        time.sleep(0.05)
    assert judge_node(measuring.result(), NodeNeeds()).why == "the site's own check: broken"
    sleeper = int(left.read_text())
    while Path(f"/proc/{sleeper}").exists() and "Z" not in Path(f"/proc/{sleeper}/stat").read_text().split()[2]:
        time.sleep(0.05)
