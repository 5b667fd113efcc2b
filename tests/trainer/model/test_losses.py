from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from specs import window_spec

from trainer.config import ConfigError, FactoryConfig
from trainer.model.build import build_loss
from trainer.model.losses import (
    GaussianLoss,
    MeanSquaredError,
    Predictive,
    ReturnAndVolatility,
    StudentTLoss,
    student_t_cdf,
    student_t_nll,
    student_t_quantile,
)

SPEC = window_spec("ab", 4, target_mean=0.001)
NU = (2.01, 2.5, 4.0, 6.0, 20.0, 60.0, 500.0)


@pytest.mark.parametrize("nu", NU)
def test_cdf_is_scipys(nu: float) -> None:
    z = torch.linspace(-40, 40, 201).double()
    np.testing.assert_allclose(
        student_t_cdf(z, torch.tensor(nu)).numpy(), scipy.stats.t.cdf(z.numpy(), nu), atol=1e-6 * 1e-4
    )


@pytest.mark.parametrize("q", [0.0005, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999])
def test_quantile_is_scipys_exactly_and_interpolated(q: float) -> None:
    nu = torch.tensor(NU, dtype=torch.float64)
    np.testing.assert_allclose(student_t_quantile(q, nu).numpy(), scipy.stats.t.ppf(q, nu.numpy()), atol=1e-8)
    many = torch.linspace(2.1, 60, 500, dtype=torch.float64)
    np.testing.assert_allclose(student_t_quantile(q, many).numpy(), scipy.stats.t.ppf(q, many.numpy()), atol=1e-8)


def test_infinite_nu_is_the_normal_distribution() -> None:
    nu = torch.tensor([math.inf, math.inf])
    predictive = Predictive(mu=torch.tensor([0.0, 1.0]), sigma=torch.tensor([1.0, 2.0]), nu=nu)
    np.testing.assert_allclose(predictive.quantile(0.95).numpy(), scipy.stats.norm.ppf(0.95, [0, 1], [1, 2]), atol=1e-9)
    np.testing.assert_allclose(
        predictive.cdf(torch.tensor([0.3, 0.3])), scipy.stats.norm.cdf(0.3, [0, 1], [1, 2]), atol=1e-7
    )
    expected = -scipy.stats.norm.logpdf(0.3, [0, 1], [1, 2])
    np.testing.assert_allclose(predictive.nll(torch.tensor([0.3, 0.3])), expected, rtol=1e-6)


def test_nll_is_scipys_and_its_gradient_is_right() -> None:
    mu, sigma, nu, y = (
        torch.tensor(v, dtype=torch.float64) for v in ([0.1, -2.0], [0.5, 3.0], [2.5, 40.0], [1.0, 9.0])
    )
    expected = -scipy.stats.t.logpdf(y.numpy(), nu.numpy(), mu.numpy(), sigma.numpy())
    np.testing.assert_allclose(student_t_nll(mu, sigma, nu, y).numpy(), expected, rtol=1e-12)
    parameters = tuple(v.requires_grad_() for v in (mu, sigma, nu))
    assert torch.autograd.gradcheck(lambda m, s, n: student_t_nll(m, s, n, y), parameters)


