"""What a cluster is asked for to start a job, as text for people and for the tools that they use. Pure.

What is asked is made by the functions that make the real request (`submit` of an engine, `Jobs` of Azure ML); here it
is only written down, with secrets struck out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dtrain_dagster.support.secrets import STRUCK, redact

DRAWN = "0" * 32
"""Stands for the random digits by which a launch is told from all others; they are drawn when it is submitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a start."""

    title: str
    """What it asks for, in a line."""
    form: Literal["sh", "yaml", "json"]
    text: str

    def written(self) -> str:
        """Return it as a part of a document of its form, with the title as a comment."""
        parts = [f"# {self.title}", self.text.rstrip("\n")]
        return "\n".join(["---", *parts] if self.form == "yaml" else parts) + "\n"


def as_comment(text: str) -> str:
    """Return text as lines of a comment."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def masked(value: Any) -> Any:
    """Return a copy of a document without secrets: also the values of variables as Kubernetes lists them, and all data
    of a Secret."""
    if isinstance(value, Mapping):
        if value.get("kind") == "Secret":
            return {
                name: dict.fromkeys(part, STRUCK) if name in ("data", "stringData") else masked(part)
                for name, part in value.items()
            }
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
            name = value["name"]
            return {**value, "value": redact({name: value["value"]})[redact(name)]}
        return redact({name: masked(part) for name, part in value.items()})
    if isinstance(value, list | tuple):
        return [masked(part) for part in value]
    return redact(value)


def yaml_text(document: Any) -> str:
    """Return a document as YAML, in its own order."""
    import yaml  # not above: supervisors do without

    text: str = yaml.safe_dump(masked(json.loads(json.dumps(document))), sort_keys=False, width=10_000)
    return text


def json_text(document: Any) -> str:
    """Return a document as JSON."""
    return json.dumps(masked(json.loads(json.dumps(document))), indent=2)


def shell_line(command: Sequence[str], env: Mapping[str, object] | None = None) -> str:
    """Return a command as one line of a shell, with the variables that it has besides those of the shell."""
    shown = masked({name: str(value) for name, value in (env or {}).items()})
    variables = [f"{name}={value}" for name, value in shown.items()]
    return redact(shlex.join([*(["env", *variables] if variables else []), *command]))


def process_lines(launch: Mapping[str, Any]) -> str:
    """Return what an agent starts on its node, once for each rank, as a comment. ``launch``: as in ``launch.json``."""
    ranks = f"{launch['processes_per_node']} of these, with RANK and the like"
    return as_comment(f"the agent of each node starts {ranks}:\n  {shell_line(launch['command'], launch['env'])}")


def others_like_first(count: int, how: str) -> str:
    """Return a comment that says how the requests of all nodes but the first differ from it; "" for one node."""
    if count <= 1:
        return ""
    which = "node 1" if count == 2 else f"nodes 1 to {count - 1}"
    return as_comment(f"{which}: the same, {how}")
