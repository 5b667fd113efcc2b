"""The home that a command works on where DTRAIN_HOME is not set. What is done with a home belongs in `home`."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT = ".dtrain"
"""The name of the home where none is given."""
MARKER = ".dtrain-home"
"""The file that marks a folder as a home of this project. Without it nothing there is removed."""


def find_home(start: Path) -> Path:
    """Return the home that a command started in this folder works on, where DTRAIN_HOME does not say: the marked one
    that the folder, or one above it, is or holds; else `DEFAULT` in this folder. A home of another user does not count:
    whoever can write above this folder must not decide what runs."""
    for folder in (start, *start.parents):
        for home in (folder, folder / DEFAULT):
            try:
                owner = os.lstat(home / MARKER).st_uid, os.lstat(home).st_uid
            except OSError:
                continue
            if owner == (os.geteuid(), os.geteuid()):
                return home
    return start / DEFAULT
