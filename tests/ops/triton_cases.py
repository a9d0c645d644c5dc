"""The Triton kernels against the float64 reference: on a GPU where there is one, else in Triton's interpreter.

The name keeps pytest from collecting this file: the interpreter must be chosen before triton is imported, so
test_triton.py runs it in a process of its own. By hand: ``TRITON_INTERPRET=1 pytest tests/ops/triton_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
import triton
import triton.language as tl
from torch import Tensor

from parity import TOLERANCE, assert_close, assert_parity
from weightformer import ops
from weightformer.ops import triton_support
from weightformer.ops.depthwise_norm import reference as depthwise_norm_reference
from weightformer.ops.depthwise_norm.triton import _op as depthwise_norm_op
from weightformer.ops.dynamic_depthwise import reference as depthwise_reference
from weightformer.ops.dynamic_depthwise.triton import _depthwise as depthwise_op
from weightformer.ops.dynamic_linear import reference as linear_reference
from weightformer.ops.dynamic_linear.triton import gram, predicted_weight
from weightformer.ops.mlp import reference as mlp_reference
from weightformer.ops.mlp.triton import _branch as mlp_op
from weightformer.ops.mlp.triton import fused
from weightformer.ops.pooling import reference as pooling_reference
from weightformer.ops.pooling.triton import _pool_2x2 as pool_op
from weightformer.ops.pooling.triton import _region_mean as region_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
assert DEVICE == "cuda" or triton_support.INTERPRETED, "no GPU: set TRITON_INTERPRET=1"

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Images, rows, columns, channels: grids smaller and larger than a tile in either direction, widths of any kind.
SHAPES = [(2, 1, 1, 24), (1, 1, 7, 96), (2, 7, 9, 40), (1, 2, 33, 192), (5, 3, 4, 24), (0, 3, 3, 24), (1, 1, 5, 384)]


@pytest.fixture(autouse=True)
def _triton():
    with ops.implementation("triton"):
        yield


def draw(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    """Random numbers that ``dtype`` holds exactly, in float64."""
    return (torch.randn(shape) * scale).to(dtype).double()


def on_device(form: Callable[..., Any]) -> Callable[..., Any]:
    """``form`` on the device under test, from and to the CPU; several outputs of one shape are stacked."""

    def run(*args: Any) -> Tensor:
        out = form(*(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args))
        return (torch.stack(out) if isinstance(out, tuple) else out).cpu()

    return run


def stacked(form: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: torch.stack(form(*args))


def norm_inputs(shape: tuple[int, ...], per_image: bool, dtype: torch.dtype) -> dict[str, Any]:
    channels = shape[-1]
    return {
        "x": draw(*shape, dtype=dtype),
        "kernel": draw(*(shape[:1] if per_image else ()), channels, 3, 3, dtype=dtype),
        "bias": draw(channels, dtype=dtype),
        "weight": draw(channels, dtype=dtype),
        "shift": draw(channels, dtype=dtype),
        "eps": 1e-6,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("per_image", "dtype"), [(True, F32), (False, BF16)], ids=["per image", "static bf16"])
def test_depthwise_norm(shape: tuple[int, ...], per_image: bool, dtype: torch.dtype) -> None:
    reference = stacked(depthwise_norm_reference.depthwise_norm)
    assert_parity(on_device(ops.depthwise_norm), reference, norm_inputs(shape, per_image, dtype), dtype)


def test_depthwise_norm_static_in_float32_and_per_image_in_float16() -> None:
    reference = stacked(depthwise_norm_reference.depthwise_norm)
    assert_parity(on_device(ops.depthwise_norm), reference, norm_inputs((2, 5, 3, 48), False, F32), F32)
    assert_parity(on_device(ops.depthwise_norm), reference, norm_inputs((2, 5, 3, 48), True, F16), F16)


def test_a_small_tap_survives_beside_the_residual_in_bfloat16() -> None:
    """1 + w in bfloat16 would lose this w: x = 256 gives 256.5, which only float32 arithmetic sees."""
    x = torch.full((1, 1, 1, 16), 256.0, dtype=BF16, device=DEVICE)
    kernel = torch.zeros(16, 3, 3, dtype=BF16, device=DEVICE)
    kernel[:, 1, 1] = 2**-9
    zeros, bias = torch.zeros(16, dtype=BF16, device=DEVICE), torch.full((16,), -256.0, dtype=BF16, device=DEVICE)
    z, _ = ops.depthwise_norm(x, kernel, bias, zeros, zeros, 1e-6)
    assert (z == 0.5).all()


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_depthwise(size: int, dtype: torch.dtype) -> None:
    inputs = {"x": draw(2, 4, 7, 24, dtype=dtype), "kernel": draw(2, 24, size, size, dtype=dtype), "bias": draw(24)}
    reference = depthwise_reference.dynamic_depthwise_conv2d
    assert_parity(on_device(ops.dynamic_depthwise_conv2d), reference, inputs, dtype)


def mlp_inputs(grid: tuple[int, int, int], c: int, o: int, per_image: bool, dtype: torch.dtype) -> dict[str, Any]:
    w1 = draw(grid[0], c, o, dtype=dtype, scale=c**-0.5) if per_image else draw(o, c, dtype=dtype, scale=c**-0.5)
    return {
        "y": draw(*grid, c, dtype=dtype),
        "w1": w1,
        "b1": draw(o, dtype=dtype),
        "w2": draw(c, o, dtype=dtype, scale=o**-0.5),
        "b2": draw(c, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("grid", "c", "o", "per_image", "dtype", "approximate"),
    [
        ((2, 7, 9), 24, 96, True, F32, "none"),
        ((1, 2, 33), 192, 200, False, F32, "tanh"),
        ((5, 1, 7), 96, 40, True, BF16, "tanh"),
        ((3, 1, 1), 40, 160, False, BF16, "none"),
        ((0, 3, 3), 24, 24, True, F32, "none"),
        ((0, 3, 3), 24, 24, False, F32, "none"),
        ((1, 12, 11), 384, 144, True, F16, "none"),
    ],
    ids=str,
)
def test_mlp(grid: Any, c: int, o: int, per_image: bool, dtype: torch.dtype, approximate: str) -> None:
    """The kernel itself, also where `fused` would leave the product to cuBLAS."""

    def reference(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return mlp_reference.mlp(torch.zeros_like(y), y, w1, b1, w2, b2, None, approximate)

    inputs = mlp_inputs(grid, c, o, per_image, dtype)
    assert_parity(on_device(lambda *args: mlp_op(*args, approximate)), reference, inputs, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_mlp_with_residual_and_gate(dtype: torch.dtype) -> None:
    inputs = {"x": draw(2, 3, 4, 24, dtype=dtype), **mlp_inputs((2, 3, 4), 24, 96, True, dtype)}
    inputs["gate"] = draw(2, 1, 1, 24, dtype=dtype)

    def form(*args: Tensor) -> Tensor:
        return ops.mlp(*args[:-1], gate=args[-1])

    def reference(*args: Tensor) -> Tensor:
        return mlp_reference.mlp(*args, "none")

    assert_parity(on_device(form), reference, inputs, dtype)


def test_cublas_is_chosen_where_it_wins() -> None:
    assert fused(BF16, 192)
    assert fused(F16, 768)
    assert not fused(F32, 192)
    assert not fused(BF16, 2048)


def linear_inputs(batch: int, pooled: int, c: int, o: int, dtype: torch.dtype) -> dict[str, Any]:
    r, s = c // 4, o // 4
    return {
        "left": draw(batch, pooled, r, dtype=dtype),
        "right": draw(batch, pooled, s, dtype=dtype),
        "w1": draw(r, c),
        "w2": draw(s, o),
        "static": draw(c, o),
        "scale": c**-0.5 / (4 * pooled + 1),
    }


@pytest.mark.parametrize(
    ("batch", "pooled", "c", "o", "dtype"),
    [
        (2, 49, 24, 96, F32),
        (1, 300, 96, 200, F32),  # two chunks of tokens
        (5, 7, 40, 160, BF16),
        (2, 0, 24, 96, F32),
        (0, 9, 24, 96, F32),
        (1, 33, 384, 48, BF16),
        (1, 5, 1040, 32, F32),  # wider than the kernel's registers
    ],
    ids=str,
)
def test_linear_weight(batch: int, pooled: int, c: int, o: int, dtype: torch.dtype) -> None:
    def form(*args: Any) -> Tensor:
        left, right, *rest = args
        return ops.linear_weight(left.to(dtype), right.to(dtype), *rest)

    # The parameters are float32 in both: as under autocast.
    inputs = linear_inputs(batch, pooled, c, o, dtype)
    assert_parity(on_device(form), linear_reference.linear_weight, inputs, F32, TOLERANCE[dtype])


@pytest.mark.parametrize("lacking", [{"w1": None}, {"static": None}, {"normalize": False}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linear_weight_of_other_strategies(dtype: torch.dtype, lacking: dict[str, Any]) -> None:
    """The Gram matrix comes from the kernel, the rest from the eager form."""

    def form(left: Tensor, right: Tensor, *rest: Any) -> Tensor:
        return ops.linear_weight(left.to(dtype), right.to(dtype), *rest)

    inputs = linear_inputs(2, 300, 24, 96, dtype) | {"dtype": None, "normalize": True} | lacking
    if "w1" in lacking:
        inputs["left"] = draw(2, 300, 24, dtype=dtype)
    assert_parity(on_device(form), linear_reference.linear_weight, inputs, F32, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linear_weight_in_the_dtype_of_the_product(dtype: torch.dtype) -> None:
    inputs = linear_inputs(2, 20, 24, 96, F32)
    arguments = [a.float().to(DEVICE) if isinstance(a, Tensor) else a for a in inputs.values()]
    weight = ops.linear_weight(*arguments, dtype)
    assert weight.dtype == dtype
    assert_close(weight.cpu(), linear_reference.linear_weight(*inputs.values()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dynamic_linear(dtype: torch.dtype) -> None:
    inputs = {"x": draw(2, 36, 24, dtype=dtype), **linear_inputs(2, 9, 24, 96, dtype)}
    scale = inputs.pop("scale")
    inputs |= {"bias": draw(96), "scale": scale}
    assert_parity(on_device(ops.dynamic_linear), linear_reference.dynamic_linear, inputs, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_poolings(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = {"x": draw(*shape, dtype=dtype)}
    assert_parity(on_device(ops.pool_2x2), pooling_reference.pool_2x2, inputs, dtype)
    region_mean = on_device(lambda x: ops.region_mean(x, 3))
    assert region_mean(inputs["x"].to(dtype)).dtype == F32
    if shape[0]:  # the reference's operator takes no empty batch
        assert_parity(region_mean, lambda x: pooling_reference.region_mean(x, 3), inputs, dtype)
    else:
        assert region_mean(inputs["x"].to(dtype)).shape == (0, 3, 3, shape[3])


def test_any_strides_of_inputs_and_gradients() -> None:
    """Transposed tokens, expanded and transposed gradients: the same numbers as from contiguous ones."""

    def gradients(transpose: bool) -> list[Tensor]:
        torch.manual_seed(3)
        x, kernel, bias, weight, shift = (
            v.float().to(DEVICE) for v in list(norm_inputs((2, 5, 3, 24), True, F32).values())[:5]
        )
        w1, b1, w2, b2 = (v.float().to(DEVICE) for v in list(mlp_inputs((2, 5, 3), 24, 96, True, F32).values())[1:])
        cotangent = torch.randn(2, 5, 3, 24, device=DEVICE)
        if transpose:
            x, kernel, w1, w2, cotangent = (t.mT.contiguous().mT for t in (x, kernel, w1, w2, cotangent))
            assert not x.is_contiguous()
            assert not cotangent.is_contiguous()
        leaves = [t.requires_grad_() for t in (x, kernel, bias, weight, shift, w1, b1, w2, b2)]
        z, y = ops.depthwise_norm(x, kernel, bias, weight, shift, 1e-6)
        branch = mlp_op(y, w1, b1, w2, b2, "none")
        pooled = ops.pool_2x2(branch).sum() + ops.region_mean(z, 3).sum()  # their gradients are expanded scalars
        return torch.autograd.grad((branch, pooled), leaves, (cotangent, torch.ones_like(pooled)))

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        assert_close(actual, expected, 1e-6)


def test_images_are_independent() -> None:
    """What an image gives does not depend on its batch, to the last bit."""
    x, kernel, bias, weight, shift = (
        v.float().to(DEVICE) for v in list(norm_inputs((3, 5, 4, 24), True, F32).values())[:5]
    )
    left, right, w1, w2, static = (v.float().to(DEVICE) for v in list(linear_inputs(3, 300, 24, 96, F32).values())[:5])

    def run(chosen: slice) -> tuple[Tensor, ...]:
        z, y = ops.depthwise_norm(x[chosen], kernel[chosen], bias, weight, shift, 1e-6)
        weights = ops.linear_weight(left[chosen], right[chosen], w1, w2, static, 0.01)
        branch = mlp_op(y, weights, torch.zeros(96, device=DEVICE), w2.mT[:, :24].mT.contiguous(), bias, "none")
        return z, y, weights, branch, ops.region_mean(z, 3), ops.pool_2x2(z)

    for together, alone in zip(run(slice(0, 3)), run(slice(1, 2)), strict=True):
        assert torch.equal(together[1:2], alone)


@contextmanager
def autocast(dtype: torch.dtype):
    with torch.autocast(DEVICE, dtype):
        yield


def test_model_equals_the_reference() -> None:
    """Static and dynamic blocks, an odd grid, every gradient; in float32 and under autocast, whose gradients are of
    the parameters' dtype."""
    model = timm.create_model("weightformer_micro", depth=2, embed_dim=24).to(DEVICE)
    images = torch.randn(2, 3, 20, 12, device=DEVICE)

    def run(name: str, context: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with ops.implementation(name), context:
            out = model(images)
        out.float().square().sum().backward()
        return out.detach(), {k: p.grad for k, p in model.named_parameters()}

    expected, expected_grads = run("reference", torch.enable_grad())
    for context, tolerance in ((torch.enable_grad(), 1e-5), (autocast(BF16), 2e-2)):
        actual, grads = run("triton", context)
        assert_close(actual, expected, tolerance)
        for name, grad in expected_grads.items():
            assert grads[name].dtype == F32
            assert_close(grads[name], grad, 3 * tolerance, name)


def test_autocast_narrows_the_tokens_for_the_product_but_not_the_stream() -> None:
    x, kernel, bias, weight, shift = (
        v.float().to(DEVICE) for v in list(norm_inputs((1, 2, 3, 24), True, F32).values())[:5]
    )
    with autocast(BF16):
        z, y = ops.depthwise_norm(x, kernel, bias, weight, shift, 1e-6)
    assert (z.dtype, y.dtype) == (F32, BF16)


def opcheck_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).requires_grad_()

    x, kernel, vector = leaf(2, 3, 4, 16), leaf(2, 16, 3, 3), leaf(16)
    w1, w2 = leaf(4, 16), leaf(4, 16)
    return {
        "depthwise_norm": (depthwise_norm_op, (x, kernel, vector, vector, vector, 1e-6, BF16)),
        "static depthwise_norm": (depthwise_norm_op, (x, leaf(16, 3, 3), vector, vector, vector, 1e-6, F32)),
        "depthwise": (depthwise_op, (x, kernel, vector)),
        "mlp": (mlp_op, (x, leaf(32, 16), leaf(32), leaf(16, 32), vector, "none")),
        "mlp per image": (mlp_op, (x, leaf(2, 16, 32), leaf(32), leaf(16, 32), vector, "none")),
        "gram": (gram, (leaf(2, 6, 4), leaf(2, 6, 4))),
        "predicted_weight": (predicted_weight, (leaf(2, 4, 4), w1, w2, leaf(16, 16), 0.1, F32)),
        "pool_2x2": (pool_op, (x,)),
        "region_mean": (region_op, (x, 3)),
    }


