"""The cluster and the project as settings describe them: what a command line and an asset graph get alike.

Nothing of Dagster is imported here: most commands of `dtrain` answer without it. `dtrain_dagster.resources` makes
resources of them, whose fields a launchpad can change.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict

from dtrain_dagster.clusters.azure_ml.sku_chain import chain, default_chain
from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager
from dtrain_dagster.clusters.ranks import have_gpus, ranks_per_node
from dtrain_dagster.costs.prices import PriceError, name_at_site, price_of
from dtrain_dagster.settings.azure import AzureMLOptions, read_azure_options, refuse_unusable
from dtrain_dagster.settings.cluster_kinds import KINDS, ClusterKind, Tier, cluster_key, tier_of
from dtrain_dagster.settings.engines import read_engine_options
from dtrain_dagster.settings.environment import Settings, SettingsError
from dtrain_dagster.settings.links import job_page
from dtrain_dagster.support.audit import AuditLog
from trainer.model.allowed_factories import VARIABLE

if TYPE_CHECKING:
    from dtrain_dagster.clusters.azure_ml.client import Service
    from dtrain_dagster.registry.base import Registry

NODE_CACHE = "/tmp/dtrain-cache"
"""The cache of shards on a node of the cloud: its temporary disk."""


def allowed_modules() -> dict[str, str]:
    """Return the environment variable that lists the user's modules which nodes may import. It comes from this
    process's environment and no resource: a user of the launchpad must not decide what is imported."""
    value = os.environ.get(VARIABLE)
    return {VARIABLE: value} if value else {}


def grace_period() -> dict[str, str]:
    """Return the variable that says for how long a node's processes may go on when they have to end, where it is set:
    nodes elsewhere do not inherit this process's environment."""
    name = "DTRAIN_STOP_GRACE_SECONDS"
    return {name: os.environ[name]} if os.environ.get(name) else {}


class ProjectConfiguration(BaseModel):
    """The project's places: folders, tracking server, names."""

    model_config = ConfigDict(frozen=True)

    home: str
    shared_uri: str
    """The storage that nodes reach: run directories, and the datasets that they read."""
    tracking_uri: str
    tracks_in_workspace: bool
    """Whether, on Azure ML, the workspace's own experiments and registry are used instead of ``tracking_uri``."""
    experiment: str
    model_name: str
    dagster_url: str
    dashboard_url: str
    mlflow_url: str
    """MLflow's UI; empty where that is the workspace's own."""
    notify: str
    queue_deadline_hours: float

    @property
    def storage_uri(self) -> str:
        """The folder of this machine in which prices and datasets are built."""
        return f"{self.home}/storage"

    @property
    def jobs_uri(self) -> str:
        """The folder of run directories."""
        return f"{self.shared_uri}/jobs"

    @property
    def cache_dir(self) -> str:
        """The node-local cache of shards."""
        return f"{self.home}/cache"

    def notify_urls(self) -> tuple[str, ...]:
        """Return the Apprise addresses that receive alerts, or references to them
        (`dtrain_dagster.support.secrets`)."""
        return tuple(self.notify.split())

    def run_url(self, run_id: str) -> str:
        """Return the address of a Dagster run in the UI."""
        return f"{self.dagster_url}/runs/{run_id}"

    def job_url(self, job_id: str) -> str:
        """Return the address of a job on the dashboard."""
        return job_page(self.dashboard_url, job_id)

    def trainer_env(self) -> dict[str, str]:
        """Return the environment of the trainer's processes: the shard cache, which ``DTRAIN_CACHE`` may put elsewhere,
        and the folder that holds a user's own modules."""
        paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            "DTRAIN_CACHE": os.environ.get("DTRAIN_CACHE") or self.cache_dir,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            **allowed_modules(),
        }


