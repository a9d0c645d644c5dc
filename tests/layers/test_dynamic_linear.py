from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightformer import ops
from weightformer.analysis.flops import multiply_adds
from weightformer.layers import LINEAR_PREDICTORS, DynamicLinear

# Every strategy, then every ablation.
LAYERS: list[dict[str, Any]] = [
    *({"predictor": name} for name in LINEAR_PREDICTORS),
    *({"predictor": name, "pool": pool} for name in ("bilateral", "nonlinear") for pool in (1, "7x7")),
    {"static_weight": False},
    {"normalize": False},
]
each_layer = pytest.mark.parametrize("kwargs", LAYERS, ids=lambda kwargs: "-".join(map(str, kwargs.values())))


def make_layer(dtype: torch.dtype = torch.float64, **kwargs: Any) -> DynamicLinear:
    """A layer whose predicted weight is as large as its static one."""
    layer = DynamicLinear(8, 12, dtype=dtype, **kwargs)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def pooled_by_loop(layer: DynamicLinear, image: np.ndarray) -> tuple[list[np.ndarray], float]:
    """The pooled tokens of an image, and what their sum is divided by beside ``sqrt(C)``."""
    height, width = image.shape[:2]
    size = 1 if layer.predictor == "gap" else 7 if layer.pool == "7x7" else 0
    if size:
        rows = [slice(i * height // size, math.ceil((i + 1) * height / size)) for i in range(size)]
        cols = [slice(j * width // size, math.ceil((j + 1) * width / size)) for j in range(size)]
        return [image[r, c].mean((0, 1)) for r in rows for c in cols], 4 * size**2
    if layer.pool == "1":
        return list(image.reshape(-1, image.shape[-1])), 4 * height * width
    pairs = [(2 * i, 2 * j) for i in range(height // 2) for j in range(width // 2)]
    return [
        (image[i, j] + image[i + 1, j] + image[i, j + 1] + image[i + 1, j + 1]) / 4 for i, j in pairs
    ], height * width


def by_loop(layer: DynamicLinear, x: Tensor) -> np.ndarray:
    """SPEC sections 3 and 5 for each image on its own, in numpy, one pooled token at a time."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    c, o = layer.in_features, layer.out_features

    def project(name: str, token: np.ndarray) -> np.ndarray:
        return silu(p[f"{name}.weight"] @ token + p[f"{name}.bias"])

    out = []
    for image in x.detach().numpy():
        tokens, divisor = pooled_by_loop(layer, image)
        update = np.zeros((c, o))
        for token in tokens:
            if layer.predictor in ("bilateral", "gap"):
                z = project("proj", token)
                update += np.outer(z[: c // 4] @ p["w1"], z[c // 4 :] @ p["w2"])
            elif layer.predictor == "linear":
                update += np.outer(token @ p["w1"], token @ p["w2"])
            elif layer.predictor == "nonlinear":
                update += np.outer(token, project("proj", token) @ p["w2"])
            else:
                update += np.outer(token, project("proj2", project("proj", token)) @ p["w2"])
        update *= c**-0.5 / divisor
        weight = update / (np.sqrt((update**2).sum(0)) + 1) if layer.normalize else update
        weight = weight + p["weight"] if "weight" in p else weight
        out.append(image @ weight + p["bias"])
    return np.stack(out)


@each_layer
@pytest.mark.parametrize("grid", [(6, 4), (4, 6), (5, 3), (3, 8), (1, 4), (1, 1), (9, 15)], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_equals_a_loop_over_images(name: str, grid: tuple[int, int], kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(3, *grid, 8, dtype=torch.float64)
    with ops.implementation(name):
        np.testing.assert_allclose(layer(x).detach(), by_loop(layer, x), rtol=1e-10, atol=1e-10)


@each_layer
def test_permuting_images_permutes_the_output_and_its_weights(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(3, 5, 4, 8, dtype=torch.float64)
    order = [2, 0, 1]
    torch.testing.assert_close(layer(x[order]), layer(x)[order])
    torch.testing.assert_close(layer.predict(x[order]), layer.predict(x)[order])
    assert not torch.allclose(layer.predict(x)[0], layer.predict(x)[1])


@each_layer
def test_an_image_does_not_see_its_batch(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(torch.float32, **kwargs), torch.randn(3, 5, 4, 8)
    changed = x.clone()
    changed[1] *= -3
    assert torch.equal(layer(changed)[[0, 2]], layer(x)[[0, 2]])
    assert not torch.allclose(layer(changed)[1], layer(x)[1])
    torch.testing.assert_close(torch.cat([layer(image[None]) for image in x]), layer(x), rtol=1e-5, atol=1e-5)


@each_layer
def test_transposing_the_grid_transposes_the_output(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(2, 7, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x.transpose(1, 2)), layer(x).transpose(1, 2))
    torch.testing.assert_close(layer.predict(x.transpose(1, 2)), layer.predict(x))


@each_layer
def test_predict_returns_the_weight_that_forward_applies(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(2, 5, 4, 8, dtype=torch.float64)
    by_hand = torch.einsum("bhwc,bco->bhwo", x, layer.predict(x)) + layer.bias
    torch.testing.assert_close(layer(x), by_hand)


def test_one_token_has_no_pair_so_the_static_weight_applies() -> None:
    layer, x = make_layer(), torch.randn(2, 1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.weight + layer.bias)


@each_layer
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_gradcheck(name: str, kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        with ops.implementation(name):
            return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@each_layer
def test_no_image(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(0, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert layer(x).shape == (0, 5, 4, 12)
    assert x.grad is not None
    assert not any(p.grad.any() for p in layer.parameters())


@each_layer
def test_every_parameter_changes_the_output(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(**kwargs), torch.randn(2, 5, 4, 8, dtype=torch.float64)
    (layer(x) * torch.randn(2, 5, 4, 12)).sum().backward()
    assert all(p.grad.any() for p in layer.parameters())


def test_every_option_changes_the_output() -> None:
    """Strategies and ablations are different functions, also where their parameters are the same."""
    x, seen = torch.randn(2, 9, 6, 8, dtype=torch.float64), []
    for kwargs in LAYERS:
        layer = DynamicLinear(8, 12, dtype=torch.float64, **kwargs)
        for name, parameter in layer.named_parameters():
            torch.manual_seed(len(name))
            nn.init.normal_(parameter)
        seen.append(layer(x))
    for i, y in enumerate(seen):
        assert not any(torch.allclose(y, other) for other in seen[:i]), LAYERS[i]


def test_seven_by_seven_on_the_grid_of_the_paper_is_the_released_pool() -> None:
    layer, x = make_layer(pool="7x7"), torch.randn(2, 14, 14, 8, dtype=torch.float64)
    released = make_layer()
    released.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), released(x))


def test_on_one_colour_the_mean_token_is_as_good_as_all() -> None:
    layer, x = make_layer(predictor="gap"), torch.randn(2, 1, 1, 8, dtype=torch.float64).expand(-1, 6, 4, -1)
    bilateral = make_layer()
    bilateral.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), bilateral(x))


@each_layer
def test_cost_is_linear_in_tokens(kwargs: dict[str, Any]) -> None:
    class OnImages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = DynamicLinear(32, 128, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.permute(0, 2, 3, 1))

    one, two, four = (multiply_adds(OnImages(), 32, *size) for size in ((16, 16), (16, 32), (32, 32)))
    assert four - two == 2 * (two - one)
    assert 1 < four / one <= 4


@each_layer
def test_weights_are_predicted_in_float32_under_autocast(kwargs: dict[str, Any]) -> None:
    layer, x = make_layer(torch.float32, **kwargs), torch.randn(2, 6, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.predict(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


@each_layer
def test_sums_over_many_large_tokens_stay_finite_in_float16(kwargs: dict[str, Any]) -> None:
    """``X^T X`` of so many tokens exceeds 65504 by far; in float32 and divided by their number it does not."""
    layer, x = make_layer(torch.float32, **kwargs), 20 * torch.randn(1, 64, 64, 8) + 20
    with torch.autocast("cpu", dtype=torch.float16):
        weight = layer.predict(x)
    assert weight.isfinite().all()
    assert (weight - layer.predict(x)).abs().max() < 0.02 * weight.abs().max()


@pytest.mark.parametrize("predictor", LINEAR_PREDICTORS)
def test_initialisation(predictor: str) -> None:
    layer = DynamicLinear(256, 1024, predictor=predictor)
    for name, parameter in layer.named_parameters():
        if name in ("proj.bias", "proj2.bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.002), name


@pytest.mark.parametrize("side", [14, 56])
@pytest.mark.parametrize("predictor", LINEAR_PREDICTORS)
def test_the_predicted_part_starts_small_at_every_size(predictor: str, side: int) -> None:
    layer = DynamicLinear(64, 256, predictor=predictor)
    x = torch.randn(2, 1, 1, 64) + torch.randn(2, side, side, 64)  # tokens that have something in common
    update = layer.predict(nn.functional.layer_norm(x, (64,))) - layer.weight
    assert 0 < update.norm() < 0.1 * layer.weight.norm()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"predictor": "attention"}, r"unknown linear_predictor 'attention'; choose one of gap, linear, .*, bilateral"),
        ({"pool": 3}, r"unknown pool 3; choose one of 1, 2, 7x7"),
        ({"predictor": "gap", "pool": "7x7"}, r"pool='7x7' does not apply to linear_predictor 'gap'"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLinear(8, 8, **kwargs)


def test_wrong_widths() -> None:
    with pytest.raises(ValueError, match=r"multiples of 4, got 8 -> 10"):
        DynamicLinear(8, 10)


def test_print_shows_widths_and_what_differs() -> None:
    assert repr(DynamicLinear(8, 12)).splitlines()[0] == "DynamicLinear("
    assert "  in_features=8, out_features=12\n" in repr(DynamicLinear(8, 12))
    changed = DynamicLinear(8, 12, predictor="deep", static_weight=False, normalize=False, pool=1)
    assert "predictor='deep', static_weight=False, normalize=False, pool=1" in repr(changed)
