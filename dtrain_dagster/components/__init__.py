"""Dagster components: what `dg list components` shows of this package, for graphs that are written in YAML.

A component only says its attributes; what is built of them is `dtrain_dagster.pipelines`.
"""

from dtrain_dagster.components.training_pipeline import TrainingPipeline

__all__ = ["TrainingPipeline"]
