"""One rank of a world that evaluates the small market, in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from market import Market

from trainer.comm.static_rendezvous import join_world
from trainer.config import DistributedTrainingConfig, FactoryConfig
from trainer.evaluation import window_baselines as baselines
from trainer.evaluation.evaluate import JudgeRequest
from trainer.evaluation.window_judge import WindowJudge, forecast_windows
from trainer.model.build import build_loss, build_model
from trainer.rundir import RunDir

CPU = torch.device("cpu")


def forecaster(market: Market, loss: str = "student_t") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model that has forecasts to make although nobody trained it: the same on every rank."""
    torch.manual_seed(0)
    criterion = build_loss(FactoryConfig(factory=loss), market.spec)
    outputs = int(criterion.outputs)  # type: ignore[arg-type]
    model = build_model(FactoryConfig(factory="tcn"), market.spec, outputs)
    torch.nn.init.normal_(model.get_submodule("model.head").weight, std=0.2)
    return model, criterion


def judge_of(criterion: torch.nn.Module, market: Market) -> WindowJudge:
    """The judge of a job whose loss is this one."""
    return WindowJudge(criterion, market, lambda _: criterion)  # type: ignore[arg-type]


def be_rank(folder: Path, samples: int, environment: Mapping[str, str]) -> None:
    """The life of a rank; what torchrun would say is in ``environment``."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    world = join_world(DistributedTrainingConfig())
    market = Market()
    market.rows["valid"] = market.rows["valid"][:samples]
    model, criterion = forecaster(market)
    judge = judge_of(criterion, market)
    request = JudgeRequest(model=model, world=world, device=CPU, batch_size=100)
    evaluation = judge.validate(request)
    _, predictions = forecast_windows(criterion, market, "valid", request)  # type: ignore[arg-type]
    baselines.CHUNK = 97  # so that the small market has some for each rank
    report = judge.report(replace(request, batch_size=64), RunDir(str(folder / "run")), lambda _: None)
    result = {"evaluation": asdict(evaluation), "rows": predictions.row.tolist(), "report": report}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(result))
    world.close()
