"""What a job belongs to: a search, the years of a walk forward, a fleet, a scaling study, the probes of a plan.

`group_of` decides from records that exist anyway; nothing is recorded for the page's sake.
Jobs of a fleet are known by the fleet's own record (`dtrain_dagster.fleet.records`), and a search is a fleet that has a
folder of its own.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from dtrain_dagster.fleet.records import FOLDER as FLEETS
from dtrain_dagster.fleet.records import JOBS
from dtrain_dagster.search import FOLDER as SEARCHES

_SCALING = re.compile(r"scaling-(.+)-((?:weak|strong)-\d+of\d+)-\d+")
_PROBE = re.compile(r"probe-(.+)-(\d+)n")
_YEAR = re.compile(r"walk-([0-9a-f]{6})-(\d{4})-.+")
"""A year of `examples/walk_forward`."""

GroupKind = Literal["search", "walk forward", "fleet", "scaling study", "probes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGroup:
    """A set of jobs that belong together, and one job's place in it."""

    kind: GroupKind
    name: str
    label: str
    """The job's name within the group: ``trial 3``, ``test year 2008``."""

    @property
    def key(self) -> str:
        """Return what tells this group from all others, as addresses of the page have it."""
        return f"{self.kind.replace(' ', '-')}/{self.name}"


def group_of(job_id: str, fleets: Mapping[str, JobGroup]) -> JobGroup | None:
    """Return the group of a job that its id tells; None for one that stands alone. Pure.

    ``fleets``: the groups of all jobs of fleets and searches.
    """
    if (known := fleets.get(job_id)) is not None:
        return known
    if match := _SCALING.fullmatch(job_id):
        return JobGroup(kind="scaling study", name=match[1], label=match[2])
    if match := _PROBE.fullmatch(job_id):
        return JobGroup(kind="probes", name=match[1], label=f"{match[2]} nodes" if match[2] != "1" else "1 node")
    if match := _YEAR.fullmatch(job_id):
        return JobGroup(kind="walk forward", name=match[1], label=f"test year {match[2]}")
    return None


def group_page(dashboard_url: str, name: str, kind: GroupKind) -> str:
    """Return the address of the table of jobs, with those of this group alone, unfolded. Pure."""
    unfolded = quote(JobGroup(kind=kind, name=name, label="").key, safe="/")
    return f"{dashboard_url.rstrip('/')}/#q={quote(name, safe='')}&open={unfolded}"


class FleetGroups:
    """The groups of the jobs of a home's fleets and searches. A fleet is listed again only after a job was added to it.
    Safe for any number of threads."""

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._seen: dict[str, tuple[int, tuple[str, ...]]] = {}
        """Of each fleet: when its folder of jobs was written last, and their ids."""
        self._groups: dict[str, JobGroup] = {}
        self._lock = threading.Lock()

    def read(self) -> Mapping[str, JobGroup]:
        """Return the group of each job that belongs to one. What cannot be read belongs to none."""
        if self._home is None:
            return {}
        with self._lock:
            found: dict[str, tuple[int, tuple[str, ...]]] = {}
            with suppress(OSError), os.scandir(self._home / FLEETS) as entries:
                for entry in entries:
                    with suppress(OSError):
                        folder = Path(entry.path, JOBS)
                        written, known = folder.stat().st_mtime_ns, self._seen.get(entry.name)
                        same = known is not None and known[0] == written
                        found[entry.name] = known if same and known else (written, _ids(folder))
            if found != self._seen:
                self._seen = found
                self._groups = {job_id: self._group(name, job_id) for name, (_, ids) in found.items() for job_id in ids}
            return self._groups

    def _group(self, name: str, job_id: str) -> JobGroup:
        own = job_id.removeprefix(f"{name}-")
        if self._home is not None and (self._home / SEARCHES / name).is_dir():
            return JobGroup(kind="search", name=name, label=f"trial {int(own)}" if own.isdigit() else own)
        return JobGroup(kind="fleet", name=name, label=own)


def _ids(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")))
