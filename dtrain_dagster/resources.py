"""The resources of the graph: the cluster that trains, and the project's folders and registry. They only configure."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from dtrain_dagster.configuration import ClusterConfiguration, ProjectConfiguration, read_configuration
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import refuse_inline_secret
from dtrain_dagster.support.secrets import SecretError, refuse_secret

if TYPE_CHECKING:
    from upath import UPath


class ValueFiles(dg.UPathIOManager):
    """Keeps values as pickles in the files that `dagster.FilesystemIOManager` reads and writes."""

    def dump_to_path(self, context: dg.OutputContext, obj: Any, path: UPath) -> None:
        """Write a value's file."""
        path.write_bytes(pickle.dumps(obj))

    def load_from_path(self, context: dg.InputContext, path: UPath) -> Any:
        """Return the value in a file. Raise `dagster.Failure` for one of a version whose classes were others."""
        try:
            value = pickle.loads(path.read_bytes())  # noqa: S301 - whoever writes to Dagster's home runs code anyway
        except (ImportError, AttributeError, TypeError) as error:
            found: object = error
        else:
            names = [item.name for item in fields(value)] if is_dataclass(value) else []
            found = ", ".join(name for name in names if not hasattr(value, name))
        if found:
            name = context.asset_key.to_user_string()
            raise dg.Failure(
                f"the value of {name} was stored by another version ({found}): materialize {name} again",
                allow_retries=False,
            )
        return value

    def get_metadata(self, context: dg.OutputContext, obj: Any) -> dict[str, dg.MetadataValue]:
        """Return what stands on the page instead of the full path; nothing for an asset without a value."""
        if obj is None or not context.has_asset_key:
            return {}
        return {"path": dg.MetadataValue.text(f"{'/'.join(context.asset_key.path)} in Dagster's storage")}


class ProjectResource(ProjectConfiguration, dg.ConfigurableResource):
    """The project's places: folders, tracking server, names."""

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Raise `dagster.Failure` where the launchpad has put a secret into a field: Dagster has stored it by then."""
        refuse_secrets_of(self, "project")


class GPUClusterResource(ClusterConfiguration, dg.ConfigurableResource):
    """The cluster that trains. Assets are the same whatever its kind."""

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Raise `dagster.Failure` where the launchpad has put a secret into a field: Dagster has stored it by then."""
        refuse_secrets_of(self, "cluster")


def cluster_resource(context: Any, names: GraphNames) -> GPUClusterResource:
    """Return the cluster that trains, in the body of an asset, a check, a sensor or a schedule of this graph."""
    return getattr(context.resources, names.cluster)


def project_resource(context: Any, names: GraphNames) -> ProjectResource:
    """Return the project's places, as `cluster_resource` does the cluster."""
    return getattr(context.resources, names.project)


def refuse_secrets_of(resource: dg.ConfigurableResource, key: str) -> None:
    """Raise `dagster.Failure` for a field of a resource that carries a secret. It names the field, not its content."""
    for field in type(resource).model_fields:
        value = getattr(resource, field)
        refuse = refuse_inline_secret if field == "notify" else refuse_secret
        for part in value.split() if isinstance(value, str) else ():
            try:
                refuse(f"resources.{key}.config.{field}", part)
            except SecretError as error:
                raise dg.Failure(f"{error}. {STORED}", allow_retries=False) from None


STORED = "The configuration of this run is stored already: revoke that key or password, and make another"


@dg.io_manager(config_schema={}, description="Values of assets in the folder of Dagster's instance")
def value_files(context: dg.InitResourceContext) -> ValueFiles:
    """Return the IO manager that keeps values of assets on this machine, without a field for a launchpad: they are
    pickles, so a user who chose the folder would choose what runs here."""
    from upath import UPath

    assert context.instance is not None
    return ValueFiles(UPath(context.instance.storage_directory()))


def build_resources(settings: Settings, names: GraphNames = STOCK_NAMES) -> dict[str, Any]:
    """Return resource key → resource, from the environment's settings; each field can be changed in the launchpad. A
    graph with a name has an IO manager of its own, so that its values do not depend on what the code location has.

    Raise `dtrain_dagster.settings.environment.SettingsError` where Azure's settings are missing or unusable; no service
    is asked.
    """
    cluster, project = read_configuration(settings)
    return {
        names.project: ProjectResource(**project.model_dump()),
        names.cluster: GPUClusterResource(**cluster.model_dump()),
        names.values: value_files,
    }
