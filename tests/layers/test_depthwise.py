from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer import ops
from weightformer.layers import DepthwiseConv2d, DynamicDepthwiseConv2d


def make_layer(dtype: torch.dtype = torch.float64, kernel_size: int = 3) -> DynamicDepthwiseConv2d:
    layer = DynamicDepthwiseConv2d(4, kernel_size, dtype=dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5))


def by_loop(layer: DynamicDepthwiseConv2d, x: Tensor) -> np.ndarray:
    """SPEC section 4 for each image on its own, in numpy, one token and tap at a time."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    k, r = layer.kernel_size, layer.kernel_size // 2
    out = []
    for image in x.detach().numpy():
        height, width, channels = image.shape
        kernel = np.zeros((channels, k, k))
        for i in range(k):
            for j in range(k):
                rows = slice(i * height // k, math.ceil((i + 1) * height / k))
                cols = slice(j * width // k, math.ceil((j + 1) * width / k))
                mean = image[rows, cols].mean((0, 1))
                hidden = gelu(p["proj1.weight"][:, :, 0, 0] @ mean + p["proj1.bias"])
                kernel[:, i, j] = p["proj2.weight"][:, :, 0, 0] @ hidden
        kernel = kernel / (np.sqrt((kernel**2).sum((1, 2), keepdims=True)) + 1) + p["weight"][:, 0]
        y = np.zeros_like(image)
        for h in range(height):
            for w in range(width):
                y[h, w] = p["bias"]
                for i in range(k):
                    for j in range(k):
                        if 0 <= h + i - r < height and 0 <= w + j - r < width:
                            y[h, w] += image[h + i - r, w + j - r] * kernel[:, i, j]
        out.append(y)
    return np.stack(out)


@pytest.mark.parametrize("grid", [(6, 4), (4, 6), (5, 3), (2, 7), (1, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_equals_a_loop_over_images(name: str, grid: tuple[int, int]) -> None:
    layer, x = make_layer(), torch.randn(3, *grid, 4, dtype=torch.float64)
    with ops.implementation(name):
        np.testing.assert_allclose(layer(x).detach(), by_loop(layer, x), rtol=1e-10, atol=1e-10)


def test_other_kernel_sizes() -> None:
    layer, x = make_layer(kernel_size=5), torch.randn(2, 6, 7, 4, dtype=torch.float64)
    np.testing.assert_allclose(layer(x).detach(), by_loop(layer, x), rtol=1e-10, atol=1e-10)


def test_permuting_images_permutes_the_output_and_its_kernels() -> None:
    layer, x = make_layer(), torch.randn(3, 5, 4, 4, dtype=torch.float64)
    order = [2, 0, 1]
    torch.testing.assert_close(layer(x[order]), layer(x)[order])
    torch.testing.assert_close(layer.predict(x[order]), layer.predict(x)[order])
    assert not torch.allclose(layer.predict(x)[0], layer.predict(x)[1])


def test_transposing_grid_and_static_kernel_transposes_the_output() -> None:
    layer, x = make_layer(), torch.randn(2, 7, 4, 4, dtype=torch.float64)
    y, kernel = layer(x), layer.predict(x)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.mT.clone())
    torch.testing.assert_close(layer(x.transpose(1, 2)), y.transpose(1, 2))
    torch.testing.assert_close(layer.predict(x.transpose(1, 2)), kernel.mT)


def test_predict_returns_the_kernel_that_forward_applies() -> None:
    layer, x = make_layer(), torch.randn(1, 5, 4, 4, dtype=torch.float64)
    y = F.conv2d(x.permute(0, 3, 1, 2), layer.predict(x)[0, :, None], layer.bias, padding=1, groups=4)
    torch.testing.assert_close(layer(x), y.permute(0, 2, 3, 1))


def test_gradcheck() -> None:
    layer, x = make_layer(), torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_kernels_are_normalised_in_float32_under_autocast() -> None:
    layer, x = make_layer(torch.float32), torch.randn(2, 6, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.predict(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


def test_initialisation() -> None:
    layer = DynamicDepthwiseConv2d(512)
    for parameter in (layer.weight, layer.bias):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    for projection in (layer.proj1, layer.proj2):  # PyTorch's default: uniform within 1 / sqrt(fan in)
        assert projection.weight.abs().max().item() == pytest.approx(512**-0.5, rel=0.01)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"unknown conv_predictor 'gap'; choose one of adaptive"):
        DynamicDepthwiseConv2d(8, predictor="gap")
    with pytest.raises(ValueError, match=r"kernel_size must be odd, got 4"):
        DynamicDepthwiseConv2d(8, 4)


def test_static_convolution_equals_torch_on_channels_first() -> None:
    layer, x = DepthwiseConv2d(6), torch.randn(2, 5, 7, 6)
    expected = F.conv2d(x.permute(0, 3, 1, 2), layer.weight, layer.bias, padding=1, groups=6)
    torch.testing.assert_close(layer(x), expected.permute(0, 2, 3, 1))
