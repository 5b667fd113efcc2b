from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import io
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from market import Market

import trainer
from trainer.config import ConfigError, FactoryConfig
from trainer.model.build import build_loss, build_model
from trainer.model.saved_model import QUANTILES, SavedModel, SavedModelError, load_saved_model

SAVED = dict[str, bytes]


def saved_files(market: Market, loss: str = "student_t", model: str = "tcn") -> SAVED:
    """What a job leaves behind, for a model with something to say."""
    torch.manual_seed(1)
    criterion = build_loss(FactoryConfig(factory=loss), market.spec)
    net = build_model(FactoryConfig(factory=model), market.spec, criterion.outputs)
    torch.nn.init.normal_(net.get_submodule("model.head").weight, std=0.2)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    return described(market, buffer.getvalue(), loss, model)


def described(market: Market, weights: bytes, loss: str = "student_t", model: str = "tcn") -> SAVED:
    description = {
        "model": asdict(FactoryConfig(factory=model)),
        "loss": asdict(FactoryConfig(factory=loss)),
        "spec": asdict(market.spec),
        "file_sha256": hashlib.sha256(weights).hexdigest(),
    }
    return {"model.json": json.dumps(description).encode(), "weights.pt": weights}


def load(files: SAVED) -> SavedModel:
    return load_saved_model(reader(files))


def reader(files: SAVED) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        if name not in files:
            raise FileNotFoundError(2, "No such file", name)
        return files[name]

    return read


def windows_of(market: Market, count: int) -> np.ndarray:
    return market.gather(market.end_rows("test", np.arange(count)))[0].numpy()


def test_quantiles_are_those_of_the_student_t_distribution(market: Market) -> None:
    served = load(saved_files(market)).predict(windows_of(market, 50))
    assert list(served) == ["mu", "sigma", "nu", *QUANTILES]
    for name, level in QUANTILES.items():
        expected = scipy.stats.t.ppf(level, served["nu"], served["mu"], served["sigma"])
        np.testing.assert_allclose(served[name], expected, rtol=1e-6, atol=1e-9)
    assert np.ptp(served["sigma"]) > 0


def test_a_normal_distribution_has_no_degrees_of_freedom(market: Market) -> None:
    served = load(saved_files(market, "gaussian")).predict(windows_of(market, 20))
    assert "nu" not in served
    np.testing.assert_allclose(served["q95"], scipy.stats.norm.ppf(0.95, served["mu"], served["sigma"]), rtol=1e-6)


def test_a_point_forecast_is_in_the_unit_of_the_target(market: Market) -> None:
    saved = load(saved_files(market, "mse"))
    windows = windows_of(market, 20)
    with torch.no_grad():
        raw = saved.model(torch.from_numpy(windows))[:, 0].numpy()
    assert saved.columns == ("prediction",)
    np.testing.assert_allclose(saved.predict(windows)["prediction"], raw * market.spec.target_std, rtol=1e-6)


def test_a_large_request_equals_many_small_ones(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, windows = load(saved_files(market)), windows_of(market, 100)
    whole = saved.predict(windows)
    monkeypatch.setattr("trainer.model.saved_model.BATCH", 7)
    parts = saved.predict(windows)
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-5, atol=1e-8)


def test_no_window_gives_no_forecast(market: Market) -> None:
    shape = (0, market.spec.window, len(market.spec.features))
    assert load(saved_files(market)).predict(np.empty(shape))["mu"].shape == (0,)


@pytest.mark.parametrize("shape", [(12, 8), (3, 11, 8), (3, 12, 7), (3, 12, 8, 1)])
def test_a_wrong_shape_is_named_beside_the_right_one(market: Market, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(n, 12, 8\)") as caught:
        load(saved_files(market)).predict(np.zeros(shape, dtype=np.float32))
    assert str(shape) in str(caught.value)


def test_a_missing_day_is_refused(market: Market) -> None:
    windows = windows_of(market, 5)
    windows[3, 2, 1] = np.nan
    with pytest.raises(ValueError, match="window 3 holds a value that is not finite"):
        load(saved_files(market)).predict(windows)


def test_changed_weights_are_refused(market: Market) -> None:
    files = saved_files(market)
    files["weights.pt"] = files["weights.pt"][:-1] + bytes([files["weights.pt"][-1] ^ 1])
    with pytest.raises(SavedModelError, match="damaged or was changed"):
        load(files)


class Intruder:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_a_pickle_is_not_run(market: Market, tmp_path: Path) -> None:
    evidence = tmp_path / "it ran"
    buffer = io.BytesIO()
    torch.save({"model": Intruder(evidence)}, buffer)
    for weights in (buffer.getvalue(), pickle.dumps(Intruder(evidence), protocol=2)):
        with pytest.raises(SavedModelError, match="something other than tensors"):
            load(described(market, weights))
    assert not evidence.exists()


def test_weights_of_a_shape_that_is_only_claimed_are_not_copied(market: Market) -> None:
    """The file has a few thousand bytes; it claims terabytes."""
    weights = torch.load(io.BytesIO(saved_files(market)["weights.pt"]), weights_only=True)
    buffer = io.BytesIO()
    torch.save({name: torch.zeros(1).expand(10**12) for name in weights}, buffer)
    with pytest.raises(SavedModelError, match=r"has the shape \(1000000000000,\), expected"):
        load(described(market, buffer.getvalue()))


def test_an_incomplete_or_foreign_model_is_named(market: Market) -> None:
    files = saved_files(market)
    with pytest.raises(SavedModelError, match=r"weights\.pt is missing"):
        load({"model.json": files["model.json"]})
    with pytest.raises(SavedModelError, match=r"do not fit model\.factory = 'lstm'"):
        load(described(market, files["weights.pt"], model="lstm"))
    with pytest.raises(ConfigError, match="DTRAIN_FACTORY_MODULES=nowhere"):
        load(described(market, files["weights.pt"], model="nowhere:make"))


def test_the_server_needs_what_the_requirements_say() -> None:
    from dtrain_dagster.support.user_sources import SERVING_REQUIREMENTS

    folder = Path(trainer.__file__).parents[1]
    foreign, seen, queue = set[str](), set[str](), ["trainer.model.mlflow_model"]
    while queue:
        name = queue.pop()
        stem = folder.joinpath(*name.split("."))
        source = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if name in seen or not source.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for imported in names:
                parts = imported.split(".")
                if parts[0] == "trainer":  # with the packages above it, whose code runs first
                    queue += [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
                elif parts[0] not in sys.stdlib_module_names:
                    foreign.add(parts[0])
    assert {"trainer.model", "trainer.model.saved_model", "trainer.model.stock"} <= seen
    assert foreign - {"pydantic_core"} == set(SERVING_REQUIREMENTS)  # pydantic pins its own core
    assert all(importlib.metadata.version(name) for name in SERVING_REQUIREMENTS)
