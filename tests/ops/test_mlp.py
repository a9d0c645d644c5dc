from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from parity import TOLERANCE, assert_close, assert_parity
from weightformer import ops
from weightformer.ops.mlp import eager, reference

# (B, H, W, C, O): no image, one token, odd grids, widths that fill no vector, more tokens than a row block.
SIZES = [(0, 3, 2, 8, 16), (1, 1, 1, 4, 12), (5, 3, 5, 12, 20), (1, 33, 35, 8, 24)]


def make_inputs(size: tuple[int, ...], per_image: bool, gated: bool) -> dict[str, Tensor]:
    b, h, w, c, o = size
    torch.manual_seed(0)
    gate = {"gate": torch.randn(b, 1, 1, c, dtype=torch.float64)} if gated else {}
    return {
        "x": torch.randn(b, h, w, c, dtype=torch.float64),
        "y": torch.randn(b, h, w, c, dtype=torch.float64),
        "w1": torch.randn((b, c, o) if per_image else (o, c), dtype=torch.float64) / c**0.5,
        "b1": torch.randn(o, dtype=torch.float64),
        "w2": torch.randn(c, o, dtype=torch.float64) / o**0.5,
        "b2": torch.randn(c, dtype=torch.float64),
        **gate,
    }


def positional(form: Callable[..., Tensor], approximate: str = "none") -> Callable[..., Tensor]:
    return lambda x, y, w1, b1, w2, b2, gate=None: form(x, y, w1, b1, w2, b2, gate, approximate)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eager_equals_the_reference(size: tuple[int, ...], per_image: bool, gated: bool, dtype: torch.dtype) -> None:
    inputs = make_inputs(size, per_image, gated)
    assert_parity(positional(eager.mlp), positional(reference.mlp), inputs, dtype)


@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
def test_the_tanh_form(per_image: bool) -> None:
    inputs = make_inputs(SIZES[2], per_image, False)
    assert_parity(positional(eager.mlp, "tanh"), positional(reference.mlp, "tanh"), inputs, torch.float32)
    exact, tanh = (positional(reference.mlp, form)(*inputs.values()) for form in ("none", "tanh"))
    assert (exact - tanh).abs().max() > 1e-4  # so the test above can tell them apart


@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
def test_reference_by_loop(per_image: bool) -> None:
    inputs = make_inputs((2, 2, 3, 4, 8), per_image, True)
    x, y, w1, b1, w2, b2, gate = inputs.values()
    for b in range(2):
        weight = w1[b] if per_image else w1.T
        for i in range(2):
            for j in range(3):
                hidden = torch.nn.functional.gelu(y[b, i, j] @ weight + b1)
                expected = x[b, i, j] + gate[b, 0, 0] * (w2 @ hidden + b2)
                assert_close(ops.mlp(x, y, w1, b1, w2, b2, gate=gate)[b, i, j], expected, 1e-12)


def test_inference_equals_training() -> None:
    inputs = make_inputs(SIZES[3], False, False)
    form = positional(eager.mlp)
    with torch.no_grad():
        expected = form(*inputs.values())
    inputs["w1"].requires_grad_()
    assert_close(form(*inputs.values()), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
def test_the_result_may_take_the_memory_of_y(per_image: bool, gated: bool) -> None:
    inputs = make_inputs(SIZES[3], per_image, gated)
    expected = ops.mlp(**inputs)
    for learns in (True, False):  # the last call spends y
        inputs["w2"].requires_grad_(learns)
        given = inputs["y"].clone()
        with ops.implementation("eager"):
            out = ops.mlp(**inputs, overwrite_y=True)
        assert_close(out.detach(), expected, TOLERANCE[torch.float64])
        assert torch.equal(inputs["y"], given) == learns
    assert (out.data_ptr() == inputs["y"].data_ptr()) == (not gated)


def test_only_wanted_gradients() -> None:
    inputs = make_inputs(SIZES[2], True, False)
    inputs["b1"].requires_grad_()
    positional(eager.mlp)(*inputs.values()).sum().backward()
    assert inputs["b1"].grad is not None
    assert all(t.grad is None for name, t in inputs.items() if name != "b1")


def test_strided_tokens() -> None:
    inputs = {name: t.float() for name, t in make_inputs((2, 4, 6, 8, 16), False, False).items()}
    expected = positional(reference.mlp)(*inputs.values())
    for name in ("x", "y"):
        strided = inputs | {name: inputs[name].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)}
        assert_close(positional(eager.mlp)(*strided.values()), expected, TOLERANCE[torch.float32], name)


def test_a_training_step_keeps_half_of_what_the_plain_graph_keeps() -> None:
    inputs = {name: t.float().requires_grad_() for name, t in make_inputs((1, 16, 16, 32, 128), False, False).items()}

    def kept(form: Callable[..., Tensor]) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = positional(form)(*inputs.values())
        del output
        return sum(sizes.values())

    assert kept(eager.mlp) < 0.7 * kept(reference.mlp)


def test_shapes_that_do_not_fit() -> None:
    inputs = make_inputs(SIZES[2], False, False)
    with pytest.raises(ValueError, match=r"do not fit weights"):
        ops.mlp(**inputs | {"w1": inputs["w1"].T})


@pytest.mark.parametrize("fault", ["residual", "activation", "bias"])
def test_planted_faults_are_seen(fault: str) -> None:
    def wrong(x: Tensor, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        out = reference.mlp(x, y, w1, b1, w2, b2, None, "tanh" if fault == "activation" else "none")
        return out - {"residual": x, "activation": 0, "bias": 1e-2 * b2}[fault]

    with pytest.raises(AssertionError):
        assert_parity(wrong, positional(reference.mlp), make_inputs(SIZES[2], False, False), torch.float32)


def test_concurrent_calls_do_not_meet() -> None:
    from concurrent.futures import ThreadPoolExecutor

    form = partial(positional(eager.mlp))
    inputs = [
        tuple(t.float() * scale for t in make_inputs(SIZES[3], False, False).values()) for scale in (1.0, 1.1, 0.9)
    ]
    with torch.inference_mode():
        expected = [form(*i) for i in inputs]
        with ThreadPoolExecutor(3) as pool:
            actual = list(pool.map(lambda i: torch.inference_mode()(form)(*i), inputs * 3))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected * 3, strict=True))
