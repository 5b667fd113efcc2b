"""The blocks of commands in Markdown files, and the commands in them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
"""The pages that are made from the code. `make test` makes them anew; here only if the code has changed since."""
_GENERATOR = ROOT / "docs" / "generate_reference.py"
_SOURCES = (_GENERATOR, *(path for name in ("trainer", "dtrain_dagster") for path in (ROOT / name).rglob("*.py")))
_made = REFERENCE / "job.schema.json"
"""What the generator writes last: who finds it finds all."""


def _is_old() -> bool:
    return not _made.exists() or _made.stat().st_mtime < max(path.stat().st_mtime for path in _SOURCES)


if _is_old():
    REFERENCE.mkdir(exist_ok=True)
    with FileLock(REFERENCE / ".lock"):  # of several workers, the first one makes them
        if _is_old():
            subprocess.run([sys.executable, str(_GENERATOR)], check=True)
DOCUMENTS = (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md")),
)  # fmt: skip
"""All documents that a user reads."""
_BLOCK = re.compile(r"^```(sh|bash|console)((?: \w+)?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"<<'EOF'\n.*?\nEOF$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of shell commands."""

    kind: str
    """The word after ``sh``: "" for commands that succeed, ``fails``, ``server``, …"""
    script: str


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of a document, in order."""
    return [Block(kind.strip(), script) for _, kind, script in _BLOCK.findall(text)]


class Part(NamedTuple):
    """Blocks of a document. Whoever runs them names them so, and `test_every_block_is_run` adds up all parts."""

    document: str
    """Its path, seen from the repository."""
    blocks: slice = slice(None)

    def numbers(self) -> range:
        """Return the numbers of its blocks, from 0 on."""
        return range(*self.blocks.indices(len(read_blocks((ROOT / self.document).read_text()))))

    def read(self) -> list[Block]:
        """Return its blocks, in order."""
        return read_blocks((ROOT / self.document).read_text())[self.blocks]


SERVE = """
serve() {  # start a server, ask for its page, end it
  "$@" >served.txt 2>&1 & local pid=$! address
  until address=$(grep -oEm1 'http://(127.0.0.1|localhost):[0-9]+' served.txt) && curl -fsSLo page.html "$address"; do
    kill -0 $pid || { cat served.txt; return 1; }
    sleep 0.5
  done
  kill $pid; wait $pid || true
}
"""


def script_of(blocks: Iterable[Block]) -> str:
    """Return blocks as one script, which says where it is and stops at the first failure. A block of commands that have
    to fail goes on after them. A server answers once, and is ended; those of `make` are only looked at, since each has
    tests of its own."""
    lines = ["set -euo pipefail", SERVE]
    for number, block in enumerate(blocks, start=1):
        lines.append(f"echo '=== block {number}'")
        if block.kind == "fails":
            lines += [f"if ( {line} ); then exit 99; fi" for line in block.script.splitlines()]
        elif block.kind == "server":
            for line in block.script.splitlines():
                lines.append(f"make --dry-run {line.split()[1]} >/dev/null" if line[:5] == "make " else f"serve {line}")
        else:
            lines.append(block.script)
    return "\n".join(lines)


def read_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a script: what stands before and after ``|``, ``;`` and ``&&``, without
    variables that are set for it, redirections and comments. Here-documents are left out."""
    joined = _HERE.sub("", script).replace("\\\n", " ")
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|;&"):
                kept = [item for item in words if item not in ("until", "do", "while", "if", "then")]
                while kept and re.match(r"[A-Z_]+=", kept[0]):
                    kept.pop(0)
                if kept:
                    yield kept
                words = []
            else:
                words.append(word)
