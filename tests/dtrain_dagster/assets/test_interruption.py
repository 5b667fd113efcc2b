"""Whether a training goes on when its run's process is ended: real signals to a real run, and a real job."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.clusters.base import OWNER, JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.support.console import explain_failure

JOB = "train-00000000-11111111"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LocalClusterManager]:
    """A cluster with a job that runs."""
    manager = LocalClusterManager(tmp_path)
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    uri = f"file://{tmp_path}/storage/jobs/{JOB}"
    manager.submit_job(JobSpec(job_id=JOB, run_dir=uri, command=command, node_count=1))
    yield manager
    manager.cancel_job(JOB)


@pytest.mark.parametrize(
    ("number", "is_terminated_in_ui", "ends"),
    [(signal.SIGTERM, False, False), (signal.SIGTERM, True, True), (signal.SIGINT, False, True)],
    ids=["a drained machine", "Terminate", "Ctrl-C"],
)
def test_a_job_is_cancelled_only_where_a_person_asked(
    manager: LocalClusterManager, number: signal.Signals, is_terminated_in_ui: bool, ends: bool
) -> None:
    @dg.asset
    def follower(context: dg.AssetExecutionContext) -> None:
        with ClusterRun(context, None, None, manager).owning(rundir, JOB):  # type: ignore[arg-type]
            assert (rundir.read_json(OWNER) or {})["dagster_run_id"] == context.run.run_id
            if is_terminated_in_ui:  # what Dagster's launchers do before they send the signal
                context.instance.report_run_canceling(context.run)
            os.kill(os.getpid(), number)
            time.sleep(30)

    rundir = manager.rundir(JOB)
    rundir.write_json("checkpoints/LATEST.json", {"path": "checkpoints/g0001-s000000040", "step": 40})
    before = signal.getsignal(signal.SIGINT)
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(dg.DagsterExecutionInterruptedError):
            dg.materialize([follower], instance=instance)
        [run] = instance.get_runs()
        entries = instance.all_logs(run.run_id)
        said = " ".join(entry.message for entry in entries)
        told = [entry.get_dagster_event() for entry in entries if entry.is_dagster_event]
        shown = [line for event in told if (line := explain_failure(event))]
    assert manager.job_status(JOB).state.is_final is ends
    assert (f"`dtrain cancel {JOB}`" in said) is not ends
    assert signal.getsignal(signal.SIGINT) is before
    kept = f"terminated, and job {JOB} was cancelled. The checkpoint of step 40 is kept in {rundir.uri}/checkpoints/"
    assert shown[0].startswith(f"follower: {kept}" if ends else "follower: this run's process was ended")
    assert not ends or shown[0].endswith(": materialize its asset again to resume from it")
    assert len(shown) == 2, "the run's own end is a line, too"
    assert "Traceback" not in " ".join(shown)
