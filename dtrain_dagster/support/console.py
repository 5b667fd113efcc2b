"""The console of runs: a mistake that a person has to mend is one line, as is a run that somebody ended; a fault of the
program has its stack trace.

`dagster.Failure` is raised for what its message explains completely, and an interruption says how to go on; Dagster's
own console prints two stack traces of Dagster below either. The event log keeps them.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import dagster as dg


class OneLineFailures(logging.Formatter):
    """Formats records as another formatter does, but a `dagster.Failure` and an interruption without stack traces."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        said = explain_failure(getattr(record, "dagster_event", None))
        if said is None:
            return self.inner.format(record)
        shown = copy.copy(record)
        shown.msg, shown.args = said, ()
        return self.inner.format(shown)


def explain_failure(event: dg.DagsterEvent | None) -> str | None:
    """Return the line for an event of a `dagster.Failure` or an interruption; None for others."""
    if event is None:
        return None
    if event.is_step_failure:
        described = _description(event)
        return None if described is None else f"{event.step_key}: {described}"
    if event.event_type is dg.DagsterEventType.RUN_CANCELED:
        return "the run was cancelled"
    if event.is_failure and event.is_job_event:
        data: Any = event.event_specific_data
        first = getattr(data, "first_step_failure_event", None)
        # The line of the step may be missing: what a step says last can be lost with the copy of its output.
        if first is not None and (described := _description(first)) is not None:
            return f"the run has failed at {first.step_key}: {described}"
        if (words := _interruption(getattr(data, "error", None))) is not None:
            return f"the run has ended: {words}"
    return None


def _description(event: dg.DagsterEvent) -> str | None:
    data = event.step_failure_data
    if (words := _interruption(data.error)) is not None:
        return words
    failure = data.user_failure_data
    return failure.description if failure is not None else None


def _interruption(error: Any) -> str | None:
    """Return what an interruption says; None for another error, and for none."""
    name = dg.DagsterExecutionInterruptedError.__name__
    if error is None or error.cls_name != name:
        return None
    return error.message.partition(f"{name}: ")[2].strip() or "interrupted"


@dg.logger(
    config_schema=dg.colored_console_logger.config_schema,
    description="Dagster's coloured console, in which mistakes are one line.",
)
def console(context: dg.InitLoggerContext) -> logging.Logger:
    """Return Dagster's coloured console, in which mistakes are one line."""
    made = dg.colored_console_logger.logger_fn(context)
    for handler in made.handlers:
        handler.setFormatter(OneLineFailures(handler.formatter or logging.Formatter()))
    return made
