from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parity import assert_close, assert_parity
from weightformer import ops
from weightformer.ops.depthwise_norm import eager, reference

# B, H, W, C and K: no image, one token, odd grids, a wider kernel, more than 1024 tokens.
SIZES = [(0, 3, 2, 4, 3), (1, 1, 1, 4, 3), (5, 3, 5, 6, 3), (2, 7, 4, 10, 5), (1, 33, 35, 4, 3)]


def make_inputs(size: tuple[int, ...], per_image: bool) -> dict[str, Tensor]:
    b, h, w, c, k = size
    torch.manual_seed(0)
    shapes = {
        "x": (b, h, w, c),
        "kernel": (b, c, k, k) if per_image else (c, k, k),
        "bias": (c,),
        "weight": (c,),
        "shift": (c,),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def both(form: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    return lambda *args: torch.cat(form(*args, 1e-6), -1)


@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eager_equals_the_reference(size: tuple[int, ...], per_image: bool, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and size[1] * size[2] > 1000:
        pytest.skip("torch's LayerNorm sums its weight's gradient in bfloat16 on a CPU")
    assert_parity(both(eager.depthwise_norm), both(reference.depthwise_norm), make_inputs(size, per_image), dtype)


def test_reference_by_loop() -> None:
    x, kernel, bias, weight, shift = make_inputs((2, 4, 3, 5, 3), True).values()
    z, normed = ops.depthwise_norm(x, kernel, bias, weight, shift, 1e-6)
    for b in range(2):
        for h in range(4):
            for w in range(3):
                token = x[b, h, w] + bias
                for i in range(3):
                    for j in range(3):
                        if 0 <= h + i - 1 < 4 and 0 <= w + j - 1 < 3:
                            token = token + x[b, h + i - 1, w + j - 1] * kernel[b, :, i, j]
                assert_close(z[b, h, w], token, 1e-12)
                unit = (token - token.mean()) / (token.var(correction=0) + 1e-6).sqrt()
                assert_close(normed[b, h, w], unit * weight + shift, 1e-12)


def test_small_taps_survive_half_precision() -> None:
    """1 + 0.003 is 1 in bfloat16: were the residual a tap, no token would move."""
    x, kernel, bias, weight, shift = (t.bfloat16() for t in make_inputs((1, 16, 16, 8, 3), False).values())
    kernel = torch.zeros_like(kernel)
    kernel[:, 1, 1] = 0.003
    z, _ = eager.depthwise_norm(x, kernel, 0 * bias, weight, shift, 1e-6)
    moved = ((z.float() - x.float()) * x.float()).sum() / x.float().square().sum()
    assert 0.002 < moved < 0.004


@pytest.mark.parametrize("shape", [(2, 6, 3, 3), (5, 3, 3), (6, 2, 2)], ids=str)
def test_kernel_that_does_not_fit(shape: tuple[int, ...]) -> None:
    inputs = make_inputs((5, 3, 5, 6, 3), False)
    with pytest.raises(ValueError, match=r"does not fit tokens"):
        ops.depthwise_norm(**inputs | {"kernel": torch.zeros(shape)}, eps=1e-6)


@pytest.mark.parametrize("fault", ["residual", "transposed", "eps"])
def test_planted_faults_are_seen(fault: str) -> None:
    def wrong(x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        kernel = kernel.mT if fault == "transposed" else kernel
        z, y = reference.depthwise_norm(x, kernel, bias, weight, shift, 1e-3 if fault == "eps" else 1e-6)
        return torch.cat([z - x if fault == "residual" else z, y], -1)

    with pytest.raises(AssertionError):
        assert_parity(wrong, both(reference.depthwise_norm), make_inputs((5, 3, 5, 6, 3), True), torch.float32)