class ClusterConfiguration(BaseModel):
    """The cluster that trains. Assets are the same whatever its kind."""

    model_config = ConfigDict(frozen=True)

    kind: str
    cluster_name: str
    home: str
    node_count: int
    processes_per_node: int | None
    """Ranks per node, where they are stated; None: see `ranks_per_node`."""
    threads_per_rank: int | None
    max_replacements: int
    preflight: str = ""
    gpu_type: str
    tier: str
    shared_uri: str
    azure: dict[str, Any]
    """The options of `dtrain_dagster.settings.azure.read_azure_options`; empty on another kind of cluster."""
    engine: dict[str, Any]
    """The options of the engine that runs nodes (`dtrain_dagster.settings.engines`); empty without one."""

    def with_hardware(self, nodes: int | None, gpu_type: str | None, tier: str | None) -> Self:
        """Return the same cluster with other nodes; None leaves what the environment or the launchpad has."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        given = {"node_count": nodes, "gpu_type": gpu_type, "tier": tier}
        fields |= {name: value for name, value in given.items() if value is not None}
        if tier is not None and "tiers" in self.azure:
            fields["azure"] = {**self.azure, "tiers": [tier]}
        return type(self)(**fields)

    @property
    def cluster_key(self) -> str:
        """What tells the cluster apart among those of all kinds."""
        return cluster_key(self.kind, self.cluster_name)

    @property
    def ranks_per_node(self) -> int:
        """The ranks of each node, one per GPU unless they are stated. Raise `PriceError` for an unknown SKU."""
        gpus = self.engine.get("gpus", 0)
        return ranks_per_node(self.processes_per_node, self.traits, self.gpu_type, self.node_count, gpus)

    @property
    def sku(self) -> str:
        """What its nodes are priced as: DTRAIN_GPU_TYPE, in a partition that the site prices where there is one. Raise
        `PriceError` where the site's table lacks it."""
        return name_at_site(self.gpu_type, self.engine.get("partition")) if self.kind == "slurm" else self.gpu_type

    @property
    def have_gpus(self) -> bool:
        """Whether its nodes are known to have GPUs. Raise `PriceError` for an unknown SKU."""
        return have_gpus(self.traits, self.gpu_type, self.engine.get("gpus", 0))

    @property
    def traits(self) -> ClusterKind:
        """What this kind of cluster is and can do."""
        return KINDS[self.kind]

    @property
    def first_tier(self) -> Tier:
        """The tier on which nodes are requested first: the first of DTRAIN_TIER."""
        first = next(iter(self.azure.get("tiers") or ()), "dedicated") if self.kind == "azure_ml" else self.tier
        return tier_of(first)

    def node_env(self, project: ProjectConfiguration) -> dict[str, str]:
        """Return the trainer's environment on the nodes, besides the variables that the kind of cluster adds."""
        if self.traits.is_this_machine:
            return project.trainer_env()
        return {"DTRAIN_CACHE": os.environ.get("DTRAIN_CACHE") or NODE_CACHE, **allowed_modules(), **grace_period()}

    def registry(self, project: ProjectConfiguration, run_id: str | None = None) -> Registry:
        """Return the registry of models and metrics: on Azure ML the workspace, unless DTRAIN_MLFLOW_TRACKING_URI is
        set. ``run_id``: the Dagster run that it works for."""
        if self.kind == "azure_ml" and project.tracks_in_workspace:
            from dtrain_dagster.registry.azure import AzureMLRegistry

            return AzureMLRegistry(self.service().ml, AuditLog(Path(self.home), run_id))
        from dtrain_dagster.registry.local import MLflowRegistry

        return MLflowRegistry(project.tracking_uri)

    def service(self) -> Service:
        """Return the workspace of Azure ML. Raise as `azure_options` does."""
        from dtrain_dagster.clusters.azure_ml.client import Service

        return Service(self.azure_options())

    def azure_options(self) -> AzureMLOptions:
        """Return the checked options. Raise `ClusterError` for unusable ones, `PriceError` for a purchase without a
        known price."""
        sizes = default_chain(self.ranks_per_node, self.azure.get("tiers", ()))
        try:  # a launchpad may have changed what the environment says
            options = AzureMLOptions(
                **{"chain": sizes, **self.azure},
                cluster_name=self.cluster_name,
                storage_uri=self.shared_uri,
                processes_per_node=self.ranks_per_node,
                max_resubmissions=self.max_replacements,
            )
            refuse_unusable(options.cluster_name, options.idle_seconds)
        except SettingsError as error:
            raise ClusterError(str(error)) from None
        if not options.tiers:
            raise ClusterError("azure.tiers is empty: name dedicated, spot, or both")
        for choice in chain(self.gpu_type, options.chain, options.tiers):
            try:
                price_of(choice.sku).figure(tier_of(choice.tier))
            except PriceError as error:
                raise PriceError(
                    f"{choice} may be bought (DTRAIN_GPU_TYPE, DTRAIN_TIER, chain in DTRAIN_AZURE_OPTIONS): {error}"
                ) from None
        return options

    def manager(self, run_id: str | None = None, tends: bool = False) -> GPUClusterManager:
        """Return the cluster behind the settings. ``run_id``: the Dagster run that it works for. With None it only
        looks, as sensors do, and leaves jobs to the runs that follow them, unless a person acts through it
        (``tends``)."""
        if self.kind == "azure_ml":
            from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager

            tends = tends or run_id is not None
            return AzureMLClusterManager(self.azure_options(), Path(self.home), run_id, tends)
        from dtrain_dagster.clusters.managers import EngineClusterManager, LocalClusterManager
        from dtrain_dagster.clusters.supervision.launch import LaunchSettings

        settings = LaunchSettings(
            engine=self.kind,
            cluster_name=self.cluster_name,
            sku=self.sku,
            threads_per_rank=self.threads_per_rank,
            max_replacements=self.max_replacements,
            preflight=self.preflight,
            gpus=self.engine.get("gpus", 0),
        )
        if self.traits.has_engine:
            return EngineClusterManager(Path(self.home), settings, self.engine, self.ranks_per_node)
        return LocalClusterManager(Path(self.home), settings, self.ranks_per_node)


