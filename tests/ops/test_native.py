"""The C++ forms. Built once here, into torch's cache; skipped where no compiler is found."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from parity import assert_parity
from weightformer import ops
from weightformer.ops import native

NO_COMPILER = shutil.which("c++") is None or shutil.which("ninja") is None

# (B, H, W, C, O): no image, one token, odd grids, widths below, between and above a panel, several blocks of rows.
SIZES = [(0, 3, 2, 8, 16), (1, 1, 1, 4, 12), (5, 3, 5, 20, 52), (2, 7, 9, 64, 256), (1, 33, 8, 40, 36)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if NO_COMPILER:
        pytest.skip("no C++ compiler or ninja")
    native.build()


@pytest.fixture(autouse=True)
def _native(_built: None):
    with ops.implementation("native"):
        yield


def block_inputs(size: tuple[int, ...], per_image: bool) -> dict[str, Tensor]:
    b, h, w, c, o = size
    torch.manual_seed(0)
    shapes = {
        "x": (b, h, w, c),
        "kernel": (b, c, 3, 3) if per_image else (c, 3, 3),
        "bias": (c,),
        "weight": (c,),
        "shift": (c,),
        "w1": (b, c, o) if per_image else (o, c),
        "b1": (o,),
        "w2": (c, o),
        "b2": (c,),
    }
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return inputs | {"w1": inputs["w1"] / c**0.5, "w2": inputs["w2"] / o**0.5}


def block(implementation: str, approximate: str = "none", gated: bool = False):
    def run(x, kernel, bias, weight, shift, w1, b1, w2, b2) -> Tensor:
        with ops.implementation(implementation):
            z, y = ops.depthwise_norm(x, kernel, bias, weight, shift, 1e-6)
            gate = torch.linspace(0, 1, len(x), dtype=x.dtype).view(-1, 1, 1, 1) if gated else None
            return ops.mlp(z, y, w1, b1, w2, b2, approximate=approximate, gate=gate)

    return run


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_reference(size: tuple[int, ...], per_image: bool, approximate: str) -> None:
    forms = (block(name, approximate) for name in ("native", "reference"))
    assert_parity(*forms, block_inputs(size, per_image), torch.float32)


def test_a_gated_branch() -> None:
    forms = (block(name, gated=True) for name in ("native", "reference"))
    assert_parity(*forms, block_inputs(SIZES[2], True), torch.float32)


@pytest.mark.parametrize("size", [(0, 2, 2, 4), (2, 7, 5, 20), (1, 12, 3, 33)], ids=str)
@pytest.mark.parametrize("k", [3, 5])
def test_depthwise(size: tuple[int, ...], k: int) -> None:
    def run(name: str):
        def form(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
            with ops.implementation(name):
                return ops.dynamic_depthwise_conv2d(x, kernel, bias)

        return form

    torch.manual_seed(0)
    shapes = {"x": size, "kernel": (size[0], size[3], k, k), "bias": (size[3],)}
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    assert_parity(run("native"), run("reference"), inputs, torch.float32)


def test_activations_over_their_whole_range() -> None:
    y = torch.linspace(-12, 12, 20000).view(1, -1, 1, 1)
    one, zero = torch.ones(1, 1), torch.zeros(1)
    for form in ("none", "tanh"):
        out = ops.mlp(torch.zeros_like(y), y, one, zero, one, zero, approximate=form)
        expected = torch.nn.functional.gelu(y.double(), approximate=form)
        assert (out - expected).abs().max() < 2e-6
    nan = torch.full((1, 1, 1, 1), float("nan"))
    assert ops.mlp(torch.zeros_like(nan), nan, one, zero, one, zero).isnan().all()


@pytest.mark.parametrize("per_image", [False, True], ids=["shared", "per_image"])
def test_opcheck(per_image: bool) -> None:
    inputs = {name: t.float().requires_grad_() for name, t in block_inputs(SIZES[2], per_image).items()}
    x, kernel, bias, weight, shift, w1, b1, w2, b2 = inputs.values()
    registered = torch.ops.weightformer_native
    torch.library.opcheck(registered.depthwise.default, (x, kernel, bias, True))
    torch.library.opcheck(registered.depthwise_kernel_grad.default, (x.detach(), x.detach(), 3))
    torch.library.opcheck(registered.depthwise_norm.default, (x, kernel, bias, weight, shift, 1e-6))
    groups = w1.detach() if per_image else w1.detach().mT[None]
    tokens = x.detach().flatten(1, 2) if per_image else x.detach().reshape(1, -1, x.shape[-1])
    args = (tokens.requires_grad_(), tokens.detach().clone().requires_grad_(), groups.requires_grad_(), b1, w2, b2)
    torch.library.opcheck(registered.mlp.default, (*args, False, True))


def test_what_it_does_not_compute_raises_when_asked_by_name_and_falls_back_by_itself() -> None:
    inputs = block_inputs(SIZES[2], True)
    with pytest.raises(RuntimeError, match=r"float32 on the CPU without autocast, got torch.float64"):
        block("native")(*inputs.values())
    assert torch.equal(block("auto")(*inputs.values()), block("eager")(*inputs.values()))
    single = [t.float() for t in inputs.values()]
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="without autocast"):
            block("native")(*single)
        assert torch.equal(block("auto")(*single), block("eager")(*single))


def test_auto_takes_it_once_built() -> None:
    single = [t.float() for t in block_inputs(SIZES[3], True).values()]
    assert torch.equal(block("auto")(*single), block("native")(*single))
    assert not torch.equal(block("eager")(*single), block("native")(*single))


def test_asked_for_before_it_is_built() -> None:
    code = (
        "import torch; from weightformer import ops\n"
        "with ops.implementation('native'):\n"
        "    ops.dynamic_depthwise_conv2d(torch.ones(1, 2, 2, 3), torch.ones(1, 3, 3, 3), torch.ones(3))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "call weightformer.ops.native.build() first" in result.stderr
