"""What a process of a job is told by whoever starts it, in two environment variables of JSON. Nobody sets them by hand:
they would be another job's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from trainer.errors import ConfigError

LAUNCH_VARIABLE = "DTRAIN_LAUNCH"
"""Of a `Launch`. Each launch of a job, and each incarnation of a node, has another."""
ORDER = "DTRAIN_ORDER"
"""Of a `GivenOrder`, which is the same in all launches of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """Facts that are passed on; a default is left out."""

    @classmethod
    def _read(cls, name: str, environment: Mapping[str, str]) -> Self:
        text = environment.get(name) or "{}"
        try:
            found = json.loads(text)
            return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"{name}={text!r} was not set by this version of dtrain: start the job again, and do not set it by hand"
            ) from None

    def _write(self, name: str) -> dict[str, str]:
        given = {key: value for key, value in asdict(self).items() if value != getattr(type(self)(), key)}
        return {name: json.dumps(given, sort_keys=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch(_Told):
    """The launch of a job that a process belongs to, as its cluster tells it; the default where there is no cluster."""

    number: int = 1
    incarnation: int = 1
    """Which presence of its node within the launch it belongs to."""
    is_elastic: bool = False
    """Whether the processes may go on without a node, and take in one that comes later."""
    releases_nodes: bool = False
    """Whether a node is paid for only until its processes have ended, and one that ends in order ends no other."""
    records_presence: bool = False
    """Whether each node keeps the record of its time itself, since nothing else watches it from outside."""
    secret_uri: str = ""
    """Where nodes share no disk, the address in storage of the launch's secret, which their identity reads."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Return the launch of a process with this environment. Raise `ConfigError` for one of another version."""
        return cls._read(LAUNCH_VARIABLE, environment)

    def variables(self) -> dict[str, str]:
        """Return the variable of a process."""
        return self._write(LAUNCH_VARIABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenOrder(_Told):
    """What `dtrain` tells a job beside ``job.json``; the default where nobody has ordered it."""

    run_dir: str = ""
    """The run directory of the one training of this script, where a cluster has ordered it."""
    describe: str = ""
    """A file to which a script's job is written, with the numbers of its samples and the bytes of its model; the script
    then ends untrained. Where it cannot be trained, the file says why."""
    overrides: tuple[str, ...] = ()
    """``dotted.key=value``, which come after the script's own settings when it is described."""
    is_tracked: bool = True
    """Whether it is written to MLflow; ``job.json`` stays as it was begun."""
    part_of: str = ""
    """Of what the job is a part: a fleet, or a search; "" for a job that stands alone."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Return the order of a process with this environment. Raise `ConfigError` for one of another version."""
        return cls._read(ORDER, environment)


def with_order(environment: Mapping[str, str], **changes: Any) -> dict[str, str]:
    """Return an environment in whose `GivenOrder` these fields are changed."""
    return {**environment, **replace(GivenOrder.read(environment), **changes)._write(ORDER)}
