"""The table of prices: what it has, whose prices count, and fresh ones from the price list."""

from __future__ import annotations

import json
import os
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from price_list import PriceList, meter, price_list

from dtrain_dagster.cli.main import main
from dtrain_dagster.costs import retail
from dtrain_dagster.costs.prices import (
    PriceError,
    known_regions,
    merge,
    packaged_prices,
    price_of,
    price_table,
    read_prices,
    refreshed_path,
    refreshed_prices,
    skus,
)
from dtrain_dagster.costs.retail import choose_prices
from dtrain_dagster.settings.cluster_kinds import tier_of

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
T4, T4_LARGE, A100, H100 = (
    "Standard_NC4as_T4_v3", "Standard_NC64as_T4_v3", "Standard_NC24ads_A100_v4", "Standard_ND96isr_H100_v5",
)  # fmt: skip


@pytest.fixture
def home(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def listed():
    with price_list() as made:
        yield made


def ask(listed: PriceList, home: Path, *names: str, regions: tuple[str, ...] = ("eastus",)) -> retail.Refreshed:
    waits: list[float] = []
    done = retail.refresh_price_table(
        home / "prices.json", regions, names or (T4,), listed.url, NOW, pause=waits.append
    )
    listed.waits = waits  # type: ignore[attr-defined]
    return done


def test_every_figure_has_a_source_and_a_date_and_every_size_its_make(home):
    for region in known_regions():
        for row in price_table(region).values():
            assert row.figures
            assert min(row.gpus, row.gpu_memory_gib, row.vcpus, row.memory_gib, row.speed) > 0
            for figure in row.figures.values():
                assert figure.usd_per_hour > 0
                assert "2024-01" < figure.recorded_on < "2027"
                assert len(figure.source) > 20
            cheaper = [figure.usd_per_hour for tier, figure in row.figures.items() if tier != "dedicated"]
            assert all(usd < row.usd_per_hour("dedicated") for usd in cheaper)
    assert set(price_table()) == set(skus())  # in the default region all have a price
    assert price_of("Standard_NC6s_v3").speed == 1
    assert price_of("Standard_NC12s_v3").speed == 2
    assert price_of(T4).speed < 1 < price_of(A100).speed < price_of(H100).speed


def test_the_region_of_the_settings_counts(home, monkeypatch):
    assert price_of("standard_nc24ads_a100_V4").usd_per_hour("dedicated") == pytest.approx(3.673)
    assert price_of(A100, "South Central US").usd_per_hour("dedicated") == pytest.approx(4.408)
    monkeypatch.setenv("DTRAIN_REGION", "southcentralus")
    assert price_of(A100).region == "southcentralus"
    monkeypatch.setenv("DTRAIN_REGION", "westeurope")
    with pytest.raises(PriceError, match=r"Standard_NC24ads_A100_v4.*'westeurope'.*eastus.*dtrain cost --refresh"):
        price_of(A100)
    with pytest.raises(PriceError, match=r"'westeurope'.*only in eastus.*DTRAIN_REGION"):
        price_table()


def test_what_cannot_be_priced_is_refused_by_name(home):
    with pytest.raises(PriceError, match=r"Standard_X1.*eastus.*DTRAIN_GPU_TYPE.*Standard_NC6s_v3"):
        price_of("Standard_X1")
    with pytest.raises(PriceError, match=r"Standard_ND96asr_v4.*not offered.*dedicated"):
        price_of("Standard_ND96asr_v4").usd_per_hour("spot")
    with pytest.raises(
        PriceError, match=rf"no spot price of {H100} in eastus.*at most .*\$98.32: use tier dedicated.*refresh"
    ):
        price_of(H100).usd_per_hour("spot")
    assert [tier_of(name) for name in ("spot", "low_priority", "dedicated", "")] == [
        "spot", "spot", "dedicated", "dedicated",
    ]  # fmt: skip


NOISE = [
    meter(usd=0.71, productName="Virtual Machines NCasT4 v3 Series Windows"),
    meter(usd=0.3, type="DevTestConsumption"),
    meter(usd=3022.0, type="Reservation", reservationTerm="1 Year"),
    meter(usd=0.6, isPrimaryMeterRegion=False),
    meter(usd=0.4, productName="NCasT4 v3 Series Cloud Services"),
    meter(usd=0.5, effectiveStartDate="2019-01-01T00:00:00Z"),  # the same meter, before
    meter(usd=0.9, effectiveStartDate="2027-01-01T00:00:00Z"),  # and later
    meter(usd=0.2, effectiveStartDate="2022-01-01T00:00:00Z", effectiveEndDate="2023-01-01T00:00:00Z"),
    meter(usd=0.1, meterName="NC4as T4 v3 Expired"),
    meter(usd=77.0, unitOfMeasure="1/Month"),
    meter(usd=0.1, tierMinimumUnits=100.0),
    meter(usd=0.526),  # the same once more
]
WANTED = [meter(usd=0.526), meter(usd=0.105, suffix=" Low Priority"), meter(usd=0.0627, suffix=" Spot")]


def test_the_right_meters_are_picked_in_whatever_order_they_come():
    items = [*NOISE, *WANTED, meter(usd=0.55)]
    for seed in range(20):
        random.Random(seed).shuffle(items)
        assert choose_prices(items, "eastus", [T4], NOW) == {(T4, "dedicated"): 0.526, (T4, "spot"): 0.0627}


def listed_meter(usd: float, since: str = "2024-01-01", is_primary: bool = True, product: str = "") -> dict:
    name = product or "Virtual Machines X Series"
    day = f"{since}T00:00:00Z"
    return meter(usd=usd, effectiveStartDate=day, isPrimaryMeterRegion=is_primary, productName=name)


@pytest.mark.parametrize(
    ("meters", "usd"),
    [
        ([listed_meter(3.0, is_primary=False)], 3.0),
        ([listed_meter(3.0, "2025-01-01", is_primary=False), listed_meter(4.0, "2019-01-01")], 4.0),
        ([listed_meter(3.0, "2019-01-01"), listed_meter(4.0, "2025-01-01")], 4.0),
        ([listed_meter(3.0, product="NCX Promo"), listed_meter(4.0)], 4.0),
        ([listed_meter(0.0), listed_meter(4.0, "2019-01-01")], 4.0),
        ([listed_meter(0.0)], None),
        ([listed_meter(4.2), listed_meter(3.0)], 3.0),
    ],
)  # fmt: skip
def test_of_several_meters_one_wins_for_a_reason(meters, usd):
    for rows in (meters, meters[::-1]):
        assert choose_prices(rows, "eastus", [T4], NOW).get((T4, "dedicated")) == usd


def test_fresh_prices_count_from_then_on(home, listed):
    listed.items = [
        *NOISE, *WANTED,
        meter(T4_LARGE, 4.4), meter(T4_LARGE, 0.9, " Spot"),
        meter(A100, 4.8, armRegionName="westeurope"),
    ]  # fmt: skip
    listed.first = [
        (429, {"Retry-After": "7"}, b"slow down"),
        (503, {}, b"busy"),
        (429, {"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}, b""),
    ]
    assert price_of(T4).usd_per_hour("dedicated") == 0.53
    with pytest.raises(PriceError, match="not offered"):
        price_of(T4_LARGE).usd_per_hour("spot")
    done = ask(listed, home, T4, T4_LARGE, A100, regions=("eastus", "westeurope"))
    assert listed.waits == [7, 2, 4]  # as it said, else ever longer
    assert len(listed.asked) > 3 + 2  # several pages
    assert "serviceName eq 'Virtual Machines' and priceType eq 'Consumption'" in listed.asked[0]["$filter"]
    fresh = price_of(T4).figures
    assert {tier: figure.usd_per_hour for tier, figure in fresh.items()} == {"dedicated": 0.526, "spot": 0.0627}
    assert (fresh["dedicated"].recorded_on, fresh["dedicated"].how) == ("2026-11-21", "asked")
    assert listed.url in fresh["dedicated"].source
    assert "armRegionName eq 'eastus'" in fresh["dedicated"].source
    assert price_of(A100, "westeurope").usd_per_hour("dedicated") == 4.8  # a region that the package does not have
    with pytest.raises(PriceError, match="not offered"):  # a virtual machine has that meter, and a cluster does not
        price_of(T4_LARGE).usd_per_hour("spot")
    # What is not listed stays, and is said.
    assert price_of(A100).usd_per_hour("dedicated") == pytest.approx(3.673)
    assert f"{A100} in eastus: no dedicated price is listed; it stays at 3.673 of 2024-09" in done.notes
    assert f"{T4} in westeurope: no dedicated price is listed; it is not known" in done.notes
    assert not [note for note in done.notes if T4_LARGE in note and "eastus" in note]
    # Another refresh of something else leaves these; the newer of two counts.
    listed.items = [meter(A100, 3.5)]
    ask(listed, home, A100)
    assert price_of(T4).usd_per_hour("dedicated") == 0.526
    assert price_of(A100).usd_per_hour("dedicated") == 3.5
    assert price_of(A100, "westeurope").usd_per_hour("dedicated") == 4.8


def test_of_two_figures_the_newer_counts(home):
    table = retail.as_document(packaged_prices())
    assert read_prices(table) == packaged_prices()
    for day, usd in (("2020-01-01", 3.06), ("2026-01-01", 9.99)):
        old = {
            "currency": "USD",
            "sources": {"s": {"how": "asked", "recorded_on": day, "source": "x"}},
            "prices": {"eastus": {"Standard_NC6s_v3": {"dedicated": [9.99, "s"]}, "Standard_Of_The_Future": {}}},
        }
        refreshed_path().write_text(json.dumps(old))
        assert price_of("Standard_NC6s_v3").usd_per_hour("dedicated") == usd
        assert (
            merge([read_prices(old), packaged_prices()])["eastus", "Standard_NC6s_v3", "dedicated"].usd_per_hour == usd
        )


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"first": [(200, {}, b"<html>maintenance</html>")]}, "a price list"),
        ({"first": [(200, {}, b'{"Items": "none"}')]}, "cannot be read"),
        ({"first": [(200, {}, b"[]")]}, "a price list"),
        ({"first": [(404, {}, b"no such thing")]}, "404.*; its address or the region is wrong"),
        ({"first": [(302, {"Location": "http://127.0.0.1:9/"}, b"")]}, "a price list"),
        ({"first": [(500, {}, b"oh")] * 5}, "500.*try again later"),
        ({"first": [(429, {"Retry-After": "3600"}, b"")]}, "3600 s"),
        ({"items": [meter(usd=0.0)]}, r"lists no price of Standard_NC4as_T4_v3"),
        ({"items": [meter(usd=-1.0)]}, r"dedicated: -1.0"),
        ({"items": [meter(usd=float("inf"))]}, r"dedicated: inf"),
        ({"items": [meter(usd=52.6)]}, r"dedicated: 52.6 \(the package has 0.53\)"),
        ({"items": [meter(usd=0.0526)]}, r"dedicated: 0.0526 \(the package has 0.53\)"),
        ({"items": [meter(currencyCode="EUR")]}, "US dollars, got 'EUR'"),
        ({"items": [meter(retailPrice="cheap")]}, "cannot be read"),
        ({"items": [meter(effectiveStartDate="soon")]}, "cannot be read"),
        ({"items": []}, "'eastus': is the name right"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_believed_leaves_the_last_good_table(home, listed, broken, said):
    listed.items = [meter(usd=0.55)]
    ask(listed, home)
    good = refreshed_path().read_bytes()
    for name, value in broken.items():
        setattr(listed, name, value)
    with pytest.raises(retail.RetailError, match=said):
        ask(listed, home)
    assert refreshed_path().read_bytes() == good
    assert price_of(T4).usd_per_hour("dedicated") == 0.55
    assert os.listdir(home) == ["prices.json"]  # nothing half-written beside it


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "{}", '{"currency": "EUR", "sources": {}, "prices": {}}',
        '{"currency": "USD", "sources": {}, "prices": {"eastus": {"Standard_NC6s_v3": {"dedicated": [3, "s1"]}}}}',
        '{"currency": "USD", "sources": {"s": {"how": "", "recorded_on": "soon", "source": ""}}, "prices": {}}',
        '{"currency": "USD", "sources": {}, "prices": {"eastus": {"Standard_NC6s_v3": {"dedicated": [-3, "s1"]}}}}',
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused_until_it_is_fetched_again_or_deleted(home, listed, content):
    refreshed_path().write_text(content)
    with pytest.raises(PriceError, match=r"prices.json cannot be read.*dtrain cost --refresh.*delete it"):
        price_of(T4)
    listed.items = [meter(usd=0.55)]
    assert "started again" in ask(listed, home).notes[0]
    assert price_of(T4).usd_per_hour("dedicated") == 0.55
    refreshed_path().unlink()
    assert price_of(T4).usd_per_hour("dedicated") == 0.53
    assert refreshed_prices(refreshed_path()) == {}


def test_the_commands(home, listed, monkeypatch):
    monkeypatch.setattr("dtrain_dagster.cli.cost.RETAIL_URL", listed.url)

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["cost", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    said = run()
    row = next(line for line in said.splitlines() if "Standard_NC6s_v3" in line)
    assert row.split()[:6] == ["Standard_NC6s_v3", "eastus", "3.06", "[1]", "0.3978", "[2]"]
    assert row.split()[6:] == ["2025-09-30", "1", "×", "V100", "PCIe", "1", "16"]
    assert "[1] 2025-11-04, recorded: Azure ML's vmSizes answer" in said
    listed.items = [meter(usd=0.54)]
    said = run("--refresh", "--sku", T4.lower())
    assert "1 prices were found, 1 of them new or changed" in said
    assert f"eastus {T4} dedicated: 0.54, before 0.53" in said.splitlines()
    assert "0.54 [1]" in run("--sku", T4)
    assert "asked: Azure's retail price API" in run("--sku", T4.upper())
    assert "Standard_X" in run("--sku", "Standard_X", code=2)
    assert "known are Standard_NC6s_v3" in run("--refresh", "--sku", "Standard_X", code=2)
    assert "not an Azure region" in run("--refresh", "--region", "x' or 1 eq 1", code=2)
    assert "no prices are known in region 'westeurope'" in run("--region", "westeurope", code=2)
