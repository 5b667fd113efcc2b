"""What a start would ask Azure ML for: the compute and the job, as the client sends them, written down as YAML.

It only reads: sizes, quotas and the computes that are there. The descriptions are those of `provision` and `jobs`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.azure_ml.compute_description import describe_compute
from dtrain_dagster.clusters.azure_ml.jobs import Jobs
from dtrain_dagster.clusters.azure_ml.launch_record import Record
from dtrain_dagster.clusters.azure_ml.provision import BROKEN, Provisioned, Provisioner
from dtrain_dagster.clusters.azure_ml.sku_chain import compute_name, no_capacity
from dtrain_dagster.clusters.submission import Request, as_comment, yaml_text


def preview_nodes(
    provisioner: Provisioner, node_count: int, wanted: str, tags: Mapping[str, str]
) -> tuple[Provisioned, Request]:
    """Return the nodes that `Provisioner.provision` would ask for first, and their compute. Raise as it does where none
    can be asked for."""
    options, refusals = provisioner.options, []
    computes = {name: it for name, it in provisioner.computes().items() if it.provisioning_state not in BROKEN}
    for choice, there, refusal in provisioner.choices(node_count, wanted, computes):
        if refusal is not None:
            refusals.append(refusal)
            continue
        name = compute_name(options.cluster_name, choice)
        most = max(node_count, (there.max_instances or 0) if there is not None else 0)
        is_used = there is not None and provisioner.fits(there, choice, node_count)
        done = "is there already, and is used as it is" if is_used else "is made, or changed to this"
        title = f"the compute, which {done}; if it is refused, the next size of the chain is asked for"
        got = Provisioned(
            compute=name, sku=choice.sku, tier=choice.tier, node_count=node_count, max_nodes=most, attempts=()
        )
        text = entity_text(describe_compute(options, choice, name, most, tags))
        return got, Request(title=title, form="yaml", text=text)
    raise no_capacity(node_count, [], refusals)


def preview_job(jobs: Jobs, record: Record, factories: Sequence[str]) -> Request:
    """Return the job of a launch. Raise `ClusterError` as its submission does."""
    with jobs.described(record, factories) as (entity, files):
        listed = "\n  ".join(files)
        code = as_comment(f"code: these {len(files)} files are sent along:\n  {listed}")
        return Request(title=f"the job {record['job_name']}", form="yaml", text=f"{code}\n{entity_text(entity)}")


def entity_text(entity: Any) -> str:
    """Return a compute or a job as its client writes it down."""
    import yaml  # not above: loading the code location does without

    written = io.StringIO()
    entity.dump(written)
    document = yaml.safe_load(written.getvalue())
    if "component" in document:
        document["component"]["code"] = "the folder of these files"
    return yaml_text(document)
