"""What is said of the days after a model's own data, against the report on the whole split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain_dagster.registry.promotion import judge_later_days
from tests.trainer.market import Market
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import FactoryConfig
from trainer.engine.window_problem import WindowJudge
from trainer.evaluation.evaluate import JudgeRequest
from trainer.evaluation.gate import better_baselines
from trainer.model.build import build_loss, build_model
from trainer.model.saved_model import SavedModel
from trainer.rundir import RunDir
from trainer.spec import DataSpec


@dataclass
class Asked:
    """A model that answers here, and not in a process of its own."""

    spec: DataSpec
    saved: SavedModel

    def predict(self, windows: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
        return self.saved.predict(windows)


def test_of_later_days_is_said_what_the_report_said(tmp_path: Path) -> None:
    market = Market()
    cpu = torch.device("cpu")
    criterion = build_loss(FactoryConfig(factory="student_t"), market.spec)
    model = build_model(FactoryConfig(factory="tcn"), market.spec, 3)
    request = JudgeRequest(model=model, world=World(RankFacts(), cpu, "gloo"), device=cpu, batch_size=1024)
    judge = WindowJudge(criterion, market, lambda _: criterion)  # type: ignore[arg-type]
    report = judge.report(request, RunDir(str(tmp_path)), lambda _: None)
    asked = Asked(market.spec, SavedModel(model, criterion, market.spec, {}))
    first, last = (np.datetime64(report[name]) for name in ("first_date", "last_date"))

    def judge(after: Any, spec: DataSpec = market.spec) -> dict[str, Any]:
        return judge_later_days(replace(asked, spec=spec), market, after, 60.0)  # type: ignore[arg-type]

    whole = judge(first - 1)
    assert (whole["windows"], whole["days"]) == (report["windows"], report["days"])
    assert whole["nll"] == pytest.approx(report["model"]["nll"], rel=1e-6)
    for name, row in whole["baselines"].items():
        assert row == pytest.approx({key: report["baselines"][name][key] for key in row}, rel=1e-5)
    assert better_baselines(whole) == better_baselines(report)

    part = judge(last - 30)
    assert part["days"] == 30
    assert part["first_date"] == str(last - 29)
    assert judge(last)["windows"] == 0
    with pytest.raises(ValueError, match="horizon is 6"):
        judge(first, replace(market.spec, horizon=6))
