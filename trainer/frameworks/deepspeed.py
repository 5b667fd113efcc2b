"""DeepSpeed: torchrun's variables are those that it reads; what is added says on what it computes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.comm.launcher_env import RankFacts
from trainer.frameworks.meeting import Meeting


def variables(facts: RankFacts, environment: Mapping[str, str], has_gpu: bool) -> dict[str, str]:
    """Return the variables of one rank beside torchrun's. What a person has set stays. Pure."""
    wanted = {
        "CROSS_RANK": str(facts.node_rank),
        "CROSS_SIZE": str(facts.world_size // facts.local_world_size),
        "LOCAL_SIZE": str(facts.local_world_size),
    }
    if not has_gpu:
        # DeepSpeed looks for an accelerator by itself, and takes the CPU only where no package of another is installed.
        wanted |= {"DS_ACCELERATOR": "cpu"} if "DS_ACCELERATOR" not in environment else {}
    return wanted


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether this process has a GPU of NVIDIA's."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return os.path.exists("/dev/nvidiactl") and visible not in ("", "-1")


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with."""
    return variables(facts, environment, has_gpu(environment))
