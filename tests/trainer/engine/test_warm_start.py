"""A training begins with another one's parameters, or says why it cannot."""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kinds import build_table
from trainer.config import ConfigError, DistributedTrainingConfig, JobConfig, parse_job
from trainer.engine.run_job import train_job
from trainer.engine.steps import carry_out
from trainer.engine.warm_start import begin_from
from trainer.exit_codes import DONE, UNUSABLE
from trainer.rundir import RunDir, resolve_start


class Scaled(nn.Module):
    """A layer behind a scale that belongs to the data."""

    def __init__(self, width: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.layer = nn.Linear(width, 2)


DOCUMENT = {"job_id": "a", "run_dir": "b", "dataset": {"uri": "c"}}


def job_of(folder: Path, training: DistributedTrainingConfig) -> JobConfig:
    return replace(parse_job(json.dumps(DOCUMENT)), run_dir=str(folder), training=training)


def save(folder: Path, content: Any) -> DistributedTrainingConfig:
    """Write a finished training's weights; the configuration of one that begins with them."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    (folder / "model" / "weights.pt").write_bytes(buffer.getvalue())
    return DistributedTrainingConfig(start_from=str(folder), start_sha256=hashlib.sha256(buffer.getvalue()).hexdigest())


def test_parameters_are_taken_over_and_buffers_are_not(tmp_path: Path) -> None:
    before, after = Scaled(scale=5.0), Scaled(scale=1.0)
    begin_from(after, job_of(tmp_path / "other", save(tmp_path, before.state_dict())))
    assert torch.equal(after.layer.weight, before.layer.weight)
    assert torch.equal(after.layer.bias, before.layer.bias)
    assert after.scale == 1.0
    assert after.layer.weight.requires_grad


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Scaled(width=4).state_dict(), "layer.weight has the shape (2, 4) there and (2, 3) here"),
        ({"layer.weight": torch.zeros(2, 3)}, "layer.bias has the shape none there"),
        ([1, 2], "does not hold named tensors"),
        (Scaled, "holds something other than tensors, and was not loaded"),
    ],
)
def test_weights_of_something_else_are_refused_before_any_is_copied(tmp_path: Path, content: Any, said: str) -> None:
    module = Scaled()
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ConfigError, match=re.escape(said)):
        begin_from(module, job_of(tmp_path / "other", save(tmp_path, content)))
    assert all(torch.equal(tensor, own[name]) for name, tensor in module.state_dict().items())


def test_weights_that_were_changed_or_are_gone_are_refused(tmp_path: Path) -> None:
    meant = save(tmp_path, Scaled().state_dict())
    save(tmp_path, Scaled().state_dict())
    with pytest.raises(ConfigError, match="the file was changed, or the setting means another"):
        begin_from(Scaled(), job_of(tmp_path / "other", meant))
    (tmp_path / "model" / "weights.pt").unlink()
    with pytest.raises(ConfigError, match=r"there is no model/weights.pt; name the run directory of a training"):
        begin_from(Scaled(), job_of(tmp_path / "other", meant))


def test_a_job_is_named_by_itself_and_its_weights_are_found(tmp_path: Path) -> None:
    """Beside the job that begins, or by its folder; what is found is written down."""
    meant = save(tmp_path / "first", Scaled().state_dict())
    RunDir(str(tmp_path / "first")).write_json("model/model.json", {"file_sha256": meant.start_sha256})
    for named in ("first", str(tmp_path / "first")):
        job = resolve_start(job_of(tmp_path / "second", DistributedTrainingConfig(start_from=named)))
        assert (job.training.start_from, job.training.start_sha256) == (meant.start_from, meant.start_sha256)
        assert resolve_start(job) is job
    with pytest.raises(ConfigError, match=r"start_from = 'other': there is no model/model\.json; name a training that"):
        resolve_start(job_of(tmp_path / "second", DistributedTrainingConfig(start_from="other")))
    with pytest.raises(
        ConfigError, match=r"training\.start_sha256 belongs to the weights that training\.start_from names"
    ):
        parse_job(json.dumps({**DOCUMENT, "training": {"start_sha256": "0" * 64}}))


def train(folder: Path, uri: str, **training: Any) -> tuple[int, dict[str, Any]]:
    settings = {"world_size": 1, "batch_size_per_gpu": 32, "gradient_accumulation_steps": 1, "threads_per_rank": 1}
    document = {
        "job_id": "warm", "run_dir": str(folder), "dataset": {"uri": uri}, "tracking": {"tensorboard": False},
        "model": {"factory": "mlp"}, "loss": {"factory": "cross_entropy"}, "training": settings | training,
    }  # fmt: skip
    return carry_out(train_job(parse_job(json.dumps(document))))


def test_a_job_begins_where_another_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    uri = build_table(tmp_path).uri
    code, first = train(tmp_path / "first", uri, epochs=4, learning_rate=5e-3)
    assert code == DONE
    model = RunDir(str(tmp_path / "first")).read_json("model/model.json")
    assert model is not None
    start = {"start_from": str(tmp_path / "first"), "start_sha256": model["file_sha256"]}
    still = {"max_steps": 1, "learning_rate": 1e-9}  # so that what is judged is what it began with
    code, warm = train(tmp_path / "warm", uri, **still, **start)
    assert code == DONE
    _, fresh = train(tmp_path / "fresh", uri, **still)
    assert warm["test"]["loss"] == pytest.approx(first["test"]["loss"], rel=1e-4)
    assert fresh["test"]["loss"] > 1.1 * warm["test"]["loss"]
    code, refused = train(tmp_path / "refused", uri, **{**start, "start_sha256": "0" * 64})
    assert code == UNUSABLE
    assert "the file was changed, or the setting means another" in refused["error"]
