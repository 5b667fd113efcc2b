"""Advice for a person whose job has ended before its training was done, on any cluster."""

from __future__ import annotations

from trainer.rundir import RunDir


def how_to_go_on(rundir: RunDir, job_id: str) -> str:
    """Return a sentence that names the kept checkpoint and the command that resumes from it, or starts over."""
    latest = rundir.latest_checkpoint()
    kept = "There is no checkpoint yet"
    if latest:
        kept = f"The checkpoint of step {latest[1]} is kept in {rundir.uri}/{latest[0]}"
    again = f"materialize trained_checkpoint again, or run `dtrain train` with the same arguments and --name {job_id}"
    return f"{kept}: {again}, to {'resume from it' if latest else 'start over'}"
