"""The blocks of commands in Markdown files, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
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
