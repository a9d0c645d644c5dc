from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parity import TOLERANCE, assert_close, assert_parity
from weightformer import ops
from weightformer.ops.dynamic_depthwise import eager, reference

# (B, H, W, C, K): one token, rows and columns, grids smaller than the kernel, odd and non-square, above 1024 tokens.
SIZES = [
    (2, 3, 4, 2, 3),
    (3, 7, 5, 12, 3),
    (2, 1, 1, 3, 3),
    (2, 1, 9, 3, 3),
    (1, 9, 1, 3, 3),
    (2, 33, 32, 4, 3),
    (2, 6, 7, 5, 5),
    (2, 4, 5, 3, 1),
]
FORMS = {
    "reference": reference.dynamic_depthwise_conv2d,
    "eager": eager.dynamic_depthwise_conv2d,
    "grouped": eager.grouped,
    "per_image": eager.per_image,
    "shifted": eager.shifted,
}


def size_id(size: tuple[int, ...]) -> str:
    return "-".join(f"{name}{n}" for name, n in zip("BHWCK", size, strict=True))


def make_inputs(size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    b, h, w, c, k = size
    shapes = {"x": (b, h, w, c), "kernel": (b, c, k, k), "bias": (c,)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def by_loop(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """An independent witness: each output token is the sum of the taps that fall inside the grid."""
    _, height, width, _ = x.shape
    size = kernel.shape[-1]
    out = torch.empty_like(x)
    for b in range(len(x)):
        for i in range(height):
            for j in range(width):
                total = bias.clone()
                for di in range(size):
                    for dj in range(size):
                        row, col = i + di - size // 2, j + dj - size // 2
                        if 0 <= row < height and 0 <= col < width:
                            total += x[b, row, col] * kernel[b, :, di, dj]
                out[b, i, j] = total
    return out


@pytest.mark.parametrize("size", [s for s in SIZES if s[1] < 30], ids=size_id)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equals_a_slow_loop(form: Callable[..., Tensor], size: tuple[int, ...]) -> None:
    inputs = make_inputs(size)
    assert_close(form(*inputs.values()), by_loop(*inputs.values()), 1e-12)


@pytest.mark.parametrize("form", [reference.dynamic_depthwise_conv2d, eager.shifted], ids=["reference", "shifted"])
def test_gradcheck(form: Callable[..., Tensor]) -> None:
    assert torch.autograd.gradcheck(form, [t.requires_grad_() for t in make_inputs(SIZES[0]).values()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parity(form: Callable[..., Tensor], size: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_parity(form, reference.dynamic_depthwise_conv2d, make_inputs(size), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    def form(*args: Tensor) -> Tensor:
        with ops.implementation(name), torch.autocast("cpu", dtype=dtype):
            y = ops.dynamic_depthwise_conv2d(*args)
        assert y.dtype == dtype
        return y

    inputs = make_inputs((3, 9, 7, 16, 3), torch.float32)
    assert_parity(form, reference.dynamic_depthwise_conv2d, inputs, torch.float32, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_images_are_independent(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs((3, 9, 7, 16, 3), torch.float32)
    y = form(*inputs.values())
    changed = {k: v.clone() for k, v in inputs.items()}
    for key in ("x", "kernel"):
        changed[key][1] *= -3
    other = form(*changed.values())
    assert torch.equal(y[[0, 2]], other[[0, 2]])
    assert not torch.equal(y[1], other[1])

    x, kernel, bias = inputs.values()
    assert_close(torch.cat([form(x[i : i + 1], kernel[i : i + 1], bias) for i in range(3)]), y, 1e-6)
    assert_close(form(x[[2, 0, 1]], kernel[[2, 0, 1]], bias), y[[2, 0, 1]], 1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_transposing_tokens_and_kernel_transposes_the_output(form: Callable[..., Tensor]) -> None:
    x, kernel, bias = make_inputs((2, 9, 4, 6, 3)).values()
    assert_close(form(x.transpose(1, 2), kernel.mT, bias), form(x, kernel, bias).transpose(1, 2), 1e-12)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_layouts(form: Callable[..., Tensor], batch: int) -> None:
    x, kernel, bias = make_inputs((batch, 9, 7, 16, 3), torch.float32).values()
    expected = form(x, kernel, bias)
    channels_first = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    strided = torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(3)[..., ::2]
    for same_x in (channels_first, strided):
        assert not same_x.is_contiguous()
        assert_close(form(same_x, kernel.mT.contiguous().mT, bias[None].expand(2, -1).T[:, 0]), expected, 1e-6)


@pytest.mark.parametrize("name", ["reference", "eager"])
def test_no_image(name: str) -> None:
    inputs = {k: v.requires_grad_() for k, v in make_inputs((0, 4, 5, 3, 3)).items()}
    with ops.implementation(name):
        y = ops.dynamic_depthwise_conv2d(*inputs.values())
    assert y.shape == (0, 4, 5, 3)
    y.sum().backward()
    assert all(torch.equal(v.grad, torch.zeros_like(v)) for v in inputs.values())


@pytest.mark.parametrize("kernel", [(2, 3, 3, 3), (1, 4, 3, 3), (1, 3, 2, 2), (1, 3, 3, 5)], ids=str)
def test_a_kernel_that_does_not_fit(kernel: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not fit tokens \(1, 4, 4, 3\): expected \(B, C, K, K\), K odd"):
        ops.dynamic_depthwise_conv2d(torch.ones(1, 4, 4, 3), torch.ones(kernel), torch.ones(3))


@pytest.mark.parametrize(
    ("batch", "tokens", "dtype", "form"),
    [
        (8, 196, torch.float32, eager.grouped),
        (1, 4096, torch.float32, eager.per_image),
        (8, 196, torch.bfloat16, eager.shifted),
        (1, 4096, torch.float16, eager.shifted),
        (0, 196, torch.float32, eager.shifted),
    ],
)
def test_choice_on_a_cpu(batch: int, tokens: int, dtype: torch.dtype, form: Callable[..., Tensor]) -> None:
    assert eager.choose(batch, tokens, dtype, torch.device("cpu")) is form


def test_choice_on_a_gpu() -> None:
    for tokens in (196, 4096):
        assert eager.choose(8, tokens, torch.bfloat16, torch.device("cuda")) is eager.grouped


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
def test_choice_while_a_graph_is_captured() -> None:
    """No batch size may enter an attribute of the graph, so convolutions with B * C groups must not appear."""

    class Op(torch.nn.Module):
        def forward(self, x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
            return ops.dynamic_depthwise_conv2d(x, kernel, bias)

    args = tuple(make_inputs((2, 5, 6, 4, 3), torch.float32).values())
    exported = torch.export.export(Op(), args).graph
    traced = torch.jit.trace(Op(), args).inlined_graph
    assert "conv" not in str(exported)
    assert "conv" not in str(traced)
    assert "mul" in str(exported)
    assert "mul" in str(traced)


def convolution_not_correlation(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return reference.dynamic_depthwise_conv2d(x, kernel.flip(2, 3), bias)


def swapped_taps(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return reference.dynamic_depthwise_conv2d(x, kernel.mT, bias)


def first_kernel_for_all(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return reference.dynamic_depthwise_conv2d(x, kernel[:1].expand_as(kernel), bias)


def no_bias(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return reference.dynamic_depthwise_conv2d(x, kernel, bias * 0)


def one_tap_missing(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    mask = torch.ones_like(kernel)
    mask[..., -1, -1] = 0
    return reference.dynamic_depthwise_conv2d(x, kernel * mask, bias)


def wraps_around(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    taps = [(i, j) for i in range(kernel.shape[-1]) for j in range(kernel.shape[-1])]
    r = kernel.shape[-1] // 2
    return bias + sum(x.roll((r - i, r - j), (1, 2)) * kernel[:, None, None, :, i, j] for i, j in taps)


def detached_kernel(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return reference.dynamic_depthwise_conv2d(x, kernel.detach() + 0 * kernel, bias)


FAULTS = [convolution_not_correlation, swapped_taps, first_kernel_for_all, no_bias, one_tap_missing, wraps_around]


@pytest.mark.parametrize("fault", [*FAULTS, detached_kernel], ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [SIZES[1], SIZES[5]], ids=size_id)
def test_a_planted_fault_is_seen(fault: Callable[..., Tensor], size: tuple[int, ...]) -> None:
    where = "gradient of kernel" if fault is detached_kernel else "output"
    with pytest.raises(AssertionError, match=where):
        assert_parity(fault, reference.dynamic_depthwise_conv2d, make_inputs(size), torch.float32, tolerance=1e-2)
