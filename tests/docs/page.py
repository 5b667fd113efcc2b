"""A page of the documentation whose commands are run, and how."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.docs.blocks import ROOT, Part, read_blocks, script_of
from tests.docs.checkout import environment_in


class Page(NamedTuple):
    """Blocks of a page, and what makes their commands ones that can be run here."""

    document: str
    """Its path, seen from the repository."""
    before: str = ""
    """Commands that are run first, in the same shell."""
    filled: Mapping[str, str] = {}
    """Parts of its commands, and what is written instead: what a page leaves to its reader, and a smaller training."""
    blocks: slice = slice(None)
    after: str = ""
    """Commands that are run last, and look at what was done."""
    left_out: Mapping[str, str] = {}
    """Lines that cannot be run here, by how they begin, and why."""
    served: bool = False
    """Whether each line starts a server, where the block does not say so itself."""

    @property
    def part(self) -> Part:
        """What is run, for `test_every_block_is_run`."""
        return Part(self.document, self.blocks)

    def script(self, values: Mapping[str, str] | None = None) -> str:
        """Return all commands; ``{NAME}`` in what is filled in, and in the commands around, is one of the values.
        AssertionError if the page has lost what is filled in, or left out."""
        text = (ROOT / self.document).read_text()
        given = values or {}
        for old, new in self.filled.items():
            assert old in text, f"{old!r} is no longer in {self.document}"
            text = text.replace(old, new.format_map(given) if given else new)
        blocks = read_blocks(text)[self.blocks]
        assert blocks, f"{self.document} has no such block"
        for begins in self.left_out:
            lines = [line for block in blocks for line in block.script.splitlines() if line.startswith(begins)]
            assert lines, f"{begins!r} is no longer in {self.document}"
            blocks = [block._replace(script=_without(block.script, begins)) for block in blocks]
        if self.served:
            blocks = [block._replace(kind="server") for block in blocks]
        before = self.before.format_map(given) if given else self.before
        return "\n".join([before, script_of(blocks), self.after])


def _without(script: str, begins: str) -> str:
    return "".join(line for line in script.splitlines(keepends=True) if not line.startswith(begins))


def run_in(checkout: Path, script: str) -> str:
    """Return what a script says that is run in a copy of the repository, as in a user's shell; it must end well.
    Nothing that it has started in its background outlives it, a server of a failed script neither."""
    shell = subprocess.Popen(
        ["bash", "-c", f"set -euo pipefail\nexport PATH=$PWD/.venv/bin:$PATH\n{script}"],
        cwd=checkout, env=environment_in(checkout), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = shell.communicate()[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
    assert shell.returncode == 0, said[-8000:]
    return said
