"""The sensor ``ceilings``: it tells people when a ceiling on spending is nearly used, and when it is, before the next
start is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import dagster as dg

from dtrain_dagster.clusters.notice_claims import NotToldError, is_claimed, send_once
from dtrain_dagster.costs.ceilings import COMMAND, CeilingError, Stand, describe_stand, describe_users, explain_unknown
from dtrain_dagster.jobs.promises import FOLDER
from dtrain_dagster.jobs.spending import SpendingBook
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from trainer.rundir import RunDir

LEVELS = (80, 100)
"""Percent of a ceiling at which people are told, once each per month."""
EVERY_SECONDS = 120


def build_ceilings_sensor(names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that tells people of ceilings that are nearly used, once per month, ceiling and level."""
    levels = " and ".join(f"{level} %" for level in LEVELS)

    @dg.sensor(
        name=names.unique("ceilings"),
        required_resource_keys=names.resources,
        minimum_interval_seconds=EVERY_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Notifies once per month at {levels} of each ceiling on spending (`{COMMAND}`), counting what was "
        "spent and what running jobs were promised. It ends nothing.",
    )
    def ceilings(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        cluster, project = cluster_resource(context, names), project_resource(context, names)
        try:
            judged = SpendingBook(Path(project.home), project.jobs_uri, cluster.first_tier).judge()
        except CeilingError as error:
            return dg.SkipReason(str(error))
        if not judged.ceilings:
            return dg.SkipReason("no ceiling is set")
        folder, count = RunDir(f"{project.home}/{FOLDER}"), 0
        for stand in judged.stands:
            keys = keys_due(stand, judged.month)
            if not keys:
                continue
            title, text = describe_use(stand, judged.month)
            if not is_claimed(folder, keys[-1]):
                context.log.warning(text)
                count += 1
            body = "\n- ".join([text, *explain_unknown(judged.spending)])
            for key in keys[:-1]:  # nobody has to be told of a lower level any more
                send_once(folder, key, (), partial(_message, title, body))
            try:
                send_once(folder, keys[-1], project.notify_urls(), partial(_message, title, body))
            except NotToldError as error:  # the next tick tries again
                context.log.warning(f"{error}; see DTRAIN_NOTIFY")
        used = ", ".join(f"{stand.title} {stand.share:.0%}" for stand in judged.stands)
        return dg.SkipReason(f"{used}; {count} notice(s)")

    return ceilings


def _message(title: str, body: str) -> tuple[str, str]:
    return title, body


def keys_due(stand: Stand, month: str) -> Sequence[str]:
    """Return the keys of the notices that the use of a ceiling is worth, the lowest level first. Pure."""
    whose = hashlib.sha256(stand.whose.encode()).hexdigest()[:12] if stand.whose else "all"
    return [f"{month}-{stand.kind}-{whose}-{level}" for level in LEVELS if stand.total * 100 >= level * stand.limit]


def describe_use(stand: Stand, month: str) -> tuple[str, str]:
    """Return the title and the text of a notice. Pure."""
    share, users = f"{stand.share:.0%}", describe_users(stand)
    by = f"; most by {users}" if users else ""
    what = "nothing new is started" if stand.share >= 1 else "a start that would exceed it is refused"
    option = f"--{stand.kind.replace('_', '-')}"
    text = f"{share} of the ceiling of {describe_stand(stand, month)}{by}; {what}; raise it: {COMMAND} {option} AMOUNT"
    return f"dtrain: {share} of the ceiling {stand.title} is used", text
