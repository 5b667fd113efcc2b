"""Is a scoring endpoint compatible with a job's model, and models on endpoints of Azure ML, from a shell:

python -m dtrain_dagster.registry.endpoints check|deploy
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.clusters.azure_ml.client import Service
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.jobs.orders import order_of
from dtrain_dagster.jobs.progress import REGISTRATION
from dtrain_dagster.registry.azure_endpoint import Target
from dtrain_dagster.registry.azure_endpoint import deploy as put
from dtrain_dagster.registry.endpoint import EndpointCheck, ScoringEndpoint, authorisation, check_endpoint
from dtrain_dagster.registry.versions import RegisteredModel
from dtrain_dagster.settings.azure import read_azure_options
from dtrain_dagster.settings.environment import Settings, load_settings
from dtrain_dagster.support.audit import AuditLog
from trainer.printable import visible
from trainer.rundir import JOB, RunDir
from trainer.storage.base import StorageError
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

EXIT_REFUSED, EXIT_INCOMPATIBLE = 2, 1


class _Refusal(click.ClickException):
    exit_code = EXIT_REFUSED


def _refuses(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose errors are one sentence: all of this project's are ValueError, or one of these."""

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except (ValueError, ClusterError, StorageError) as error:
            raise _Refusal(visible(str(error), keep_lines=True)) from None

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def endpoint() -> None:
    """Check a scoring endpoint; deploy one on Azure ML.

    JOB is the whole name of a job, or the address of a run directory.
    """


@endpoint.command()
@click.argument("run_dir", metavar="JOB")
@click.option("--url", required=True, metavar="URL", help="The whole scoring address, …/invocations or …/score.")
@click.option(
    "--dialect",
    type=click.Choice(["mlflow", "azureml"]),
    default="mlflow",
    show_default=True,
    help="mlflow: an MLflow server; azureml: a scoring script made by Azure ML.",
)
@click.option(
    "--token",
    metavar="REFERENCE",
    help="Where the key or token is: env:NAME, keyvault://VAULT/SECRET, or identity for this machine's own.",
)
@click.option("--rows", type=click.IntRange(min=1), default=32, show_default=True, metavar="N", help="Windows to send.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: passed, and the findings.")
@_refuses
def check(run_dir: str, url: str, dialect: str, token: str | None, rows: int, as_json: bool) -> None:
    """Check that an endpoint serves the model of a job.

    The endpoint is asked for forecasts, which must have the right
    shape and the right numbers, and must refuse wrong requests. The exit code is 1 where it does not pass.

    \b
    Examples:
      python -m dtrain_dagster.registry.endpoints check train-1 --url http://127.0.0.1:5001/invocations
      python -m dtrain_dagster.registry.endpoints check az://dtrain/jobs/train-1 \\
        --dialect azureml --url https://quotes.eastus.inference.ml.azure.com/score --token identity
    """
    settings = load_settings()
    run_dir = _address_of(settings, run_dir)
    order = order_of(settings.home, RunDir(run_dir))
    headers = authorisation(token) if token else dict
    asked = ScoringEndpoint(url=url, dialect="azureml" if dialect == "azureml" else "mlflow", headers=headers)
    _print_check(check_endpoint(asked, run_dir, rows=rows, order=order), as_json)


@endpoint.command()
@click.argument("run_dir", metavar="JOB")
@click.option("--name", required=True, metavar="ENDPOINT", help="Name of the endpoint, which is there already.")
@click.option(
    "--instance-type", default="Standard_DS3_v2", show_default=True, metavar="SKU", help="Kind of its machines."
)
@click.option(
    "--instances", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Number of its machines."
)
@click.option(
    "--image", metavar="IMAGE", help="Serving image (deploy/azure/serving.Dockerfile).  [default: Azure ML makes one]"
)
@_refuses
def deploy(run_dir: str, name: str, instance_type: str, instances: int, image: str | None) -> None:
    """Deploy the registered model of a job on an endpoint of Azure ML.

    The model gets traffic once it has answered correctly, and what it
    replaces is deleted; if anything fails, the deployment before it
    keeps answering.

    \b
    Examples:
      python -m dtrain_dagster.registry.endpoints deploy train-1 --name quotes
    """
    run_dir = _address_of(load_settings(), run_dir)
    model, (client, audit) = _registered(run_dir), _workspace()
    target = Target(
        client=client, endpoint=name, instance_type=instance_type, instance_count=instances, image=image, audit=audit
    )
    order = order_of(load_settings().home, RunDir(run_dir))
    deployed = put(target, model, lambda asked: check_endpoint(asked, run_dir, patience_seconds=300, order=order))
    what = "deployed" if deployed.created else "was there already"
    click.echo(f"{model.name} version {model.version} {what}: {deployed.check.url}")
    _print_check(deployed.check)
    click.echo(f"it costs money until it is deleted, used or not: az ml online-endpoint delete --name {name}")


def _address_of(settings: Settings, given: str) -> str:
    """Return the address of a run directory, which is given as such or by the name of its job."""
    if "://" in given or "/" in given or open_storage(given).exists(JOB):
        return given
    if not open_storage(settings.jobs_uri).exists(f"{given}/{JOB}"):
        raise _Refusal(f"no job {given!r}; `dtrain jobs` lists them")
    return f"{settings.jobs_uri}/{given}"


def _workspace() -> tuple[MLClient, Any]:
    """The client of the workspace that ``DTRAIN_AZURE_*`` names, and the audit log."""

    settings = load_settings()
    if settings.cluster != "azure_ml":
        raise _Refusal("endpoints are Azure ML's: set DTRAIN_CLUSTER=azure_ml and DTRAIN_AZURE_* (docs/azure.md)")
    found = read_azure_options(settings).items()
    own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found}
    options = AzureMLOptions(**own, cluster_name=settings.cluster_name, storage_uri=settings.shared_uri)
    return Service(options).ml, AuditLog(settings.home)


def _registered(run_dir: str) -> RegisteredModel:
    """The version that a run directory became, as `registered_model` noted it: with the order of the job, which nodes
    cannot write; in the run directory only where the job was not ordered from here."""
    order = order_of(load_settings().home, RunDir(run_dir))
    known = RunDir(run_dir).read_json(REGISTRATION) if order is None else order.registered
    if not known:
        where = f"{run_dir} has no {REGISTRATION}" if order is None else f"{run_dir} was not registered from here"
        raise _Refusal(f"{where}: materialize registered_model first")
    return RegisteredModel(name=known["name"], version=str(known["version"]), run_id="", created=False)


def _print_check(found: EndpointCheck, as_json: bool = False) -> None:
    """Print the findings, one line each. End the command with exit code 1 if one did not pass."""
    if as_json:
        findings = [{"name": item.name, "passed": item.passed, "message": item.message} for item in found.findings]
        click.echo(json.dumps({"passed": found.passed, "findings": findings}, indent=2))
    for item in () if as_json else found.findings:
        click.echo(f"{'ok  ' if item.passed else 'FAIL'} {item.name}: {visible(item.message)}")
    if not found.passed:
        raise SystemExit(EXIT_INCOMPATIBLE)


if __name__ == "__main__":
    endpoint(prog_name="python -m dtrain_dagster.registry.endpoints")
