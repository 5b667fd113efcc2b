"""One training graph as its assets are built from it: its names, its data, and where its launchpad begins.

Each module of this room has builders that take a `Pipeline`: Dagster cannot rename the resources of an asset, and
graphs on different clusters may share a code location.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import dagster as dg
from pydantic import create_model

from dtrain_dagster.assets.common import OWNERS, LaunchpadOptions
from dtrain_dagster.data import prices, sharding
from dtrain_dagster.jobs.start import code_version
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames

STUDIES = "studies"
"""The group of assets that train besides the graph itself, and are no part of a retraining."""
SourceKind = Literal["prices", "folder", "asset", "script"]


def code_version_of(asset: str) -> str:
    """Return the version of the code that makes an asset, by which Dagster marks older results as out of date: of data
    that of their conversion, which their ids contain, too; of the rest that of the trainer's sources."""
    conversions = {"stock_prices": prices.SCHEMA_VERSION, "sharded_dataset": sharding.CODE_VERSION}
    return str(conversions.get(asset) or code_version())


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A training graph."""

    names: GraphNames = STOCK_NAMES
    cluster: str = ""
    """What tells clusters of a code location apart, as a tag's value (`Settings.cluster_key`); empty where no settings
    were read."""
    source: SourceKind = "prices"
    """What is trained on: prices, a dataset's folder, what another asset returns, or what a script has."""
    upstream: dg.AssetKey | None = None
    """The asset that returns a dataset; None where ``source`` is another."""
    deps: Sequence[dg.AssetKey] = ()
    """Assets that are made before the first one of a graph without prices."""
    script: str = ""
    """The path of the script that trains; empty where ``source`` is another."""
    owners: Sequence[str] = field(default_factory=lambda: tuple(OWNERS))
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Asset → where options of its launchpad begin."""
    unregistered: str = ""
    """Why its models are not registered; empty where they are."""

    @property
    def gpu_cluster(self) -> dg.AssetKey:
        """Return the external asset `gpu_cluster` of the cluster that it trains on."""
        return self.names.key("gpu_cluster")

    @property
    def prices(self) -> str | None:
        """Return where its prices come from; None where DTRAIN_PRICES says it."""
        return (self.defaults.get("stock_prices") or {}).get("source")

    def asset(self, name: str, group: str, inputs: Sequence[str] = ()) -> dict[str, Any]:
        """Return the arguments of `dagster.asset` that all assets have. ``group``: in the graph without a name;
        ``inputs``: the assets of this graph whose values it takes."""
        return {
            "key": self.names.key(name),
            "group_name": self.names.pipeline or group,
            "owners": list(self.owners),
            "code_version": code_version_of(name),
            "ins": {item: dg.AssetIn(key=self.names.key(item)) for item in inputs},
            "io_manager_key": self.names.values,
        }

    def options(self, asset: str, kind: type[LaunchpadOptions]) -> type[LaunchpadOptions]:
        """Return the options of an asset's launchpad as they begin in this graph. Raise ValueError for a name that is
        none of them."""
        given = self.defaults.get(asset) or {}
        if not given:
            return kind
        if unknown := sorted(set(given) - set(kind.model_fields)):
            raise ValueError(
                f"{', '.join(unknown)}: not an option of {asset}; the options are {', '.join(kind.model_fields)}"
            )
        try:
            checked = kind(**given)  # a wrong value is refused where the graph is defined
        except dg.Failure as error:
            raise ValueError(str(error.description).replace("launchpad", asset, 1)) from None
        fields: dict[str, Any] = {}
        for name in given:
            own = copy.copy(kind.model_fields[name])
            own.default = getattr(checked, name)
            fields[name] = (own.annotation, own)
        return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **fields)


STOCK = Pipeline()
"""The graph of the stock prices, whose names have no prefix."""