def exact_loss_and_gradient(
    loss: StudentTLoss, outputs: torch.Tensor, target: torch.Tensor, share: torch.Tensor, log_shift: float = 0.0,
    sigmoid_shift: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss of each sample and the gradient by the outputs, from the density, by autograd in float64.

    ``log_shift`` is added to the log of the scale, ``sigmoid_shift`` to the factor 1 - s of a sigmoid's derivative.
    """
    exact = outputs.double().requires_grad_()
    mean, scale, shape = exact.unbind(-1)
    sigma = torch.exp(loss.log_scale + scale.clamp(-8, 8) + log_shift)
    degrees = loss.nu_min + (loss.nu_max - loss.nu_min) * torch.sigmoid(shape + loss.nu_bias)
    expected = student_t_nll(mean * loss.mean_unit, sigma, degrees, target.double())
    (expected * share).sum().backward()
    assert exact.grad is not None
    rest = torch.sigmoid(-(shape + loss.nu_bias)).detach()
    exact.grad[:, 2] *= (rest + sigmoid_shift) / rest
    return expected.detach(), exact.grad


@example(seed=32411002, wide=12.0, nu=(2.01, 500.0, 4.0))  # the difference of two lgammas of 1,100 each
@example(seed=1546, wide=12.0, nu=(2.01, 500.0, 4.0))  # a narrow density: 1e-6 of its log scale is 5e-3 of the loss
@given(
    seed=st.integers(0, 2**32),
    wide=st.sampled_from([0.1, 1.0, 5.0, 12.0]),
    nu=st.sampled_from([(2.5, 60.0, 6.0), (2.01, 500.0, 4.0)]),
)
def test_the_loss_and_its_gradient_are_those_of_the_density(
    seed: int, wide: float, nu: tuple[float, float, float]
) -> None:
    """Log scales beyond ±8 are cut, and learn nothing there.

    No formula in float32 can be nearer than what its inputs' last digits decide, and where the density is narrow that
    is much. So what is allowed is the change of the exact result when each input moves by a few of its last digits.
    """
    loss, random = StudentTLoss(SPEC, *nu), torch.Generator().manual_seed(seed)
    outputs = wide * torch.randn(16, 3, generator=random)
    outputs[:2, 1] = torch.tensor([8.001, -8.001])  # at 8 itself versions of torch differ in clamp's gradient
    target, share = 0.04 * torch.randn(16, generator=random), torch.rand(16, generator=random)
    expected, gradient = exact_loss_and_gradient(loss, outputs, target, share)
    digits = 8 * torch.finfo(torch.float32).eps
    moved = outputs.double()
    moved[:, 0] *= 1 + digits
    others = [
        exact_loss_and_gradient(loss, moved, target, share),
        exact_loss_and_gradient(loss, outputs, target.double() * (1 + digits), share),
        exact_loss_and_gradient(loss, outputs, target, share, log_shift=digits * (8 + abs(loss.log_scale))),
        exact_loss_and_gradient(loss, outputs, target, share, sigmoid_shift=digits),
    ]
    loss_slack = sum((other - expected).abs() for other, _ in others)
    gradient_slack = sum((other - gradient).abs() for _, other in others)
    found = loss(outputs.requires_grad_(), target)
    (found * share).sum().backward()
    assert outputs.grad is not None
    assert ((found.double() - expected).abs() <= 1e-5 + 1e-5 * expected.abs() + loss_slack).all()
    assert ((outputs.grad.double() - gradient).abs() <= 1e-4 + 1e-3 * gradient.abs() + gradient_slack).all()
    with torch.no_grad():
        torch.testing.assert_close(loss(outputs, target), found)
        predicted = loss.predictive(outputs).nll(target)  # plain float32: its lgammas are not as good
        assert ((predicted - expected).abs() <= 5e-4 + 1e-4 * expected.abs() + loss_slack).all()


def test_a_loss_with_a_distribution_of_its_own_learns_that_one() -> None:
    class Wider(StudentTLoss):
        def predictive(self, outputs: torch.Tensor) -> Predictive:
            narrow = super().predictive(outputs)
            return Predictive(narrow.mu, 2 * narrow.sigma, narrow.nu)

    outputs, target = torch.zeros(2, 3), torch.tensor([0.0, 0.1])
    torch.testing.assert_close(Wider(SPEC)(outputs, target), Wider(SPEC).predictive(outputs).nll(target))


def test_quantile_level_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"q = 1\.0"):
        student_t_quantile(1.0, torch.tensor([5.0]))


@pytest.mark.parametrize("loss", [StudentTLoss(SPEC), GaussianLoss(SPEC)])
def test_zero_outputs_are_the_unconditional_distribution(loss: StudentTLoss | GaussianLoss) -> None:
    predictive = loss.predictive(torch.zeros(3, loss.outputs))
    spread = torch.where(torch.isinf(predictive.nu), 1.0, predictive.nu / (predictive.nu - 2)).sqrt() * predictive.sigma
    torch.testing.assert_close(spread, torch.full((3,), SPEC.target_std))
    torch.testing.assert_close(predictive.mu, torch.zeros(3))


def test_wild_outputs_stay_finite_and_nu_within_its_bounds() -> None:
    loss = StudentTLoss(SPEC)
    outputs = torch.tensor([[s * 1e4] * 3 for s in (-1.0, 1.0)], requires_grad=True)
    values = loss(outputs, torch.tensor([0.1, -0.1]))
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert outputs.grad is not None
    assert torch.isfinite(outputs.grad).all()
    nu = loss.predictive(outputs).nu
    assert nu.min() >= 2.5
    assert nu.max() <= 60


def test_loss_is_float32_under_autocast() -> None:
    outputs = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert StudentTLoss(SPEC)(outputs, torch.zeros(2)).dtype == torch.float32


def test_each_forecast_is_judged_by_likelihood_and_volatility_and_their_mean_is_predicted() -> None:
    torch.manual_seed(0)
    loss, one = ReturnAndVolatility(SPEC, weight=2.0), StudentTLoss(SPEC)
    outputs = torch.randn(6, 8)
    returns, volatility = 0.04 * torch.randn(6), torch.randn(6) - 4
    expected = torch.zeros(6)
    for member in outputs.split(4, dim=1):
        scale = one.predictive(member[:, :3]).sigma
        miss = (scale.log() + loss.log_ratio + member[:, 3] - volatility) / 0.5
        expected += (one(member[:, :3], returns) + miss**2) / 2
    torch.testing.assert_close(loss(outputs, torch.stack((returns, volatility), -1)), expected)
    alone = sum(one(member[:, :3], returns) for member in outputs.split(4, dim=1)) / 2
    torch.testing.assert_close(loss(outputs, returns), alone)
    mean = one.predictive((outputs[:, :3] + outputs[:, 4:7]) / 2)
    for name in ("mu", "sigma", "nu"):
        torch.testing.assert_close(getattr(loss.predictive(outputs), name), getattr(mean, name))


def test_the_volatility_pulls_the_scale_and_a_ratio_that_is_learned_gives_way() -> None:
    loss = ReturnAndVolatility(SPEC, members=1)
    outputs = torch.zeros(1, 4, requires_grad=True)
    target = torch.tensor([[0.0, loss.log_scale + loss.log_ratio + 1.0]])  # more volatile than expected
    loss(outputs, target).sum().backward()
    assert outputs.grad is not None
    alone = torch.zeros(1, 4, requires_grad=True)
    loss(alone, target[:, 0]).sum().backward()
    assert alone.grad is not None
    torch.testing.assert_close(outputs.grad - alone.grad, torch.tensor([[0.0, -4.0, 0.0, -4.0]]))


def test_calibration_finds_the_scale_and_the_tails_of_what_came() -> None:
    """Outcomes of three times the scale and with 20 degrees of freedom, where 6 and one were forecast."""
    loss, count = ReturnAndVolatility(SPEC), 40_000
    outputs = torch.randn(count, 8) * 0.2
    outputs[:, 2::4] = 0.0
    forecast = loss.predictive(outputs)
    drawn = np.random.default_rng(0).standard_t(20.0, count)
    target = forecast.mu + 3 * forecast.sigma * torch.from_numpy(drawn).float()
    arguments = loss.calibrate(forecast, target)
    assert arguments["scale_factor"] == pytest.approx(3.0, rel=0.03)
    corrected = build_loss(FactoryConfig(factory="return_and_volatility", args=arguments), SPEC)
    found = corrected.predictive(outputs)
    assert 15 < float(found.nu[0]) < 27
    torch.testing.assert_close(found.mu, forecast.mu)
    assert found.nll(target).mean() < forecast.nll(target).mean() - 0.3
    again = corrected.calibrate(found, target)
    assert [again[name] for name in arguments] == pytest.approx(list(arguments.values()), abs=0.1)
    both = torch.stack((target, torch.zeros(count)), -1)
    torch.testing.assert_close(corrected(outputs, both), loss(outputs, both))  # what is learned stays as it was


def test_few_outcomes_move_a_forecast_little_and_hopeless_ones_not_at_all() -> None:
    loss = ReturnAndVolatility(SPEC)
    forecast = loss.predictive(torch.zeros(3, 8))
    few = loss.calibrate(forecast, 20 * forecast.sigma)
    assert 1 < few["scale_factor"] < 2
    assert loss.calibrate(forecast, torch.full((3,), math.nan)) == {"scale_factor": 1.0, "shape_shift": 0.0}
    assert ReturnAndVolatility(SPEC, calibrated=False).calibrate(forecast, forecast.sigma) == {}
    with pytest.raises(ConfigError, match="scale_factor = 0"):
        build_loss(FactoryConfig(factory="return_and_volatility", args={"scale_factor": 0.0}), SPEC)


def test_squared_error_is_in_units_of_the_targets_variance() -> None:
    loss = MeanSquaredError(SPEC)
    torch.testing.assert_close(loss(torch.zeros(1, 1), torch.tensor([0.04])), torch.tensor([1.0]))
    torch.testing.assert_close(loss.point(torch.tensor([[0.5]])), torch.tensor([0.02]))


def test_impossible_bounds_of_nu_are_refused_with_the_factorys_name() -> None:
    with pytest.raises(ConfigError, match=r"loss\.factory = 'student_t' raised ValueError: nu_min = 1\.0"):
        build_loss(FactoryConfig(factory="student_t", args={"nu_min": 1.0}), SPEC)


OWN = """
import torch
class Loss(torch.nn.Module):
    outputs = 1
    def forward(self, outputs, target):
        return (outputs[:, 0] - target) ** 2
class Reduced(Loss):
    def forward(self, outputs, target):
        return ((outputs[:, 0] - target) ** 2).mean()
class Uncounted(Loss):
    outputs = "three"
class Unnamed(Loss):
    def calibrate(self, predictive, target):
        return {"scale": 2.0}
class Wrong(Loss):
    def predictive(self, outputs):
        return outputs
class Broken(Loss):
    def forward(self, outputs, target):
        return outputs @ target[:7]
def make(spec, power=2): return Loss()
def reduced(spec): return Reduced()
def uncounted(spec): return Uncounted()
def wrong(spec): return Wrong()
def unnamed(spec): return Unnamed()
def broken(spec): return Broken()
def nothing(spec): return None
def failing(spec): raise RuntimeError("no such table")
number = 3
"""


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("huber", {}, r"neither a stock loss \(gaussian, mse, return_and_volatility, student_t\) nor written as"),
        ("no_such_package.loss:make", {}, r"no module 'no_such_package' on the nodes' Python path"),
        ("own_loss:absent", {}, r"module 'own_loss' has no attribute 'absent'"),
        ("own_loss:number", {}, r"is a int, not something to call"),
        ("own_loss:make", {"strength": 1}, r"unexpected keyword argument 'strength'; it accepts: power=2"),
        ("own_loss:failing", {}, r"raised RuntimeError: no such table"),
        ("own_loss:nothing", {}, r"returned a NoneType"),
        ("own_loss:uncounted", {}, r"attribute outputs is 'three'"),
        ("own_loss:reduced", {}, r"gave \(\) for two samples.*shape \(2,\), unreduced"),
        ("own_loss:wrong", {}, r"predictive\(\) returned a Tensor"),
        ("own_loss:unnamed", {}, r"has calibrate\(\), and its attribute corrections is None"),
        ("own_loss:broken", {}, r"failed on outputs of shape \(2, 1\)"),
        ("broken_module:make", {}, r"importing 'broken_module' failed: ZeroDivisionError"),
        ("needs_absent:make", {}, r"importing 'needs_absent' failed: No module named 'absent_dependency'"),
    ],
)
def test_an_unusable_loss_is_refused_by_name(
    factory: str, args: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss.py").write_text(OWN)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    (tmp_path / "needs_absent.py").write_text("import absent_dependency")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "own_loss, broken_module, needs_absent, no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        build_loss(FactoryConfig(factory=factory, args=args), SPEC)
    assert factory in str(caught.value)


def test_a_loss_of_ones_own_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "own_loss")
    (tmp_path / "own_loss.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    loss = build_loss(FactoryConfig(factory="own_loss:make", args={"power": 3}), SPEC)
    assert loss(torch.ones(4, 1), torch.zeros(4)).shape == (4,)
