"""The supervisor's process: ``python -m dtrain_dagster.clusters.supervise DIR FD FILE`` (see `supervision.supervisor`).

It chooses the placer by the launch, and stands above the rooms of all kinds of clusters for that.

The manager of a cluster starts the supervisor (`supervision.launch`) and knows it by its name only. It starts in a
moment and outlives the submitting process, so its imports must be light.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.hosts import HostRecord
from dtrain_dagster.clusters.notices import RETRIES, Announcement, notice_addresses, tell
from dtrain_dagster.clusters.supervision.launch import options_file, outlives_supervisor, read_options
from dtrain_dagster.clusters.supervision.local_placer import LocalPlacer
from dtrain_dagster.clusters.supervision.placer import Placer, say
from dtrain_dagster.clusters.supervision.supervisor import Supervisor, begin_clock
from dtrain_dagster.settings.cluster_kinds import cluster_key
from trainer.comm.descriptors import raise_descriptor_limit
from trainer.exit_codes import UNUSABLE
from trainer.rundir import LAUNCH, RunDir
from trainer.runtime.clock import SteadyClock

RESUME = "--resume"
"""The argument of a supervisor that goes on with the nodes of one that died."""


def make_placer(launch: Mapping[str, Any], rundir: RunDir, secret: Path, clock: SteadyClock) -> Placer:
    """Return the placer of a launch: that of its ``engine``, else this machine's."""
    if not outlives_supervisor(launch):
        return LocalPlacer(rundir, secret, clock)
    from dtrain_dagster.clusters.managers import open_engine
    from dtrain_dagster.clusters.supervision.agent_placer import AgentPlacer

    engine = open_engine(launch["engine"], read_options(secret), rundir.uri, str(secret))
    key = cluster_key(launch["engine"], launch.get("cluster_name", "local"))
    return AgentPlacer(rundir, engine, secret, clock, HostRecord.of_cluster(secret.parent.parent, key))


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor and return its exit code.

    ``DIR FD FILE``: the run directory, the descriptor of its lock, which the submitter holds, and the file for the
    secrets of launches. ``--resume`` at the end: go on with the nodes of a supervisor that died.
    """
    rundir, lock, secret = RunDir(arguments[0]), int(arguments[1]), Path(arguments[2])
    clock = begin_clock(rundir)
    raise_descriptor_limit()
    try:
        placer = make_placer(rundir.read_json(LAUNCH) or {}, rundir, secret, clock)
    except ClusterError as error:
        say(str(error))
        return UNUSABLE

    def announce(news: Announcement, launch: int) -> None:
        """Have people told, on a thread: the nodes are watched meanwhile."""
        threading.Thread(target=tell, args=(rundir, news, launch, RETRIES)).start()

    state = Supervisor(rundir, placer, clock, announce).run(RESUME in arguments)
    say(json.dumps({"state": state}))
    secret.unlink(missing_ok=True)
    options_file(secret).unlink(missing_ok=True)
    presences.close(rundir, clock.now())
    if notice_addresses():
        os.close(lock)  # the job may be started again while people are told
        tell(rundir, retries=RETRIES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
