"""The answer of `dtrain slurm check`, `kubernetes check` and `ray check`: whether a cluster can be used, for people
and as JSON.

How a cluster is asked is its engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from dtrain_dagster.cli.common import EXIT_UNUSABLE, expected_errors, say
from dtrain_dagster.cli.json_output import print_json


def tell_check(look: Callable[[], tuple[str, dict[str, Any]]], fields: Mapping[str, str], as_json: bool) -> None:
    """Print what a cluster answered. ``look`` returns it in a sentence, and the fields beside ``usable`` and
    ``message``; ``fields``: all that are documented. As JSON, a cluster that cannot be used is an answer as well, with
    the exit code of a refusal; otherwise the error of ``look`` is raised."""
    try:
        message, found = look()
    except expected_errors() as error:
        if not as_json:
            raise
        print_json({**dict.fromkeys(fields), "usable": False, "message": str(error)})
        sys.exit(EXIT_UNUSABLE)
    if as_json:
        print_json({"usable": True, "message": message, **found})
    else:
        say(message)
