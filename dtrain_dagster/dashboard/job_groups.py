"""What a job belongs to: a search, the years of a walk forward, a fleet, a scaling study, the probes of a plan.

`group_of` and `walk_forward_group` decide from records that exist anyway; nothing is recorded for the page's sake.
Jobs of a fleet are known by the fleet's own record (`dtrain_dagster.fleet.records`), and a search is a fleet that has a
folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from dtrain_dagster.costs.plan import PLANNED_FOR
from dtrain_dagster.fleet.records import FOLDER as FLEETS
from dtrain_dagster.fleet.records import JOBS
from dtrain_dagster.search import FOLDER as SEARCHES

WALK_FORWARD = "walk_forward"
"""The end of the prefix of a walk forward's assets; the prefix of a graph with a name comes before it."""
_SCALING = re.compile(r"scaling-(.+)-((?:weak|strong)-\d+of\d+)-\d+")
_PROBE = re.compile(r"probe-(.+)-(\d+)n")
_OWN_OF_A_YEAR = ("start_from", "start_sha256", "max_node_seconds", "threads_per_rank", "max_steps")
"""Fields of a training in which years of one walk forward may differ."""

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
    return None


def group_page(dashboard_url: str, name: str, kind: GroupKind | None = None) -> str:
    """Return the address of the table of jobs, with those of this group alone. ``kind``: of the group of exactly this
    name, which is unfolded; None where names of groups only begin with it. Pure."""
    unfolded = f"&open={quote(JobGroup(kind=kind, name=name, label='').key, safe='/')}" if kind else ""
    return f"{dashboard_url.rstrip('/')}/#q={quote(name, safe='')}{unfolded}"


def walk_forward_group(plan: Mapping[str, Any], job: Mapping[str, Any], test_year: str) -> JobGroup:
    """Return the walk forward of a job that is one of its years: those of one graph and the same settings. Pure.

    ``plan``, ``job``: the content of ``plan.json`` and ``job.json``. ``test_year``: "" where it is not known.
    """
    prefix = str(plan[PLANNED_FOR]).partition("/")[0]
    label = f"test year {test_year or 'unknown'}"
    return JobGroup(kind="walk forward", name=f"{prefix}-{_settings_digest(job)}", label=label)


def is_of_walk_forward(plan: Mapping[str, Any] | None) -> bool:
    """Return whether this is the plan of a year of a walk forward."""
    prefix, _, asset = str((plan or {}).get(PLANNED_FOR, "")).partition("/")
    return bool(asset) and prefix.endswith(WALK_FORWARD)


def test_year_of(manifest: Mapping[str, Any] | None) -> str:
    """Return the first year of a dataset's test split; "" where its manifest does not tell. Pure."""
    try:
        year = str((manifest or {})["splits"]["test"]["first"])[:4]
    except (KeyError, TypeError):
        return ""
    return year if year.isdigit() else ""


def _settings_digest(job: Mapping[str, Any]) -> str:
    """Return six digits over what the years of one walk forward have in common."""
    training = {name: value for name, value in (job.get("training") or {}).items() if name not in _OWN_OF_A_YEAR}
    common = {"model": job.get("model"), "loss": job.get("loss"), "training": training}
    return hashlib.sha256(json.dumps(common, sort_keys=True, default=str).encode()).hexdigest()[:6]


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
