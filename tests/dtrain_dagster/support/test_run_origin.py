"""Runs of the command line name the code location that the workspace file has for their module."""

from __future__ import annotations

import sys
from pathlib import Path

import dagster as dg
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin

from dtrain_dagster.support.run_origin import find_location, name_code_location

ROOT = Path(__file__).parents[3]
WORKSPACE = """
load_from:
  - python_module: {module_name: of.others, location_name: others}
  - python_module: {module_name: our.definitions, location_name: ours}
"""


@dg.job
def empty() -> None: ...


def made_run(instance: dg.DagsterInstance, module: str, folder: Path) -> dg.DagsterRun:
    """A run as `dagster asset materialize -m MODULE` in this folder records it."""
    pointer = ModuleCodePointer(module, "defs", str(folder))
    origin = RepositoryPythonOrigin(sys.executable, pointer, entry_point=["dagster"])
    return instance.create_run_for_job(empty, job_code_origin=JobPythonOrigin("empty", origin))


def test_a_run_gets_the_location_of_its_module_and_keeps_one_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "workspace.yaml").write_text(WORKSPACE)
    with dg.instance_for_test() as instance:
        run = made_run(instance, "our.definitions", tmp_path)
        assert name_code_location(instance, run)
        found = instance.get_run_by_id(run.run_id)
        assert found is not None
        assert found.remote_job_origin is not None
        assert found.remote_job_origin.location_name == "ours"
        assert found.remote_job_origin.repository_origin.repository_name == "__repository__"
        assert not name_code_location(instance, found), "it has one"


def test_where_no_location_is_known_the_run_stays_as_it_is(tmp_path: Path) -> None:
    with dg.instance_for_test() as instance:
        for text in (None, WORKSPACE, "load_from: ["):
            if text is not None:
                (tmp_path / "workspace.yaml").write_text(text)
            assert not name_code_location(instance, made_run(instance, "not.there", tmp_path))


def test_our_own_workspace_file_names_our_definitions() -> None:
    found = find_location(ROOT, "dtrain_dagster.definitions")
    assert found is not None
    assert found.location_name == "dtrain"
