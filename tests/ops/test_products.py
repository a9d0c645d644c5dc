from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parity import TOLERANCE, assert_close, assert_parity
from weightformer.ops import products

SHAPES = [((3, 5), (5, 7)), ((4, 3, 5), (5, 7)), ((3, 5), (4, 5, 7)), ((4, 3, 5), (4, 5, 7)), ((0, 3, 5), (5, 7))]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.mT.contiguous().mT,
    "columns of a wider one": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other row": lambda t: t.repeat_interleave(2, -2)[..., ::2, :],
    "expanded": lambda t: t,
}


@pytest.fixture(params=[products._SMALL, 0], ids=["", "a call an image"], autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batched products, and a call an image."""
    monkeypatch.setattr(products, "_SMALL", request.param)


@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_matmul_and_its_gradients(a: tuple[int, ...], b: tuple[int, ...], added: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = {"a": torch.randn(a, dtype=torch.float64), "b": torch.randn(b, dtype=torch.float64)}
    if added:
        inputs["add"] = torch.randn(3, 7, dtype=torch.float64)
    assert_parity(products.matmul, lambda a, b, add=0: a @ b + add, inputs, dtype)


@pytest.mark.parametrize("x_view", VIEWS)
@pytest.mark.parametrize("w_view", VIEWS)
def test_any_strides(x_view: str, w_view: str) -> None:
    torch.manual_seed(0)
    x, w, bias, add = torch.randn(9, 20), torch.randn(12, 20), torch.randn(12), torch.randn(9, 12)
    linear = x.double() @ w.double().T + bias.double()
    x, w = VIEWS[x_view](x), VIEWS[w_view](w)
    assert_close(products.product(x, w, bias), linear, TOLERANCE[torch.float32])
    assert_close(products.product(x, w, bias, add=add), linear + add, TOLERANCE[torch.float32])
    for form in ("none", "tanh"):
        expected = torch.nn.functional.gelu(linear, approximate=form)
        assert_close(products.product(x, w, bias, gelu=form), expected, TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_without_onednn() -> None:
    x, w, bias, add = torch.randn(9, 20), torch.randn(12, 20), torch.randn(12), torch.randn(9, 12)
    fast = [products.product(x, w, bias, gelu="none"), products.product(x, w, add=add)]
    with torch.backends.mkldnn.flags(enabled=False):
        assert not products.accelerated(x)
        plain = [products.product(x, w, bias, gelu="none"), products.product(x, w, add=add)]
    for a, b in zip(fast, plain, strict=True):
        assert_close(a, b, TOLERANCE[torch.float32])


@pytest.mark.parametrize("x", [torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, device="meta")], ids=str)
def test_only_float32_on_a_cpu(x: Tensor) -> None:
    assert not products.accelerated(x)
