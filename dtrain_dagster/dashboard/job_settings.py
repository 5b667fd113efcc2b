"""The settings of a job as its page lists them: what differs from the defaults first. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config import DistributedTrainingConfig
from trainer.printable import visible
from trainer.secrets.redaction import redact

MOST_CHARACTERS = 2000
"""The most characters of one value that are shown."""
_NODES = {
    "node_count": "nodes", "processes_per_node": "processes per node", "sku": "size of the nodes", "tier": "tier",
    "engine": "cluster", "cluster_name": "name of the cluster",
}  # fmt: skip
_OF_EVERY_JOB = ("run_dir", "job_id", "schema_version")
"""Parts of ``job.json`` that are no setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetting:
    """A setting of a job, as words."""

    name: str
    """The field as ``--set`` takes it, such as ``training.epochs``; of nodes, words."""
    value: str
    default: str | None = None
    """The default; None where there is none, or where it is the value itself."""
    is_given: bool
    """Whether it differs from the default, or has none."""


def settings_of(job: Mapping[str, Any], launch: Mapping[str, Any] | None) -> list[JobSetting]:
    """Return the settings of a ``job.json`` and of the nodes of its last launch: those that differ from the defaults
    first. Secrets are struck out."""
    found = [*_nodes(launch or {}), *_parts(job), *_training(job.get("training") or {})]
    return sorted(found, key=lambda item: not item.is_given)


def _nodes(launch: Mapping[str, Any]) -> Iterator[JobSetting]:
    is_here = launch.get("engine") == "local"
    for field, words in _NODES.items():
        if launch.get(field) not in (None, "") and not (is_here and field == "cluster_name"):
            name = "size whose price stands in" if is_here and field == "sku" else words
            yield JobSetting(name=name, value=setting_text(launch[field]), is_given=True)


def _parts(job: Mapping[str, Any]) -> Iterator[JobSetting]:
    for part, document in job.items():
        if part == "training" or part in _OF_EVERY_JOB:
            continue
        for name, value in _flat(document, part):
            yield JobSetting(name=name, value=setting_text(value), is_given=part != "tracking")


def _training(given: Mapping[str, Any]) -> Iterator[JobSetting]:
    defaults = asdict(DistributedTrainingConfig())
    for name, value in given.items():
        is_given = name not in defaults or value != defaults[name]
        default = setting_text(defaults[name]) if is_given and name in defaults else None
        yield JobSetting(name=f"training.{name}", value=setting_text(value), default=default, is_given=is_given)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    elif value not in ({}, None, ""):
        yield name, value


def setting_text(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Return the value of a setting as pages show it: one line of at most so many characters, without secrets. Pure."""
    text = redact(value) if isinstance(value, str) else json.dumps(redact(value), ensure_ascii=False)
    text = visible({"null": "none", "true": "yes", "false": "no"}.get(text, text))
    return text if len(text) <= most else f"{text[: most - 1]}…"