def read_configuration(settings: Settings) -> tuple[ClusterConfiguration, ProjectConfiguration]:
    """Return the cluster and the project of the environment's settings. No service is asked.

    Raise `dtrain_dagster.settings.environment.SettingsError` where settings of the cluster are missing or unusable.
    """
    on_azure, azure, engine = settings.cluster == "azure_ml", {}, {}
    if on_azure:
        azure = read_azure_options(settings)
    elif settings.kind.has_engine:
        engine = read_engine_options(settings.cluster)
    cluster = ClusterConfiguration(
        kind=settings.cluster,
        cluster_name=settings.cluster_name,
        home=str(settings.home),
        node_count=settings.nodes,
        processes_per_node=settings.processes_per_node,
        threads_per_rank=settings.threads_per_rank,
        max_replacements=settings.max_replacements,
        preflight=settings.preflight,
        gpu_type=settings.gpu_type,
        tier=settings.tiers[0],
        shared_uri=settings.shared_uri,
        azure=azure,
        engine=engine,
    )
    try:
        cluster.sku  # noqa: B018 - the site's table of prices is read
    except PriceError as error:
        raise SettingsError(str(error)) from None
    if on_azure:
        try:
            cluster.azure_options()
        except (ClusterError, PriceError) as error:
            raise SettingsError(str(error)) from None
    in_workspace = on_azure and settings.mlflow_tracking_uri is None
    project = ProjectConfiguration(
        home=str(settings.home),
        shared_uri=settings.shared_uri,
        tracking_uri=settings.tracking_uri,
        tracks_in_workspace=in_workspace,
        experiment=settings.experiment,
        model_name=settings.model_name,
        dagster_url=settings.dagster_url.rstrip("/"),
        dashboard_url=settings.dashboard_url,
        mlflow_url="" if in_workspace else settings.mlflow_page,
        notify=settings.notify,
        queue_deadline_hours=settings.queue_deadline_hours,
    )
    return cluster, project
