"""The notice that a search has ended, which is sent once; its trials are not told one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.job_notices import RETRIES
from dtrain_dagster.clusters.notice_claims import send_once, send_safely
from dtrain_dagster.search.check_space import shown_values
from dtrain_dagster.search.jobs import trial_id
from dtrain_dagster.support.formatting import dollars
from trainer.rundir import RunDir


def tell_of_search(folder: RunDir, result: Mapping[str, Any], jobs_uri: str) -> None:
    """Tell people that the search of this folder has ended, with the loss curve of its best trial as the picture. It
    never raises."""
    best = result["best"]
    pictured = RunDir(f"{jobs_uri}/{trial_id(result['name'], best['trial'])}") if best else None

    def send(urls: Sequence[str]) -> None:
        send_once(
            folder,
            f"end-{len(result['trials'])}",
            urls,  # it may be given more trials later
            lambda: write_notice(result),
            pictured,
        )

    send_safely(folder, send, RETRIES)


def write_notice(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return title and text of the notice. Pure."""
    counts = ", ".join(f"{count} {state}" for state, count in result["counts"].items())
    lines = [f"{len(result['trials'])} trials ({counts}), {dollars(result['usd'])}"]
    if best := result["best"]:
        lines.append(
            f"best: trial {best['trial']}, {result['metric']} {best['score']:.6g} with {shown_values(best['values'])}"
        )
        lines.append(f"dtrain train … --settings {result['settings_file']}")
    else:
        lines.append("no trial was evaluated: see `dtrain logs` of one for why")
    return f"dtrain: search {result['name']} has ended", "\n".join(lines)
