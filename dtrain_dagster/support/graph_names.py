"""The names of one training graph among several of a code location: its assets, steps, jobs, sensors and resources.

What the assets do does not belong here. The graph without a name is that of the stock prices, `dtrain_dagster.
definitions`: its names are those of its parts, without a prefix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dagster as dg

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class GraphNames:
    """The names of the parts of one graph."""

    pipeline: str = ""
    """The prefix of all its names; empty for the graph of the stock prices."""

    def key(self, asset: str) -> dg.AssetKey:
        """Return the key of this asset: below the pipeline's name, if it has one."""
        import dagster as dg  # not above: the command line has names of graphs, and does without Dagster

        return dg.AssetKey([self.pipeline, asset] if self.pipeline else [asset])

    def step(self, asset: str) -> str:
        """Return the name of the op that makes this asset, which is its name in a run's config."""
        return self.key(asset).to_python_identifier()

    def unique(self, name: str) -> str:
        """Return the name of a job, sensor, schedule or resource, which a code location has once."""
        return f"{self.pipeline}_{name}" if self.pipeline else name

    def mark(self, digest: str) -> str:
        """Return a digest that names this graph's trainings: jobs' ids contain it, so that those of two graphs differ
        even where they train the same."""
        return f"{self.pipeline}-{digest}" if self.pipeline else digest

    def below(self, uri: str) -> str:
        """Return this graph's own folder of a folder that graphs share."""
        return f"{uri}/{self.pipeline}" if self.pipeline else uri

    @property
    def cluster(self) -> str:
        """The key of the resource of the cluster that trains."""
        return self.unique("cluster")

    @property
    def project(self) -> str:
        """The key of the resource of the project's places."""
        return self.unique("project")

    @property
    def values(self) -> str:
        """The key of the IO manager that keeps values of assets."""
        return self.unique("io_manager")

    @property
    def resources(self) -> set[str]:
        """The keys of the resources that assets and sensors need."""
        return {self.cluster, self.project}


STOCK_NAMES = GraphNames()


def checked_names(pipeline: str) -> GraphNames:
    """Return the names of a pipeline. Raise ValueError for a name that cannot be a part of all of them."""
    if not _NAME.fullmatch(pipeline):
        raise ValueError(
            f"name = {pipeline!r}: lower-case letters, digits and underscores, a letter first, at most 40; it becomes "
            "a part of asset keys, job names and run directories"
        )
    return GraphNames(pipeline)
