"""Code locations of a workspace file, as `dtrain ui` starts their code servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.web.third_party_uis import code_server_options


@pytest.mark.parametrize(
    ("location", "name", "options"),
    [
        ({"python_module": "our.code"}, "our.code", ["--module-name", "our.code"]),
        (
            {"python_module": {"module_name": "our.code", "location_name": "ours", "working_directory": "."}},
            "ours",
            ["--module-name", "our.code", "--working-directory", "."],
        ),
        ({"python_file": "code/defs.py"}, "defs.py", ["--python-file", "/project/code/defs.py"]),
        (
            {"python_file": {"relative_path": "defs.py", "attribute": "defs", "executable_path": "/venv/bin/python"}},
            "defs.py:defs",
            [
                *("--python-file", "/project/defs.py", "--attribute", "defs", "--working-directory", "/project"),
                "--use-python-environment-entry-point",
            ],
        ),
        ({"python_package": {"package_name": "ours"}}, "ours", ["--package-name", "ours"]),
    ],
)
def test_a_code_location_is_named_and_found_as_dagster_does(
    location: dict[str, Any], name: str, options: list[str]
) -> None:
    [(kind, fields)] = location.items()
    found, given = code_server_options(kind, fields, Path("/project"))
    assert (found, [one for one in given if one not in QUIET]) == (name, options)


QUIET = ("--log-level", "warning", "--inject-env-vars-from-instance")
