from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import TOLERANCE, assert_close, assert_parity, relative_error
from weightformer import ops
from weightformer.ops.dynamic_linear import eager, reference

# (B, N, P, R, S, C, O): odd sizes, the model's own proportions, more and fewer pooled tokens than channels, no pair.
SIZES = [
    (2, 5, 3, 2, 3, 5, 7),
    (3, 49, 9, 12, 48, 48, 192),
    (2, 63, 100, 8, 32, 32, 128),
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 0, 2, 3, 5, 7),
]


def size_id(size: tuple[int, ...]) -> str:
    return "-".join(f"{name}{n}" for name, n in zip("BNPRSCO", size, strict=True))


def make_inputs(size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, Tensor | float]:
    """Inputs whose update has columns of norm near 1, where ``dW / (||dW|| + 1)`` bends most."""
    b, n, p, r, s, c, o = size
    shapes = {
        "x": (b, n, c),
        "left": (b, p, r),
        "right": (b, p, s),
        "w1": (r, c),
        "w2": (s, o),
        "static": (c, o),
        "bias": (o,),
    }
    tensors = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return tensors | {"scale": (c * max(p, 1) * r * s) ** -0.5}


def over_tokens(x, left, right, w1, w2, static, bias, scale, normalize=True) -> Tensor:
    """The eager form when it contracts over tokens."""
    weight = eager.weight_from_tokens(left, right, w1, w2, static, scale, normalize)
    return torch.baddbmm(bias, x, weight.to(x.dtype))


def over_channels(x, left, right, w1, w2, static, bias, scale, normalize=True) -> Tensor:
    """The eager form when it contracts over channels."""
    weight = eager.weight_from_gram(eager.gram(left, right), w1, w2, static, scale, normalize)
    return torch.baddbmm(bias, x, weight.to(x.dtype))


# What a strategy or an ablation leaves out: the expansion of the left side, the static part, the norm.
LACKING = {
    "no w1": {"w1": None},
    "no static": {"static": None},
    "no norm": {"normalize": False},
    "none of them": {"w1": None, "static": None, "normalize": False},
}


