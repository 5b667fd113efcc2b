"""Is a scoring endpoint compatible with a job's model? From a shell:

python -m dtrain_dagster.registry.endpoints check
"""

from __future__ import annotations

from typing import Any, cast

import click

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.jobs.orders import order_of
from dtrain_dagster.registry.endpoint import EndpointCheck, ScoringEndpoint, authorisation, check_endpoint
from dtrain_dagster.registry.smoke_test import Candidate
from dtrain_dagster.settings.environment import Settings, load_settings
from trainer.printable import visible
from trainer.rundir import JOB, RunDir
from trainer.storage.base import StorageError
from trainer.storage.open import open_storage

EXIT_REFUSED, EXIT_INCOMPATIBLE = 2, 1


class _Refusal(click.ClickException):
    exit_code = EXIT_REFUSED


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def endpoint() -> None:
    """Check a scoring endpoint.

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
@click.option(
    "--deployment", metavar="NAME", help="Deployment of an endpoint of Azure ML that is asked, whatever its traffic."
)
def check(run_dir: str, url: str, dialect: str, token: str | None, deployment: str | None) -> None:
    """Check that an endpoint serves the model of a job.

    The endpoint is asked for forecasts, which must have the right
    shape and the right numbers, and must refuse wrong requests. The exit code is 1 where it does not pass.

    \b
    Examples:
      python -m dtrain_dagster.registry.endpoints check train-1 --url http://127.0.0.1:5001/invocations
      python -m dtrain_dagster.registry.endpoints check az://dtrain/jobs/train-1 \\
        --dialect azureml --url https://quotes.eastus.inference.ml.azure.com/score --token identity
    """
    try:
        settings = load_settings()
        run_dir = _address_of(settings, run_dir)
        trained = Candidate(run_dir, order_of(settings.home, RunDir(run_dir)))
        headers = authorisation(token) if token else dict
        public = {"azureml-model-deployment": deployment} if deployment else {}
        asked = ScoringEndpoint(url=url, dialect=cast(Any, dialect), headers=headers, public_headers=public)
        found = check_endpoint(asked, trained)
    except (ValueError, ClusterError, StorageError) as error:  # all of this project's are ValueError, or one of these
        raise _Refusal(visible(str(error), keep_lines=True)) from None
    _print_check(found)


def _address_of(settings: Settings, given: str) -> str:
    """Return the address of a run directory, which is given as such or by the name of its job."""
    if "://" in given or "/" in given or open_storage(given).exists(JOB):
        return given
    if not open_storage(settings.jobs_uri).exists(f"{given}/{JOB}"):
        raise _Refusal(f"no job {given!r}; `dtrain jobs` lists them")
    return f"{settings.jobs_uri}/{given}"


def _print_check(found: EndpointCheck) -> None:
    """Print the findings, one line each. End the command with exit code 1 if one did not pass."""
    for item in found.findings:
        click.echo(f"{'ok  ' if item.passed else 'FAIL'} {item.name}: {visible(item.message)}")
    if not found.passed:
        raise SystemExit(EXIT_INCOMPATIBLE)


if __name__ == "__main__":
    endpoint(prog_name="python -m dtrain_dagster.registry.endpoints")
