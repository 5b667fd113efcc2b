"""The files of a job that are for this user alone and in no run directory: the secret of its launches, and the options
of its engine.

A job can write into its run directory. What its supervisor trusts, such as the path of a kubeconfig, is kept here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError

_OPTIONS = ".engine.json"


class PrivateFiles:
    """The private files of one job, in ``<home>/secrets``."""

    def __init__(self, home: Path, job_id: str) -> None:
        self.home, self.secret = home, home / "secrets" / job_id

    @property
    def options(self) -> Path:
        """The file with the options of the engine."""
        return self.secret.with_name(f"{self.secret.name}{_OPTIONS}")

    @classmethod
    def beside(cls, secret: Path) -> PrivateFiles:
        """Return the files of the job whose secret is in this file."""
        return cls(secret.parent.parent, secret.name)

    def write_options(self, options: Mapping[str, Any]) -> None:
        """Write the options of the engine, for the supervisors of this job."""
        self.secret.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.secret.parent.chmod(0o700)
        temporary = self.options.with_name(f"{self.options.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(options, file)
        temporary.replace(self.options)

    def read_options(self) -> dict[str, Any]:
        """Return the options of the engine. Raise `ClusterError` where there are none that can be read."""
        try:
            found = json.loads(self.options.read_text())
        except (OSError, ValueError) as error:
            raise ClusterError(f"{self.options} with the options of the engine cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise ClusterError(f"{self.options} holds no options of an engine: submit the job again")
        return found

    def remove_options(self) -> None:
        """Remove the options after the last launch."""
        self.options.unlink(missing_ok=True)
