"""What a finished training has left behind, as the assets after `trained_checkpoint` read it: its plan, the documents
of its run directory, what its nodes were paid for."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import dagster as dg

from dtrain_dagster.assets.training import FinishedJob, read_finished
from dtrain_dagster.costs.plan import PLAN, TrainingPlan, parse_plan
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.support.graph_names import GraphNames
from trainer.rundir import EVALUATION, RESULT, RunDir


class Outcome:
    """A finished training, in the body of an asset."""

    def __init__(
        self, context: dg.AssetExecutionContext, names: GraphNames, cost_estimate: TrainingPlan, job: FinishedJob
    ) -> None:
        """``cost_estimate``: as it is now. It may since have been made again for another training, so it counts only
        where the run directory has no plan. Raise `dagster.Failure` where the plan there cannot be read."""
        self.context, self.job, self.rundir = context, job, RunDir(job.run_dir)
        self.cluster, self.project = cluster_resource(context, names), project_resource(context, names)
        self.manager = self.cluster.manager()
        try:
            document = self.rundir.read_json(PLAN)
            kept = None if document is None else parse_plan(document, f"{self.rundir.uri}/{PLAN}")
        except ValueError as error:
            raise dg.Failure(f"{self.rundir.uri}/{PLAN} cannot be read: {error}", allow_retries=False) from error
        self.plan = kept or cost_estimate
        self.usage = self.manager.node_usage(job.job_id)
        """Of its own nodes."""

    @property
    def tracker(self) -> CostTracker:
        """The bill of its nodes and its probes."""
        return CostTracker(self.job.cluster_name, self.billed, self.plan.tier)

    @property
    def result(self) -> dict[str, Any]:
        """How its training ended."""
        return read_finished(self.rundir, RESULT)

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """How good its model is."""
        return read_finished(self.rundir, EVALUATION)

    @property
    def billed(self) -> list[NodeUsage]:
        """What is paid for it: its own nodes, and its probes'."""
        return [*self.usage, *self.plan.probe_usage]

    def warn(self, why: str) -> None:
        """Log what could not be done, if there is something."""
        if why:
            self.context.log.warning(why)
