"""The sensor ``ceilings``: it tells people when a ceiling on spending is nearly used, and when it is, before the next
start is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from dtrain_dagster.costs.ceilings import COMMAND, CeilingError, Stand, describe_stand, describe_users, explain_unknown
from dtrain_dagster.jobs.promises import FOLDER
from dtrain_dagster.jobs.spending import SpendingBook
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

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
        notices, count = open_storage(f"{project.home}/{FOLDER}/notices"), 0
        for stand in judged.stands:
            keys = keys_due(stand, judged.month)
            firsts = [_is_first(notices, key) for key in keys]  # nobody has to be told of a lower level any more
            if not firsts or not firsts[-1]:
                continue
            title, text = describe_use(stand, judged.month)
            context.log.warning(text)
            count += 1
            body = "\n- ".join([text, *explain_unknown(judged.spending)])
            notify_and_log(project.notify_urls(), title, body, context.log)
        used = ", ".join(f"{stand.title} {stand.share:.0%}" for stand in judged.stands)
        return dg.SkipReason(f"{used}; {count} notice(s)")

    return ceilings


def _is_first(notices: Storage, key: str) -> bool:
    """Return whether nobody was told of this before, on any graph of the home; from now on somebody was."""
    try:
        notices.create(key, b"")
    except FileExistsError:
        return False
    return True


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
