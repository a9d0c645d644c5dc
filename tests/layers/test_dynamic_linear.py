from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from weightformer import ops
from weightformer.layers import DynamicLinear


def make_layer(dtype: torch.dtype = torch.float64) -> DynamicLinear:
    """A layer whose predicted weight is as large as its static one."""
    layer = DynamicLinear(8, 12, dtype=dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def by_loop(layer: DynamicLinear, x: Tensor) -> np.ndarray:
    """SPEC section 3 for each image on its own, in numpy, one pooled token at a time."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    c, o = layer.in_features, layer.out_features
    out = []
    for image in x.detach().numpy():
        height, width = image.shape[:2]
        update = np.zeros((c, o))
        for i in range(height // 2):
            for j in range(width // 2):
                token = (
                    image[2 * i, 2 * j]
                    + image[2 * i + 1, 2 * j]
                    + image[2 * i, 2 * j + 1]
                    + image[2 * i + 1, 2 * j + 1]
                ) / 4
                z = p["proj.weight"] @ token + p["proj.bias"]
                z = z / (1 + np.exp(-z))  # silu, which is elementwise, so it may come before the split
                update += np.outer(z[: c // 4] @ p["w1"], z[c // 4 :] @ p["w2"])
        update *= c**-0.5 / (height * width)
        weight = update / (np.sqrt((update**2).sum(0)) + 1) + p["weight"]
        out.append(image @ weight + p["bias"])
    return np.stack(out)


@pytest.mark.parametrize("grid", [(6, 4), (4, 6), (5, 3), (3, 8), (1, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_equals_a_loop_over_images(name: str, grid: tuple[int, int]) -> None:
    layer, x = make_layer(), torch.randn(3, *grid, 8, dtype=torch.float64)
    with ops.implementation(name):
        np.testing.assert_allclose(layer(x).detach(), by_loop(layer, x), rtol=1e-10, atol=1e-10)


def test_permuting_images_permutes_the_output_and_its_weights() -> None:
    layer, x = make_layer(), torch.randn(3, 5, 4, 8, dtype=torch.float64)
    order = [2, 0, 1]
    torch.testing.assert_close(layer(x[order]), layer(x)[order])
    torch.testing.assert_close(layer.predict(x[order]), layer.predict(x)[order])
    assert not torch.allclose(layer.predict(x)[0], layer.predict(x)[1])


def test_transposing_the_grid_transposes_the_output() -> None:
    layer, x = make_layer(), torch.randn(2, 7, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x.transpose(1, 2)), layer(x).transpose(1, 2))
    torch.testing.assert_close(layer.predict(x.transpose(1, 2)), layer.predict(x))


def test_predict_returns_the_weight_that_forward_applies() -> None:
    layer, x = make_layer(), torch.randn(2, 5, 4, 8, dtype=torch.float64)
    by_hand = torch.einsum("bhwc,bco->bhwo", x, layer.predict(x)) + layer.bias
    torch.testing.assert_close(layer(x), by_hand)


def test_one_token_has_no_pair_so_the_static_weight_applies() -> None:
    layer, x = make_layer(), torch.randn(2, 1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.weight + layer.bias)


def test_gradcheck() -> None:
    layer, x = make_layer(), torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_weights_are_predicted_in_float32_under_autocast() -> None:
    layer, x = make_layer(torch.float32), torch.randn(2, 6, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.predict(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


def test_initialisation() -> None:
    layer = DynamicLinear(256, 1024)
    for name, parameter in layer.named_parameters():
        if name == "proj.bias":
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.002), name


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"unknown linear_predictor 'attention'; choose one of bilateral"):
        DynamicLinear(8, 8, predictor="attention")
    with pytest.raises(ValueError, match=r"multiples of 4, got 8 -> 10"):
        DynamicLinear(8, 10)


def test_print_shows_widths() -> None:
    assert "in_features=8, out_features=12" in repr(DynamicLinear(8, 12))
