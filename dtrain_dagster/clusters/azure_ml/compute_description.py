"""A compute as the service's client takes it and writes it down, and what is read from one as the client gives it."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.sku_chain import AML_COMPUTE, SkuChoice, fold_name, spell_sku
from dtrain_dagster.clusters.submission import yaml_text
from dtrain_dagster.settings.tiers import OLD_SPOT

if TYPE_CHECKING:
    from azure.ai.ml.entities import AmlCompute

TAG, CLUSTER_TAG = "dtrain", "dtrain_cluster"


def describe_compute(options: AzureMLOptions, choice: SkuChoice, name: str, most: int) -> AmlCompute:
    """Return the whole description of a compute with up to ``most`` nodes, as it is asked for and changed."""
    from azure.ai.ml.entities import AmlCompute, IdentityConfiguration, ManagedIdentityConfiguration, NetworkSettings

    network = NetworkSettings(subnet=options.subnet) if options.subnet else None
    if options.identity:
        user = ManagedIdentityConfiguration(client_id=options.identity_client_id, resource_id=options.identity)
        identity = IdentityConfiguration(type="user_assigned", user_assigned_identities=[user])
    else:
        identity = IdentityConfiguration(type="system_assigned")
    return AmlCompute(
        name=name,
        size=choice.sku,
        # The spelling that the client passes on: "LowPriority" would go out as a word that the service does not know.
        tier=OLD_SPOT if choice.tier == "spot" else choice.tier,
        min_instances=0,
        max_instances=most,
        idle_time_before_scale_down=options.idle_seconds,
        ssh_public_access_enabled=False,
        enable_node_public_ip=options.public_ip,
        network_settings=network,
        identity=identity,
        tags={TAG: "1", CLUSTER_TAG: options.cluster_name},
    )


def is_own_compute(listed: Any, cluster_name: str) -> bool:
    """Return whether a compute, as the service lists it, is one of this cluster. Those of others may be of any kind and
    lack any field, and the client cannot read all of them."""
    kind = getattr(getattr(listed, "properties", None), "compute_type", None)
    tags = getattr(listed, "tags", None) or {}
    return fold_name(str(kind or "")) == fold_name(AML_COMPUTE) and tags.get(CLUSTER_TAG) == cluster_name


def word_of(state: Any) -> str:
    """Return the service's word, which the client gives as an enum, or as text where it does not know the word."""
    return str(getattr(state, "value", state) or "")


def compute_tier(compute: AmlCompute) -> str:
    """Return the tier of a compute."""
    return "spot" if re.search("low|spot", str(compute.tier or "").casefold()) else "dedicated"


def compute_sku(compute: AmlCompute) -> str:
    """Return the size of a compute, as the price table spells it."""
    return spell_sku(str(compute.size))


def entity_text(entity: Any) -> str:
    """Return a compute or a job as its client writes it down."""
    import yaml  # not above: loading the code location does without

    written = io.StringIO()
    entity.dump(written)
    document = yaml.safe_load(written.getvalue())
    if "component" in document:
        document["component"]["code"] = "the folder of these files"
    return yaml_text(document)