@pytest.mark.parametrize("name", opcheck_cases())
def test_opcheck(name: str) -> None:
    operator, arguments = opcheck_cases()[name]
    torch.library.opcheck(operator, arguments)


def test_compiles_into_one_graph() -> None:
    x, kernel, bias, weight, shift = (
        v.float().to(DEVICE) for v in list(norm_inputs((2, 3, 4, 24), True, F32).values())[:5]
    )

    def function(x: Tensor) -> Tensor:
        z, y = ops.depthwise_norm(x, kernel, bias, weight, shift, 1e-6)
        return ops.pool_2x2(z + y)

    expected = function(x)  # loads the kernels, which a trace cannot
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), expected)


@triton.jit
def _offsets_kernel(out, first, height, width, C: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    image, rows, cols = triton_support.tile_of(tl.program_id(0) + first, height, width, TILE_H, TILE_W)
    offset = triton_support.token_offset(image, rows, cols, height, width, C)
    tl.store(out + tl.arange(0, TILE_H * TILE_W), offset)


@pytest.mark.parametrize("height_width", [(64, 64), (7, 9), (4096, 1)], ids=str)
def test_offsets_pass_two_to_the_31(height_width: tuple[int, int]) -> None:
    """The last tile of a batch of 2^33 values, against Python's integers."""
    (height, width), channels, tile_h, tile_w = height_width, 192, 4, 8
    images = 2**33 // (height * width * channels)
    tiles_h, tiles_w = -(-height // tile_h), -(-width // tile_w)
    last = images * tiles_h * tiles_w - 1
    out = torch.zeros(tile_h * tile_w, dtype=torch.int64, device=DEVICE)
    triton_support.launch(_offsets_kernel, 1, out, last, height, width, C=channels, TILE_H=tile_h, TILE_W=tile_w)
    top, left = (tiles_h - 1) * tile_h, (tiles_w - 1) * tile_w
    expected = [
        (((images - 1) * height + top + i) * width + left + j) * channels for i in range(tile_h) for j in range(tile_w)
    ]
    assert max(expected) > 2**32
    assert out.tolist() == expected


class Recorder:
    """Stands for a kernel: keeps the grid it is launched on, and the device guard it ran in."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.launches.append(grid)


def test_grids_have_one_axis_and_a_clear_limit() -> None:
    kernel, x = Recorder(), torch.zeros(1, device=DEVICE)
    for programs in (0, 1, 65_536, 2**31 - 1):
        triton_support.launch(kernel, programs, x)
    assert kernel.launches == [(1,), (65_536,), (2**31 - 1,)]  # the other two axes end at 65,535
    with pytest.raises(RuntimeError, match="split the batch"):
        triton_support.launch(kernel, 2**31, x)


def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Tensor] = []

    @contextmanager
    def guard(tensor: Tensor):
        inside.append(tensor)
        yield
        inside.pop()

    class Kernel(Recorder):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            self.launches.append((len(inside), inside[-1] is x))
            return lambda *args, **constants: None

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    kernel, x = Kernel(), torch.zeros(1, device=DEVICE)
    triton_support.launch(kernel, 1, x, torch.zeros(1))
    assert kernel.launches == [(1, True)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_wrong_current_device() -> None:
    inputs = [v.float().to("cuda:1") for v in list(norm_inputs((2, 5, 3, 24), True, F32).values())[:5]]
    with torch.cuda.device(0):
        z, _ = ops.depthwise_norm(*inputs, 1e-6)
    expected, _ = depthwise_norm_reference.depthwise_norm(*(v.double().cpu() for v in inputs), 1e-6)
    assert_close(z.cpu(), expected, TOLERANCE[F32])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_model_replays_as_a_cuda_graph() -> None:
    model = timm.create_model("weightformer_micro", depth=2).to(DEVICE, BF16).eval()
    images = torch.randn(2, 3, 20, 12, device=DEVICE, dtype=BF16)
    with torch.inference_mode(), ops.implementation("auto"):
        expected = model(images)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(images)
        out.zero_()
        graph.replay()
    assert torch.equal(out, expected)


def test_float64_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"take float32, bfloat16 and float16, got torch.float64"):
        ops.pool_2x2(torch.zeros(1, 2, 2, 16, dtype=torch.float64, device=DEVICE))
