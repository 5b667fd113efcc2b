"""A control group with a memory limit that a process may join: its page cache is then as small as asked for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_KINDS = ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max"))


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """Folder of a group of its own with this limit in bytes; None where this user may not make one."""
    for root, name in _KINDS:
        group = root / f"dtrain-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / name).write_text(str(limit))
            except OSError:  # version 2, where the controller is not handed down
                continue
            yield group
            return
        finally:
            group.rmdir()
    yield None


def join(group: Path) -> None:
    """What this process takes from now on counts there."""
    (group / "cgroup.procs").write_text("0")