def make_lacking(lacking: str, size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """`make_inputs` without those parts; without ``w1`` the left side has the input's width."""
    b, n, p, r, s, c, o = size
    parts = {"normalize": True, **LACKING[lacking]}
    return make_inputs((b, n, p, c if "w1" in parts else r, s, c, o), dtype) | parts


FORMS = {
    "reference": reference.dynamic_linear,
    "eager": eager.dynamic_linear,
    "tokens": over_tokens,
    "channels": over_channels,
}


def by_loop(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    """An independent witness: one image, one output column, one token at a time."""
    images = []
    for b in range(len(x)):
        columns = []
        for j in range(w2.shape[1]):
            update = torch.zeros_like(static[:, j])
            for p in range(left.shape[1]):
                update = update + scale * (left[b, p] @ w1) * (right[b, p] @ w2[:, j])
            columns.append(x[b] @ (update / (update.square().sum().sqrt() + 1) + static[:, j]) + bias[j])
        images.append(torch.stack(columns, -1))
    return torch.stack(images)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equals_a_slow_loop(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs(SIZES[0])
    assert_close(form(*inputs.values()), by_loop(*inputs.values()), 1e-12)


@pytest.mark.parametrize("form", [reference.dynamic_linear, over_channels], ids=["reference", "channels"])
def test_gradcheck(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs(SIZES[0])
    scale = inputs.pop("scale")
    tensors = [t.requires_grad_() for t in inputs.values()]
    assert torch.autograd.gradcheck(lambda *args: form(*args, scale), tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parity(form: Callable[..., Tensor], size: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_parity(form, reference.dynamic_linear, make_inputs(size), dtype)


@pytest.mark.parametrize("name", ["reference", "eager"])
@pytest.mark.parametrize("size", SIZES[:3], ids=size_id)
def test_weight_is_the_one_applied(size: tuple[int, ...], name: str) -> None:
    inputs = make_inputs(size)
    with ops.implementation(name):
        y = ops.dynamic_linear(*inputs.values())
        weight = ops.linear_weight(*(inputs[k] for k in ("left", "right", "w1", "w2", "static", "scale")))
    assert_close(inputs["x"] @ weight + inputs["bias"], y, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs((2, 63, 300, 8, 32, 32, 128), torch.float32)

    def form(*args: Tensor) -> Tensor:
        with ops.implementation(name), torch.autocast("cpu", dtype=dtype):
            y = ops.dynamic_linear(*args)
        assert y.dtype == dtype
        return y

    # Weights and inputs stay float32: only the product with the tokens is narrow, and so are the gradients it yields.
    assert_parity(form, reference.dynamic_linear, inputs, torch.float32, TOLERANCE[dtype])
    with torch.autocast("cpu", dtype=dtype):
        weight = ops.linear_weight(*(inputs[k] for k in ("left", "right", "w1", "w2", "static", "scale")))
    expected = ops.linear_weight(*(inputs[k] for k in ("left", "right", "w1", "w2", "static", "scale")))
    assert torch.equal(weight, expected), "autocast reached the reduction over tokens"


@pytest.mark.parametrize("name", ["reference", "eager"])
def test_half_precision_tokens_are_summed_in_float32(name: str) -> None:
    inputs = make_inputs((1, 1, 4096, 4, 4, 8, 8), torch.float32)
    inputs |= {k: inputs[k].half() for k in ("left", "right")} | {"scale": 1.0}
    inputs["left"], inputs["right"] = inputs["left"].abs() * 4, inputs["right"].abs() * 4  # sums pass 65504
    args = [inputs[k] for k in ("left", "right", "w1", "w2", "static", "scale")]
    with ops.implementation(name):
        weight = ops.linear_weight(*args)
    assert weight.dtype == torch.float32
    assert_close(weight, reference.linear_weight(*(a.double() if isinstance(a, Tensor) else a for a in args)), 1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_images_are_independent(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs((3, 21, 30, 4, 16, 16, 64), torch.float32)
    y = form(*inputs.values())
    changed = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    for key in ("x", "left", "right"):
        changed[key][1] *= -3
    other = form(*changed.values())
    assert torch.equal(y[[0, 2]], other[[0, 2]])
    assert not torch.equal(y[1], other[1])

    single = [form(*(v[i : i + 1] if k in ("x", "left", "right") else v for k, v in inputs.items())) for i in range(3)]
    assert_close(torch.cat(single), y, 1e-6)
    permuted = form(*(v[[2, 0, 1]] if k in ("x", "left", "right") else v for k, v in inputs.items()))
    assert_close(permuted, y[[2, 0, 1]], 1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_layouts(form: Callable[..., Tensor]) -> None:
    """Slices of a wider projection and transposed storage, as the layers hand them over."""
    inputs = make_inputs((3, 21, 30, 4, 16, 16, 64), torch.float32)
    strided = {
        k: torch.stack([v, torch.full_like(v, torch.nan)], -1).flatten(-2)[..., ::2]
        if v.ndim == 1
        else v.mT.contiguous().mT
        for k, v in inputs.items()
        if isinstance(v, Tensor)
    }
    assert not any(v.is_contiguous() for v in strided.values())
    assert_close(form(*strided.values(), inputs["scale"]), form(*inputs.values()), 1e-6)


@pytest.mark.parametrize("size", [(0, 5, 3, 2, 3, 5, 7), (2, 5, 0, 2, 3, 5, 7)], ids=["no image", "no pooled token"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_empty(form: Callable[..., Tensor], size: tuple[int, ...]) -> None:
    inputs = {k: v.requires_grad_() if isinstance(v, Tensor) else v for k, v in make_inputs(size).items()}
    y = form(*inputs.values())
    assert_close(y, inputs["x"] @ inputs["static"] + inputs["bias"], 1e-12)
    y.sum().backward()
    assert all(v.grad.isfinite().all() for v in inputs.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_zero_update_has_finite_gradients(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs(SIZES[0]) | {"left": torch.zeros(2, 3, 2, dtype=torch.float64)}
    assert_parity(
        form, reference.dynamic_linear, inputs, tolerance=3e-12
    )  # the root is clamped at 1e-12 beside the + 1


def test_the_cheaper_order_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = make_inputs((1, 4, 4, 12, 48, 48, 192)), make_inputs((1, 4, 400, 12, 48, 48, 192))
    expected = {4: over_tokens(*few.values()), 400: over_channels(*many.values())}

    def absent(*_: object) -> None:
        raise AssertionError("the other order ran")

    monkeypatch.setattr(eager, "gram", absent)
    assert torch.equal(eager.dynamic_linear(*few.values()), expected[4])
    monkeypatch.undo()
    monkeypatch.setattr(eager, "weight_from_tokens", absent)
    assert torch.equal(eager.dynamic_linear(*many.values()), expected[400])


@pytest.mark.parametrize("tokens", [1, 30, 47, 48, 49, 200])
@pytest.mark.parametrize("expands", [True, False], ids=["w1", "no w1"])
def test_counted_cost(expands: bool, tokens: int) -> None:
    """The count that chooses the order is the count that a profiler finds."""
    from torch.utils.flop_counter import FlopCounterMode

    c, o = 192, 768
    r = c // 4 if expands else c
    inputs = make_inputs((1, 1, tokens, r, o // 4, c, o)) | ({} if expands else {"w1": None})
    flops = {}
    for name in ("tokens", "channels"):
        with FlopCounterMode(display=False) as counter:
            FORMS[name](*inputs.values())
        flops[name] = counter.get_total_flops()
    flops["channels"] -= 2 * r**2 * c if expands else 0  # w1 w1^T is the same for every image
    assert eager.cheaper_order(tokens, r, o // 4, c, o, expands) == min(flops, key=flops.__getitem__)


def wrong_axis(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    update = scale * ((left @ w1).mT @ (right @ w2))
    return x @ (ops.normalize_update(update, dim=2) + static) + bias


def wrong_sign(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    return reference.dynamic_linear(x, left, right, w1, w2, static, bias, -scale)


def first_image_for_all(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    return reference.dynamic_linear(x, left[:1].expand_as(left), right, w1, w2, static, bias, scale)


def no_norm(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    return x @ (scale * ((left @ w1).mT @ (right @ w2)) + static) + bias


def a_token_dropped(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    return reference.dynamic_linear(x, left[:, :-1], right[:, :-1], w1, w2, static, bias, scale)


def detached_norm(x, left, right, w1, w2, static, bias, scale) -> Tensor:
    update = scale * ((left @ w1).mT @ (right @ w2))
    return x @ (update / (update.norm(dim=1, keepdim=True).detach() + 1) + static) + bias


FAULTS = [wrong_axis, wrong_sign, first_image_for_all, no_norm, a_token_dropped, detached_norm]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", SIZES[:3], ids=size_id)
def test_a_planted_fault_is_seen(fault: Callable[..., Tensor], size: tuple[int, ...]) -> None:
    where = "gradient of" if fault is detached_norm else "output"
    with pytest.raises(AssertionError, match=where):
        assert_parity(fault, reference.dynamic_linear, make_inputs(size), torch.float32, tolerance=1e-3)


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("form", [reference.dynamic_linear, over_tokens, over_channels])
def test_lacking_parts_are_the_identity_zero_and_nothing(form: Callable[..., Tensor], lacking: str) -> None:
    """One image and output column at a time, as in `by_loop`."""
    inputs = make_lacking(lacking, SIZES[0])
    x, left, right, w1, w2, static, bias, scale, normalize = inputs.values()
    expand = torch.eye(5, dtype=torch.float64) if w1 is None else w1
    columns = []
    for j in range(w2.shape[1]):
        column = torch.zeros(2, 5, dtype=torch.float64)
        for p in range(left.shape[1]):
            column = column + scale * (left[:, p] @ expand) * (right[:, p] @ w2[:, j])[:, None]
        column = column / (column.square().sum(1, keepdim=True).sqrt() + 1) if normalize else column
        column = column if static is None else column + static[:, j]
        columns.append(torch.einsum("bnc,bc->bn", x, column) + bias[j])
    assert_close(form(*inputs.values()), torch.stack(columns, -1), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [SIZES[1], SIZES[2], SIZES[4]], ids=size_id)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("lacking", LACKING)
def test_parity_of_lacking_parts(
    lacking: str, form: Callable[..., Tensor], size: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert_parity(form, reference.dynamic_linear, make_lacking(lacking, size), dtype)


@pytest.mark.parametrize("form", [reference.dynamic_linear, over_tokens, over_channels])
@pytest.mark.parametrize("lacking", LACKING)
def test_gradcheck_of_lacking_parts(lacking: str, form: Callable[..., Tensor]) -> None:
    inputs = make_lacking(lacking, SIZES[0])
    names = [k for k, v in inputs.items() if isinstance(v, Tensor)]

    def run(*tensors: Tensor) -> Tensor:
        return form(*(inputs | dict(zip(names, tensors, strict=True))).values())

    assert torch.autograd.gradcheck(run, [inputs[k].requires_grad_() for k in names])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nothing_predicted_and_nothing_static_is_the_bias(form: Callable[..., Tensor]) -> None:
    inputs = make_lacking("no static", (2, 5, 0, 2, 3, 5, 7))
    assert_close(form(*inputs.values()), inputs["bias"].expand(2, 5, 7), 1e-12)


def test_inputs_exercise_the_norm() -> None:
    """The parity inputs would miss a wrong norm if every update were tiny or huge."""
    for size in SIZES[:3]:
        inputs = make_inputs(size)
        update = inputs["scale"] * ((inputs["left"] @ inputs["w1"]).mT @ (inputs["right"] @ inputs["w2"]))
        assert 0.1 < torch.linalg.vector_norm(update, dim=1).mean() < 10


def test_relative_error() -> None:
    one = torch.ones(4)
    assert relative_error(one * 1.1, one) == pytest.approx(0.1, rel=1e-5)
    assert relative_error(one, one * 0) == 1
