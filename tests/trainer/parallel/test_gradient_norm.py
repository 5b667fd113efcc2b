"""The norm by which gradients are clipped, against one in float64."""

from __future__ import annotations

import pytest
import torch

from trainer.parallel.buckets import PIECE, gradient_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", [(3,), (PIECE, 5), (2 * PIECE + 1, 7), (6_500_000,)])
def test_it_is_right_to_rounding_however_large_the_gradient_is(sizes: tuple[int, ...]) -> None:
    chance = torch.Generator().manual_seed(0)
    gradients = [1e-3 * torch.randn(size, generator=chance) for size in sizes]
    expected = torch.cat(gradients).double().norm()
    assert gradient_norm(gradients, CPU).item() == pytest.approx(expected.item(), rel=1e-6)


def test_tensors_of_any_shape_and_none_at_all() -> None:
    across = torch.ones(PIECE, 2).t()  # not contiguous
    assert gradient_norm([across], CPU).item() == pytest.approx((2 * PIECE) ** 0.5)
    assert gradient_norm([], CPU).item() == 0.0
    assert gradient_norm([torch.tensor([1.0, torch.inf])], CPU).isinf()
