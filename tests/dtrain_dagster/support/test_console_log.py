"""What a run prints: a mistake as one line, a fault with its stack trace."""

from __future__ import annotations

import dagster as dg
import pytest

from dtrain_dagster.support.console import console


def said(error: Exception, capfd: pytest.CaptureFixture[str]) -> str:
    """What the console shows of a run whose only asset raises this."""

    @dg.asset
    def wrong() -> None:
        raise error

    defs = dg.Definitions(assets=[wrong], loggers={"console": console}, executor=dg.in_process_executor)
    config = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
    with dg.instance_for_test() as instance:
        job = defs.get_implicit_global_asset_job_def()
        done = job.execute_in_process(run_config=config, raise_on_error=False, instance=instance)
    assert not done.success
    return capfd.readouterr().err


def test_a_mistake_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    lines = said(dg.Failure("give the address of a file", allow_retries=False), capfd).splitlines()
    shown = [line.rpartition(" - ")[2] for line in lines if "ERROR" in line]
    assert shown[-1] == "the run has failed at wrong: give the address of a file"
    assert shown[:-1] in ([], ["wrong: give the address of a file"])
    assert not any("Stack Trace" in line or line.startswith("  File") for line in lines)


def test_a_fault_has_its_stack_trace(capfd: pytest.CaptureFixture[str]) -> None:
    shown = said(ZeroDivisionError("of ours"), capfd)
    assert "ZeroDivisionError: of ours" in shown
    assert "raise error" in shown
