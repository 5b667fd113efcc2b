"""Dagster components: what `dg list components` shows of this package, for graphs that are written in YAML.

A component only says its attributes; what is built of them is `dtrain_dagster.pipelines`.
"""

from typing import Annotated, Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.pipelines import Cluster, PipelineError, Prices, build_training_assets

__all__ = ["TrainingPipeline"]

ALIKE = (
    "registry", "model_args", "loss", "loss_args", "training", "limits", "cluster", "model_name", "experiment",
    "schedule", "owners", "deps",
)  # fmt: skip
"""The attributes that `build_training_assets` takes as they are."""


class DatasetModel(dg.Model, dg.Resolvable):
    """What is trained on: one of these."""

    prices: Prices | None = None
    folder: Annotated[str | None, Field(description="a dataset's folder, seen from this file, or its id")] = None
    asset: Annotated[dg.ResolvedAssetKey | None, Field(description="the asset that returns a dataset's folder")] = None


class PipelineScaffolder(dg.Scaffolder):
    """Writes a component that trains on the bundled prices, to be changed."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        """Write ``defs.yaml`` with a name and the prices."""
        name = request.target_path.name.lower().replace("-", "_")
        dg.scaffold_component(request, {"name": name, "dataset": {"prices": {"source": "sp500_panel"}}})


@dg.scaffold_with(PipelineScaffolder)
class TrainingPipeline(dg.Component, dg.Model, dg.Resolvable):
    """A training graph: data, plan with its cost, training on a cluster, registration, bill and report."""

    name: Annotated[str, Field(description="prefix of its asset keys; part of its job names and run directories")]
    dataset: Annotated[DatasetModel | None, Field(description="what is trained on; or else script")] = None
    script: Annotated[str | None, Field(description="a script that calls Trainer(…).fit(…), from this file")] = None
    arguments: list[str | int | float] = []
    """Of the script's command, each as text: YAML's numbers, and those in quotes, come as numbers."""
    registry: Annotated[bool, Field(description="whether the model of a script is registered")] = False
    network: Annotated[
        str | None,
        dg.Resolver.default(model_field_name="model", description="tcn, lstm, transformer, or package.module:factory"),
    ] = None
    """``model`` in YAML: a component has a method of that name."""
    model_args: dict[str, Any] | None = None
    loss: Annotated[str | None, Field(description="student_t, gaussian, mse, or package.module:factory")] = None
    loss_args: dict[str, Any] | None = None
    training: Annotated[dict[str, Any], Field(description="fields of DistributedTrainingConfig, as epochs")] = {}
    limits: Annotated[dict[str, Any], Field(description="budget_usd, deadline_hours, stop_at_usd, …")] = {}
    cluster: Cluster | None = None
    model_name: Annotated[str | None, Field(description="of the registered model; left out: name")] = None
    experiment: Annotated[str | None, Field(description="of MLflow; left out: name")] = None
    schedule: Annotated[str | None, Field(description="cron of the retraining, off until it is switched on")] = None
    owners: list[str] = []
    deps: Annotated[list[dg.ResolvedAssetKey], Field(description="assets that are made before the first one")] = []

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the graph. Raise as `build_training_assets` does."""
        return build_training_assets(
            self.name,
            self._dataset(context),
            script=None if self.script is None else context.path / self.script,
            arguments=list(map(str, self.arguments)),
            model=self.network,
            **{name: getattr(self, name) for name in ALIKE},
        )

    def _dataset(self, context: dg.ComponentLoadContext) -> Prices | str | dg.AssetKey | None:
        """Return what is trained on, as `build_training_assets` takes it; a folder as seen from the YAML file."""
        if self.dataset is None:
            return None
        given = {name for name in ("prices", "folder", "asset") if getattr(self.dataset, name) is not None}
        if len(given) != 1:
            raise PipelineError(f"pipeline {self.name}: dataset: give one of prices, folder and asset")
        if self.dataset.prices is not None:
            return self.dataset.prices
        if self.dataset.asset is not None:
            return self.dataset.asset
        folder = str(self.dataset.folder)
        beside = context.path / folder
        return folder if "://" in folder or not beside.exists() else str(beside)
