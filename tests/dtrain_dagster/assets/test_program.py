"""The asset of a program of a user's own, on the local cluster, in this process."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.program import ProgramOptions, program_page
from dtrain_dagster.clusters.base import OWNER, JobState, JobStatus
from dtrain_dagster.costs.ceilings import write_ceiling
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.jobs.spending import jobs_noted_since
from dtrain_dagster.pipelines import Cluster, PipelineError, build_program_asset
from tests.page import Page
from tests.webhook import web_hook
from trainer.frameworks.catalogue import FRAMEWORKS
from trainer.rundir import RunDir

SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
if "fail" in sys.argv and rank == 1:
    sys.exit(7)
if rank == 0:
    open(os.path.join(os.environ["DTRAIN_SCRIPT_FOLDER"], "weights.txt"), "w").write("1")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.Definitions:
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    return build_program_asset("own", script, nodes=2, processes_per_node=1, arguments=["--epochs", "3"])


def run(program: dg.Definitions, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    return program.resolve_job_def("own_run").execute_in_process(
        run_config={"ops": {"own__program_run": {"config": config}}}, instance=instance, raise_on_error=False
    )


def metadata_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    [event] = result.get_asset_materialization_events()
    return Page(event.materialization.metadata)


def test_the_engines_of_the_launchpad_are_those_that_there_are():
    kind = ProgramOptions.to_fields_dict()["engine"].config_type
    offered = [value.config_value for value in getattr(kind, "inner_type", kind).enum_values]
    assert offered == list(FRAMEWORKS), "a choice, and no text"


@pytest.mark.slow
def test_it_runs_with_where_the_launchpad_begins_and_says_what_became_of_it(program: dg.Definitions):
    with dg.DagsterInstance.ephemeral() as instance:
        first = run(program, instance)
        assert first.success
        told = metadata_of(first)
        assert told["engine"] == "torchrun"
        assert "rank 1 of 2 --epochs 3" in told["log"]
        assert told["cost_usd"] > 0
        assert told["node_hours"] > 0
        assert RunDir(told["run_dir"]).read_json(OWNER) == {"dagster_run_id": first.run_id}, "Terminate ends the job"
        assert instance.get_run_by_id(first.run_id).tags[JOB_TAG] == told["job_id"]
        again = metadata_of(run(program, instance, arguments=["--epochs", "4"]))
        assert again["job_id"].rsplit("-", 1)[0] != told["job_id"].rsplit("-", 1)[0], "another program"


@pytest.mark.slow
def test_a_ceiling_refuses_it_and_people_are_told(program: dg.Definitions, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    write_ceiling(home, Decimal(5))  # an hour of two nodes costs more
    with web_hook() as (url, heard), pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setenv("DTRAIN_NOTIFY", url)
        script = tmp_path / "s.py"
        refused = run(build_program_asset("own", script, nodes=2, processes_per_node=1), instance)
        assert not refused.success
        [failure] = refused.get_step_failure_events()
        said = str(failure.event_specific_data)
        assert "the ceiling of $5.00 per month: $0.00 spent" in said
        assert "and this start adds $6.12" in said
        assert "raise it: dtrain cost ceilings --per-month AMOUNT" in said
        assert heard[0]["title"] == "dtrain: a job would exceed the ceiling on spending"
        assert not list(home.glob("storage/jobs/*/launch.json"))
        write_ceiling(home, Decimal(7))
        assert run(program, instance).success


@pytest.mark.slow
def test_a_failure_has_the_log_and_the_cost(program: dg.Definitions, tmp_path: Path):
    with dg.DagsterInstance.ephemeral() as instance:
        result = run(program, instance, arguments=["fail"])
        [event] = result.get_step_failure_events()
    failure = event.step_failure_data
    assert failure.user_failure_data
    assert "rank 1 on node 1 failed first (exit code 7)" in str(failure.user_failure_data.description)
    found = failure.user_failure_data.metadata
    assert "rank 1 of 2 fail" in str(found["log"].value)
    assert found["cost_usd"].value > 0
    assert jobs_noted_since(tmp_path / "home", 0.0) == [found["job_id"].value]


def test_a_job_of_the_same_program_that_still_runs_is_followed(program: dg.Definitions):
    from dtrain_dagster.assets.program import choose_program_job

    class Manager:
        def active_jobs(self) -> list[JobStatus]:
            ids = ("program-own-abc-11111111", "program-own-xyz-22222222", "train-3")
            return [JobStatus(job_id=each, state=JobState.RUNNING) for each in ids]

    manager: Any = Manager()
    assert choose_program_job(manager, "own-abc", "99999999-7") == "program-own-abc-11111111"
    assert choose_program_job(manager, "own-new", "99999999-7") == "program-own-new-99999999"


def test_what_makes_no_sense_is_refused_where_it_is_defined(tmp_path: Path):
    script = tmp_path / "s.py"
    script.touch()
    with pytest.raises(PipelineError, match="program own: engine = 'mpi': it must be one of torchrun, horovod"):
        build_program_asset("own", script, engine="mpi")
    with pytest.raises(ValueError, match=r"program own: script = 'x.py': there is no file"):
        build_program_asset("own", "x.py")
    with pytest.raises(PipelineError, match="leave out --procs-per-node"):
        build_program_asset("own", script, engine="ray", processes_per_node=2)
    with pytest.raises(PipelineError, match="already actors of a Ray"):
        build_program_asset("own", script, engine="ray", cluster=Cluster(kind="ray"))


def test_the_figures_are_under_the_verdict(tmp_path: Path):
    totals = {"launches": 1, "wall_seconds": 65.0, "node_hours": 0.04, "cost_usd": 0.1}
    page = program_page(RunDir(str(tmp_path)), ProgramOptions(), 2, 1, totals, "http://127.0.0.1:8060/jobs/a")
    assert list(page)[:5] == ["verdict", "wall_seconds", "node_hours", "cost_usd", "dashboard"]
    assert page["verdict"] == "The program succeeded on 2 nodes in 1 min 05 s, $0.1000."
