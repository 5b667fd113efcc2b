"""Secrets in wrong places: in every setting, job and address that could take them; by reference in a pipeline.

Given directly they must be refused, with a message that does not repeat them. Given by reference they must work, and be
found nowhere afterwards (`tests.leaks`): not in files, in any cell of Dagster's databases, or in the output.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import string
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

from werkzeug import Request, Response

from tests.loopback import LoopbackServer

SETTINGS = (
    "DTRAIN_PRICES", "DTRAIN_NOTIFY", "DTRAIN_STORAGE", "DTRAIN_MLFLOW_TRACKING_URI",
    "DTRAIN_OPTIONS: dagster_url", "DTRAIN_OPTIONS: calendar", "DTRAIN_OPTIONS: experiment",
)  # fmt: skip
"""Settings that must refuse a secret."""
CARRIERS: dict[str, str] = {
    "password": "https://robot:{}@example.org/x",
    "postgres": "postgresql://robot:{}@db.example.org:5432/mlflow",
    "sas": "https://a.blob.core.windows.net/c/p.csv?sv=2024-01-01&se=2030-01-01&sr=b&sig={}",
    "sas of blob": "az://container/p.csv?se=2030-01-01&sig={}",
    "token": "https://example.org/p.csv?token={}",
    "access token": "https://example.org/p.csv?a=1&access_token={}#top",
    "api key": "https://example.org/p.csv?API_KEY={}",
    "function key": "https://a.azurewebsites.net/api/prices?code={}",
    "s3 signature": "https://b.s3.amazonaws.com/p.csv?X-Amz-Credential=a&X-Amz-Signature={}",
    "chained": "simplecache::https://robot:{}@example.org/p.csv",
    "account key": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=core.windows.net",
    "shared access": "Endpoint=sb://a.example.org;SharedAccessSignature={}",
    "odbc": "mssql+pyodbc:///?odbc_connect=Driver%3Dx%3BUid%3Da%3BPwd%3D{}%3B",
    "slack": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/{}",
    "teams": "https://a.webhook.office.com/webhookb2/{}/IncomingWebhook/b/c",
    "discord": "https://discord.com/api/webhooks/4174216298/{}",
    "telegram": "https://api.telegram.org/bot123456789:{}/sendMessage",
}
"""Addresses as services give them out, with a place for the secret."""
FOR_PEOPLE: dict[str, str] = {
    "mail": "mailto://robot:{}@example.org",
    "apprise slack": "slack://T1JJ3T3L2/A1BRTD4JD/{}/#alerts",
    "mistyped": "slakc://T1JJ3T3L2/A1BRTD4JD/{}",
    "json": "json://robot:{}@example.org",
}
"""Addresses that only DTRAIN_NOTIFY takes."""


def secret_of(chance: random.Random) -> str:
    """Return a secret unlike any other text, which every encoding changes: an address, JSON, base64."""
    letters = "".join(chance.choices(string.ascii_letters + string.digits, k=20))
    return f"pl4nt3d/{letters}+{letters[::-1]}=="


def refused(setting: str, text: str) -> str:
    """Return the message that refuses a setting of this value; "" if it is accepted."""
    from dtrain_dagster.settings.environment import SettingsError, load_settings

    given = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    on_azure = {"DTRAIN_CLUSTER": "azure_ml"} if setting == "DTRAIN_STORAGE" else {}
    variable, _, option = setting.partition(": ")
    text = shlex.quote(f"{option}={text}") if option else text
    with mock.patch.dict(os.environ, {**given, **on_azure, variable: text}, clear=True):
        try:
            load_settings()
        except SettingsError as error:
            return str(error)
    return ""


def refused_job(field: str, text: str) -> str:
    """Return the message that refuses a job with this value in a field; "" if it is accepted."""
    from trainer.config import ConfigError, parse_job

    job = {"job_id": "a", "run_dir": "/tmp/a", "dataset": {"uri": "/tmp/d"}}
    try:
        parse_job(json.dumps(job), [f"{field}={text}"])
    except ConfigError as error:
        return str(error)
    return ""


def refused_prices(_: str, text: str) -> str:
    """Return the message that refuses a source of prices from the launchpad; "" if it is accepted."""
    from dtrain_dagster.data.errors import DataError
    from dtrain_dagster.data.sources import price_source

    try:
        price_source(text)
    except DataError as error:
        return str(error)
    return ""


Border = tuple[Callable[[str, str], str], str, Mapping[str, str]]
BORDERS: tuple[Border, ...] = (
    *((refused, setting, CARRIERS) for setting in SETTINGS),
    (refused, "DTRAIN_NOTIFY", FOR_PEOPLE),
    *((refused_job, field, CARRIERS) for field in ("tracking.mlflow_tracking_uri", "dataset.uri", "run_dir")),
    (refused_job, "model.args.address", CARRIERS),
    (refused_prices, "source", CARRIERS),
)
"""Places that take a value from outside: the check, the name, and the addresses that are tried."""


@contextmanager
def price_server(csv: bytes, secret: str, answer: int = 200) -> Iterator[str]:
    """Serve a price file on loopback to requests with the signature, and yield the signed address; ``answer`` is the
    status that it returns to them."""

    def give(request: Request) -> Response:
        status = answer if request.args.get("sig") == secret else 403
        return Response(csv if status == 200 else b"", status)

    with LoopbackServer(give) as server:
        signature = urllib.parse.quote(secret, safe="")
        yield f"http://127.0.0.1:{server.port}/team/prices.csv?sv=2024&se=2030&sig={signature}"
