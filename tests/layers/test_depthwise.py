from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer import ops
from weightformer.analysis.flops import multiply_adds
from weightformer.layers import CONV_PREDICTORS, DepthwiseConv2d, DynamicDepthwiseConv2d

# Every strategy, then every ablation.
LAYERS: list[dict[str, Any]] = [
    *({"predictor": name} for name in CONV_PREDICTORS),
    {"static_weight": False},
    {"normalize": False},
]
each_layer = pytest.mark.parametrize("kwargs", LAYERS, ids=lambda kwargs: "-".join(map(str, kwargs.values())))


def make_layer(dtype: torch.dtype = torch.float64, kernel_size: int = 3, **kwargs: Any) -> DynamicDepthwiseConv2d:
    layer = DynamicDepthwiseConv2d(4, kernel_size, dtype=dtype, **kwargs)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5))


def convolve(image: np.ndarray, kernel: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    """A depthwise convolution, one token and tap at a time: image (H, W, C), kernel (C, k, k)."""
    height, width, _ = image.shape
    k = kernel.shape[-1]
    y = np.zeros_like(image) + bias
    for h in range(height):
        for w in range(width):
            for i in range(k):
                for j in range(k):
                    row, col = h + i - k // 2, w + j - k // 2
                    if 0 <= row < height and 0 <= col < width:
                        y[h, w] += image[row, col] * kernel[:, i, j]
    return y


def by_loop(layer: DynamicDepthwiseConv2d, x: Tensor) -> np.ndarray:
    """SPEC sections 4 and 5 for each image on its own, in numpy."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    k = layer.kernel_size

    def mlp(token: np.ndarray) -> np.ndarray:
        return p["proj2.weight"][:, :, 0, 0] @ gelu(p["proj1.weight"][:, :, 0, 0] @ token + p["proj1.bias"])

    out = []
    for image in x.detach().numpy():
        height, width, channels = image.shape
        source = image
        if layer.predictor == "conv":
            hidden = gelu(convolve(image, p["proj1.weight"][:, 0], p["proj1.bias"]))
            source = convolve(hidden, p["proj2.weight"][:, 0], 0.0)
        kernel = np.zeros((channels, k, k))
        for i in range(k):
            for j in range(k):
                rows = slice(i * height // k, math.ceil((i + 1) * height / k))
                cols = slice(j * width // k, math.ceil((j + 1) * width / k))
                mean = source[rows, cols].mean((0, 1))
                kernel[:, i, j] = mean if layer.predictor == "conv" else 0 if layer.predictor == "gap" else mlp(mean)
        if layer.predictor == "gap":
            kernel = mlp(image.mean((0, 1))).reshape(channels, k, k)
        length = np.sqrt((kernel**2).sum((1, 2), keepdims=True))
        if layer.predictor == "amp_dir":
            amplitude = (p["amplitude.weight"] @ image.mean((0, 1)) + p["amplitude.bias"])[:, None, None]
            kernel, length = amplitude * kernel / length, abs(amplitude)
        kernel = kernel / (length + 1) if layer.normalize else kernel
        kernel = kernel + p["weight"][:, 0] if "weight" in p else kernel
        out.append(convolve(image, kernel, p["bias"]))
    return np.stack(out)


@pytest.mark.parametrize("grid", [(6, 4), (4, 6), (5, 3), (2, 7), (1, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
@each_layer
def test_equals_a_loop_over_images(kwargs: dict[str, Any], name: str, grid: tuple[int, int]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(3, *grid, 4, dtype=torch.float64)
    with ops.implementation(name):
        np.testing.assert_allclose(layer(x).detach(), by_loop(layer, x), rtol=1e-10, atol=1e-10)


@each_layer
def test_other_kernel_sizes(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(kernel_size=5, **kwargs), torch.randn(2, 6, 7, 4, dtype=torch.float64)
    np.testing.assert_allclose(layer(x).detach(), by_loop(layer, x), rtol=1e-10, atol=1e-10)


@each_layer
def test_permuting_images_permutes_the_output_and_its_kernels(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(3, 5, 4, 4, dtype=torch.float64)
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


@each_layer
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_gradcheck(name: str, kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        with ops.implementation(name):
            return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@each_layer
def test_an_image_does_not_see_its_batch(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(torch.float32, **kwargs), torch.randn(3, 5, 4, 4)
    changed = x.clone()
    changed[1] *= -3
    assert torch.equal(layer(changed)[[0, 2]], layer(x)[[0, 2]])
    assert not torch.allclose(layer(changed)[1], layer(x)[1])
    torch.testing.assert_close(torch.cat([layer(image[None]) for image in x]), layer(x), rtol=1e-5, atol=1e-5)


@each_layer
def test_no_image(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(0, 5, 4, 4, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert layer(x).shape == (0, 5, 4, 4)
    assert x.grad is not None
    assert not any(p.grad.any() for p in layer.parameters())


@each_layer
def test_every_parameter_changes_the_output(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(2, 5, 4, 4, dtype=torch.float64)
    (layer(x) * torch.randn(2, 5, 4, 4)).sum().backward()
    assert all(p.grad.any() for p in layer.parameters())


def test_every_option_changes_the_output() -> None:
    x, seen = torch.randn(2, 9, 6, 4, dtype=torch.float64), []
    for kwargs in LAYERS:
        torch.manual_seed(0)
        seen.append(make_layer(**kwargs)(x))
    for i, y in enumerate(seen):
        assert not any(torch.allclose(y, other) for other in seen[:i]), LAYERS[i]


def test_the_amplitude_is_the_length_of_the_predicted_kernel() -> None:
    layer, x = make_layer(predictor="amp_dir", static_weight=False, normalize=False), torch.randn(2, 5, 4, 4).double()
    expected = layer.amplitude(x.mean((1, 2))).abs()
    torch.testing.assert_close(layer.predict(x).flatten(2).norm(dim=2), expected)
    nn.init.zeros_(layer.proj2.weight)  # no direction at all
    layer(x).sum().backward()
    assert not layer.predict(x).any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@each_layer
def test_cost_is_linear_in_tokens(kwargs: dict[str, Any]) -> None:
    class OnImages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = DynamicDepthwiseConv2d(32, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.permute(0, 2, 3, 1))

    one, two, four = (multiply_adds(OnImages(), 32, *size) for size in ((16, 16), (16, 32), (32, 32)))
    assert four - two == 2 * (two - one)
    assert 1 < four / one <= 4


@each_layer
def test_kernels_are_normalised_in_float32_under_autocast(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(torch.float32, **kwargs), torch.randn(2, 6, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.predict(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


def test_initialisation() -> None:
    layer = DynamicDepthwiseConv2d(512)
    for parameter in (layer.weight, layer.bias):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    for projection in (layer.proj1, layer.proj2):  # PyTorch's default: uniform within 1 / sqrt(fan in)
        assert projection.weight.abs().max().item() == pytest.approx(512**-0.5, rel=0.01)


@pytest.mark.parametrize("side", [14, 56])
@pytest.mark.parametrize("predictor", CONV_PREDICTORS)
def test_the_predicted_part_starts_small_beside_the_identity_of_the_residual(predictor: str, side: int) -> None:
    layer = DynamicDepthwiseConv2d(64, predictor=predictor)
    x = torch.randn(2, 1, 1, 64) + torch.randn(2, side, side, 64)  # tokens that have something in common
    update = layer.predict(nn.functional.layer_norm(x, (64,))) - layer.weight[:, 0]
    assert 0 < update.flatten(2).norm(dim=2).mean() < 0.5


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"unknown conv_predictor 'x'; choose one of gap, adaptive, amp_dir, conv"):
        DynamicDepthwiseConv2d(8, predictor="x")
    with pytest.raises(ValueError, match=r"kernel_size must be odd, got 4"):
        DynamicDepthwiseConv2d(8, 4)


def test_print_shows_sizes_and_what_differs() -> None:
    assert "  channels=8, kernel_size=3\n" in repr(DynamicDepthwiseConv2d(8))
    changed = DynamicDepthwiseConv2d(8, predictor="conv", static_weight=False, normalize=False)
    assert "predictor='conv', static_weight=False, normalize=False" in repr(changed)


def test_static_convolution_equals_torch_on_channels_first() -> None:
    layer, x = DepthwiseConv2d(6), torch.randn(2, 5, 7, 6)
    expected = F.conv2d(x.permute(0, 3, 1, 2), layer.weight, layer.bias, padding=1, groups=6)
    torch.testing.assert_close(layer(x), expected.permute(0, 2, 3, 1))


def test_static_convolution_without_bias() -> None:
    assert DepthwiseConv2d(6, bias=False).bias is None
