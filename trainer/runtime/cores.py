"""The cores and GPUs of this machine, and which machine it is."""

from __future__ import annotations

import contextlib
import os
import platform
from hashlib import sha256
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_number() -> int:
    """Return a number that is the same for all processes of one machine, containers included, and another one on
    another machine. A float holds it exactly."""
    try:
        name = _BOOT.read_text()
    except OSError:
        name = platform.node()
    return int.from_bytes(sha256(name.encode()).digest()[:6])


def gpu_handles() -> list[Any]:
    """Return NVML's handles of this machine's GPUs; empty where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no driver, no library, no permission: all mean that there is no GPU to use
        return []


def yield_to_senders() -> None:
    """Keep gloo's receiving threads in this process from preempting the thread that runs on their core.

    An answer wakes such a thread while another of our threads may still hold the lock of that connection, in the middle
    of sending. Gloo then tries the lock over and over, for as long as the scheduler lets it: on one core, that is a
    whole time slice in which the lock cannot be released. Threads of the batch class do not preempt.
    """
    for thread in Path("/proc/self/task").glob("*"):  # empty except on Linux
        with contextlib.suppress(OSError):  # the thread has ended, or the system forbids it
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
