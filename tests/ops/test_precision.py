from __future__ import annotations

import pytest
import torch

from weightformer.ops.precision import autocast, full_precision, normalize_update, wide


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wide_keeps_the_wider(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert wide(torch.ones(2, dtype=dtype)).dtype == expected


def test_full_precision_inside_autocast() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with full_precision(x.device):
            assert (x @ x).dtype == torch.float32


def test_full_precision_where_autocast_does_not_exist() -> None:
    with full_precision(torch.device("meta")):
        assert torch.empty(2, device="meta").is_meta


def test_autocast_follows_torch() -> None:
    x = torch.ones(2)
    assert autocast(x) is x
    with torch.autocast("cpu", dtype=torch.float16):
        assert autocast(x).dtype == torch.float16
        assert autocast(x.double()).dtype == torch.float64  # autocast leaves float64 alone


def test_normalize_update_stays_below_one_and_is_differentiable_at_zero() -> None:
    update = torch.randn(2, 3, 5, dtype=torch.float64) * torch.tensor([1e-8, 1e8], dtype=torch.float64)[:, None, None]
    norms = torch.linalg.vector_norm(normalize_update(update, dim=1), dim=1)
    torch.testing.assert_close(norms[0], torch.linalg.vector_norm(update[0], dim=0), rtol=1e-6, atol=0)
    assert (norms[1] < 1).all()
    assert (norms[1] > 1 - 1e-6).all()

    zero = torch.zeros(1, 3, 2, requires_grad=True)
    normalize_update(zero, dim=1).sum().backward()
    assert torch.equal(zero.grad, torch.ones_like(zero))  # u / (|u| + 1) has slope 1 at 0
