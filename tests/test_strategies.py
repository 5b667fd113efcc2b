"""What is said of strategies and frameworks in more than one place, since one side must not import the other."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

from dtrain_dagster.assets import plan_options
from trainer.strategies import PACKAGES, REMEDIES, Strategy

ROOT = Path(__file__).parents[1]


def test_the_launchpad_offers_every_strategy() -> None:
    assert [item.value for item in plan_options.Strategy] == list(get_args(Strategy))


def test_each_package_has_a_remedy_and_deepspeeds_is_that_of_the_extra() -> None:
    assert set(REMEDIES) == set(PACKAGES)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [wanted] = [item for item in extras["frameworks"] if item.startswith("deepspeed")]
    assert wanted in REMEDIES["deepspeed"]
    assert wanted in (ROOT / "docs" / "frameworks.md").read_text()
