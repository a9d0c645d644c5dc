from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity import assert_close, assert_parity
from weightformer import ops

GRIDS = [(2, 2), (3, 5), (7, 4), (1, 6), (14, 13)]


def grid_id(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def pool_2x2_loop(x: Tensor) -> Tensor:
    """The mean of each pair of rows and columns, one token at a time."""
    batch, height, width, channels = x.shape
    out = x.new_zeros(batch, height // 2, width // 2, channels)
    for i in range(height // 2):
        for j in range(width // 2):
            out[:, i, j] = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((1, 2))
    return out


def region_mean_loop(x: Tensor, size: int) -> Tensor:
    """The mean of each region as the docstring bounds it."""
    _, height, width, _ = x.shape
    rows = [(i * height // size, -(-(i + 1) * height // size)) for i in range(size)]
    cols = [(j * width // size, -(-(j + 1) * width // size)) for j in range(size)]
    return torch.stack([torch.stack([x[:, a:b, c:d].mean((1, 2)) for c, d in cols], 1) for a, b in rows], 1)


@pytest.mark.parametrize("grid", [g for g in GRIDS if min(g) > 1], ids=grid_id)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_pool_2x2_parity(grid: tuple[int, int], dtype: torch.dtype) -> None:
    assert_parity(ops.pool_2x2, pool_2x2_loop, {"x": torch.randn(2, *grid, 3)}, dtype)


@pytest.mark.parametrize("shape", [(2, 1, 5, 3), (2, 5, 1, 3), (2, 1, 1, 3), (0, 4, 4, 3)])
def test_pool_2x2_without_pairs_is_empty(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    out = ops.pool_2x2(x)
    assert out.shape == (shape[0], shape[1] // 2, shape[2] // 2, shape[3])
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(shape))


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=grid_id)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["reference", "eager"])
def test_region_mean_parity(name: str, grid: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    with ops.implementation(name):
        inputs = {"x": torch.randn(2, *grid, 3), "size": size}
        assert_parity(ops.region_mean, region_mean_loop, inputs, dtype)


def test_region_mean_equals_adaptive_pooling_at_every_size() -> None:
    image = torch.randn(1, 40, 40, 2)
    for height in range(1, 41):
        for width in range(1, 41):
            x = image[:, :height, :width]
            expected = F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 3).permute(0, 2, 3, 1)
            torch.testing.assert_close(ops.region_mean(x, 3), expected, rtol=0, atol=1e-6, msg=f"{height} x {width}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_region_mean_sums_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(1, 150, 151, 4) + 8).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = ops.region_mean(x, 3)
    assert out.dtype == torch.float32
    assert_close(out, region_mean_loop(x.double(), 3), 1e-6)


def test_region_mean_is_deterministic() -> None:
    x = torch.randn(3, 14, 11, 8, requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        out = ops.region_mean(x, 3)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    for first, second in zip(step(), step(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("pool", [ops.pool_2x2, lambda x: ops.region_mean(x, 3)], ids=["pool_2x2", "region_mean"])
def test_pools_take_any_layout_and_keep_images_apart(pool) -> None:
    x = torch.randn(3, 9, 6, 8)
    expected = pool(x)
    channels_first = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    sliced = torch.stack([x, x], -1).flatten(3)[..., ::2]
    assert_close(pool(channels_first), expected, 1e-6)
    assert_close(pool(sliced), expected, 1e-6)
    assert_close(torch.cat([pool(image[None]) for image in x]), expected, 1e-6)

    changed = x.clone()
    changed[1] += 1
    out = pool(changed)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert not torch.equal(out[1], expected[1])


def swapped_axes(x: Tensor, size: int) -> Tensor:
    return region_mean_loop(x.transpose(1, 2), size)


def disjoint_regions(x: Tensor, size: int) -> Tensor:
    height = x.shape[1]
    edges = [(i * height // size, (i + 1) * height // size) for i in range(size)]
    return torch.stack([region_mean_loop(x[:, a:b], size)[:, 1] for a, b in edges], 1)


@pytest.mark.parametrize("fault", [swapped_axes, disjoint_regions], ids=lambda f: f.__name__)
def test_a_planted_fault_is_seen(fault) -> None:
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_parity(fault, region_mean_loop, {"x": torch.randn(2, 7, 5, 3), "size": 3}, torch.float32)


def test_new_memory_holds_nan() -> None:
    x = torch.zeros(2)
    for fresh in (torch.empty(2), torch.empty_like(x), x.new_empty(2), torch.empty(2, dtype=torch.bfloat16)):
        assert fresh.isnan().all()  # so an output that an op leaves partly unwritten cannot pass a parity test
