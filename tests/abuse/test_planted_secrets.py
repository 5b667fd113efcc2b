"""Secrets given directly are refused at every border; given by reference they work and are found nowhere afterwards."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import random
import sqlite3
import urllib.parse
import urllib.request
import zlib
from contextlib import closing
from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import write_prices
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import load_settings
from tests.abuse.planted_secrets import (
    BORDERS,
    CARRIERS,
    FOR_PEOPLE,
    Border,
    price_server,
    refused,
    secret_of,
)
from tests.leaks import forms, leaks
from trainer.observability.mlflow_sqlite import authorised
from trainer.secrets.addresses import secret_in

REMEDIES = ("env:NAME", "without", "identity", "give the address alone", "read it from a variable")


@pytest.mark.parametrize("border", BORDERS, ids=lambda border: f"{border[0].__name__} {border[1]}")
def test_a_secret_given_directly_is_refused_in_words_that_do_not_repeat_it(border: Border) -> None:
    check, name, carriers = border
    chance = random.Random(name)
    assert carriers
    for kind, form in carriers.items():
        secret = secret_of(chance)
        for given in (secret, urllib.parse.quote(secret, safe="")):
            said = check(name, form.format(given))
            assert said, f"{name} takes a secret: {kind}"
            assert not [written for written in forms(secret) if written in said.encode()], f"{kind} is repeated: {said}"
            assert name in said or "source" in said
            assert [remedy for remedy in REMEDIES if remedy in said], said


@pytest.mark.parametrize("address", FOR_PEOPLE.values(), ids=list(FOR_PEOPLE))
def test_an_apprise_address_with_a_token_names_the_way(address: str) -> None:
    said = refused("DTRAIN_NOTIFY", f"json://127.0.0.1 {address.format('PLANTEDPLANTEDPLANTED123')}")
    assert "DTRAIN_NOTIFY=env:NAME or DTRAIN_NOTIFY=keyvault://VAULT/SECRET" in said
    assert "PLANTED" not in said


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("DTRAIN_NOTIFY", "json://127.0.0.1:8080/alerts mailto://localhost?from=a@b.c&to=d@e.f env:HOOK"),
        ("DTRAIN_NOTIFY", "keyvault://team-vault/slack"),
        ("DTRAIN_PRICES", "env:PRICES"),
        ("DTRAIN_PRICES", "https://example.org:8443/prices.csv?download=1&version=2024-01-01"),
        ("DTRAIN_PRICES", "abfss://prices@account.dfs.core.windows.net/p.csv"),
        ("DTRAIN_PRICES", "/data/token=1/a?sig=b.csv"),
        ("DTRAIN_PRICES", "https://example.org/p.csv?country_code=us&page_token=2&sort_key=date&zip.code=1"),
        ("DTRAIN_MLFLOW_TRACKING_URI", "http://127.0.0.1:5000"),
        ("DTRAIN_MLFLOW_TRACKING_URI", "keyvault://team-vault/mlflow"),
        ("DTRAIN_MLFLOW_TRACKING_URI", "sqlite:////home/a:b@c/mlflow.db"),
    ],
)
def test_an_address_without_a_secret_or_a_reference_is_taken(setting: str, value: str) -> None:
    assert not refused(setting, value)


def test_a_reference_is_refused_where_none_is_resolved() -> None:
    assert "calendar takes no reference" in refused("DTRAIN_OPTIONS: calendar", "env:CALENDAR")
    assert "is not a reference" in refused("DTRAIN_PRICES", "env:NOT-A-NAME")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["a", "://a:b", "?a=", "%25"])
def test_a_long_text_takes_no_time_to_speak_of(piece: str) -> None:
    assert secret_in(piece * (100_000 // len(piece))) is None


def test_prices_by_reference_are_read_and_their_address_is_kept_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secret_of(random.Random(1))
    with price_server(b"date,A,B\n2020-01-02,1,2\n2020-01-03,3,4\n", secret) as address:
        monkeypatch.setenv("PRICES_ADDRESS", address)
        source = price_source("env:PRICES_ADDRESS")
        ref = write_prices(source, str(tmp_path / "storage"))
        assert source.version() == source.version()  # type: ignore[attr-defined]
    assert (ref.rows, ref.manifest()["source"]["origin"]) == (4, "env:PRICES_ADDRESS")
    assert not leaks([tmp_path], [secret])


@pytest.mark.parametrize("answer", [403, 500])
def test_a_server_that_refuses_does_not_make_us_tell_its_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """fsspec puts the whole address into its errors, and Dagster stores errors."""
    secret = secret_of(random.Random(answer))
    with price_server(b"", secret, answer) as address:
        monkeypatch.setenv("PRICES_ADDRESS", address)
        source = price_source("env:PRICES_ADDRESS")
        for ask in (lambda: write_prices(source, str(tmp_path)), source.version, source.digest):  # type: ignore[attr-defined]
            with pytest.raises((OSError, DataError)) as error:
                ask()
            (tmp_path / "traceback.txt").write_text(f"{error.value!r} {error.getrepr(chain=True)}")
            assert not leaks([tmp_path], [secret])


def test_the_launchpad_takes_no_secret_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    job = build_defs(load_settings()).resolve_implicit_global_asset_job_def()
    sas = CARRIERS["sas"].format("PLANTEDPLANTED")
    fields = build_resources(load_settings())["project"].model_dump()
    fields["notify"] = "slack://T1JJ3T3L2/A1BRTD4JD/PLANTEDPLANTEDPLANTED123"
    in_resource = {"resources": {"project": {"config": fields}}}
    for config in ({"ops": {"stock_prices": {"config": {"source": sas}}}}, in_resource):
        with dg.DagsterInstance.ephemeral() as instance:
            done = job.execute_in_process(
                run_config=config,
                instance=instance,
                raise_on_error=False,
                asset_selection=[dg.AssetKey("stock_prices")],
            )
            said = "\n".join(f"{entry.user_message} {entry.dagster_event}" for entry in instance.all_logs(done.run_id))
        assert not done.success
        assert "env:NAME" in said
        assert "PLANTED" not in said


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    secret = secret_of(random.Random(3))
    document = json.dumps({"a": f"x{secret}y"}).encode()
    hidden = {
        "plain": document,
        "packed": zlib.compress(document),
        "gzip in base64": b"data:" + base64.b64encode(gzip.compress(b"." * 50 + document)) + b"#",
        "address": urllib.parse.quote(urllib.parse.quote(secret, safe=""), safe="").encode(),
        "pickle": pickle.dumps({"a": [secret]}),
        "html": b"&lt;" + secret.encode(),
    }
    for name, content in hidden.items():
        (tmp_path / name).write_bytes(content)
    with closing(sqlite3.connect(tmp_path / "cells.db")) as database:
        database.execute("pragma journal_mode = wal")
        database.execute('create table "a ""b" (one, two)')
        database.execute('insert into "a ""b" values (1, ?)', (zlib.compress(base64.b64encode(document)),))
        database.commit()
        assert sorted({line.rsplit(":", 1)[0].split("/")[-1] for line in leaks([tmp_path], [secret])}) == sorted(
            [*hidden, "cells.db"]
        )
    assert not leaks([tmp_path], [secret_of(random.Random(4))])


def test_the_password_of_a_tracking_server_leaves_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow prints the address of each run, password and all, and puts it into its errors."""
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TRACKING", "https://robot:a%2Fb%40c@example.org:5000/x?y=1")
    assert authorised("env:TRACKING") == "https://example.org:5000/x?y=1"
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("robot", "a/b@c")
    for plain in ("sqlite:////home/a:b@c/mlflow.db", "http://127.0.0.1:5000", "postgresql://a:b@c/d"):
        monkeypatch.setenv("TRACKING", plain)
        assert authorised("env:TRACKING") == plain
