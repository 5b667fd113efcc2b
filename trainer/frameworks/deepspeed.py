"""DeepSpeed: torchrun's variables are those that it reads; what is added says where it computes and where it compiles.

It compiles parts of itself at their first use, in a folder that all programs of a user share. A compilation that is
killed leaves a file there on which the next program waits for ever. Programs that dtrain starts have such a folder to
themselves, and hold it as long as they run, so that the first one knows that nobody compiles and takes the file away.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from trainer.comm.launcher_env import RankFacts
from trainer.errors import ConfigError
from trainer.frameworks.meeting import Meeting

EXTENSIONS = "TORCH_EXTENSIONS_DIR"
"""Variable: the folder in which torch compiles extensions. One that a person has set is left as it is."""
HELD = ".held"
LEFT_BEHIND = "lock"
"""The name of the file by which torch keeps others from compiling the same."""


def variables(facts: RankFacts, environment: Mapping[str, str], has_gpu: bool) -> dict[str, str]:
    """Return the variables of one rank beside torchrun's. What a person has set stays. Pure."""
    wanted = {
        "CROSS_RANK": str(facts.node_rank),
        "CROSS_SIZE": str(facts.node_count),
        "LOCAL_SIZE": str(facts.local_world_size),  # the ranks that can sum through the memory of one machine
    }
    if not has_gpu and "DS_ACCELERATOR" not in environment:
        # DeepSpeed takes the CPU by itself only where no package for another accelerator is installed.
        wanted["DS_ACCELERATOR"] = "cpu"
    return wanted


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether this process has a GPU of NVIDIA's."""
    return os.path.exists("/dev/nvidiactl") and environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with."""
    found = variables(facts, environment, has_gpu(environment))
    if EXTENSIONS not in environment:
        cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(cache, "dtrain", "torch_extensions")
        try:
            hold_extensions(folder)
        except OSError as error:
            raise ConfigError(
                f"{folder}, where DeepSpeed compiles, cannot be used ({error}): set {EXTENSIONS} to a folder of this "
                "node"
            ) from error
        found[EXTENSIONS] = str(folder)
    return found


def hold_extensions(folder: Path) -> None:
    """Hold a folder of extensions until this process, or the program that it becomes, has ended; where nobody else
    does, take away what killed compilations have left."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(held, True)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        for left in folder.glob(f"*/{LEFT_BEHIND}"):
            left.unlink(missing_ok=True)
    fcntl.flock(held, fcntl.LOCK_SH)
