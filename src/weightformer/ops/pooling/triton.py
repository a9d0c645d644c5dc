"""GPU forms of the two poolings: each token is read once and the sums are float32 (loaded on demand).

`region_mean` averages along the rows, then with the same kernel along the columns of what remains. Its backward writes
each token once, from the regions that hold it: no atomics, so it is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.triton_support import check, launch, pad_channels, token_offset

__all__ = ["pool_2x2", "region_mean"]


@triton.jit(do_not_specialize=["height", "width", "tokens"])
def _pool_kernel(x, pooled, height, width, tokens, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_C)
    mask = (token < tokens)[:, None] & (c < C)[None, :]
    col = token % (width // 2) * 2
    row = token // (width // 2) % (height // 2) * 2
    image = token // (width // 2) // (height // 2)
    acc = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            offset = token_offset(image, row + i, col + j, height, width, C)
            acc += tl.load(x + offset[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(pooled + token[:, None] * C + c[None, :], (acc * 0.25).to(pooled.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["height", "width", "tokens"])
def _pool_backward_kernel(
    grad, grad_x, height, width, tokens, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_C)
    mask = (token < tokens)[:, None] & (c < C)[None, :]
    col = token % width // 2
    row = token // width % height // 2
    image = token // width // height
    paired = ((row < height // 2) & (col < width // 2))[:, None]
    offset = token_offset(image, row, col, height // 2, width // 2, C)
    g = tl.load(grad + offset[:, None] + c[None, :], mask=mask & paired, other=0.0).to(tl.float32)
    tl.store(grad_x + token[:, None] * C + c[None, :], (g * 0.25).to(grad_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _interval_mean_kernel(
    x,  # (lines, length, C)
    means,  # (lines, K, C)
    length,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEP: tl.constexpr,
):
    blocks_c: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    c = program % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < C
    i = program // blocks_c % K
    line = (program // (blocks_c * K)).to(tl.int64)
    start = i * length // K
    end = ((i + 1) * length + K - 1) // K
    acc = tl.zeros((STEP, BLOCK_C), tl.float32)
    for first in range(start, end, STEP):
        position = first + tl.arange(0, STEP)
        mask = (position < end)[:, None] & in_c[None, :]
        acc += tl.load(x + (line * length + position)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(means + (line * K + i) * C + c, tl.sum(acc, axis=0) / (end - start), mask=in_c)


@triton.jit(do_not_specialize=["height", "width", "tokens"])
def _region_backward_kernel(
    grad,  # (B, K, K, C)
    grad_x,
    height,
    width,
    tokens,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_C)
    mask = (token < tokens)[:, None] & (c < C)[None, :]
    col = token % width
    row = token // width % height
    image = token // width // height
    acc = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for i in tl.static_range(K):
        top = i * height // K
        bottom = ((i + 1) * height + K - 1) // K
        for j in tl.static_range(K):
            left = j * width // K
            right = ((j + 1) * width + K - 1) // K
            inside = (row >= top) & (row < bottom) & (col >= left) & (col < right)
            offset = ((image * K + i) * K + j) * C
            g = tl.load(grad + offset[:, None] + c[None, :], mask=mask & inside[:, None], other=0.0)
            acc += g / ((bottom - top) * (right - left))
    tl.store(grad_x + token[:, None] * C + c[None, :], acc.to(grad_x.dtype.element_ty), mask=mask)


def _blocks(channels: int) -> tuple[int, int]:
    """Channels and tokens of a program."""
    block_c = pad_channels(channels)
    return block_c, max(1, min(64, 4096 // block_c))


@torch.library.custom_op("weightformer::pool_2x2", mutates_args=())
def _pool_2x2(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    pooled = x.new_empty(batch, height // 2, width // 2, channels)
    tokens = batch * (height // 2) * (width // 2)
    block_c, rows = _blocks(channels)
    programs = triton.cdiv(tokens, rows)
    launch(
        _pool_kernel, programs, x.contiguous(), pooled, height, width, tokens, C=channels, BLOCK_C=block_c, ROWS=rows
    )
    return pooled


@torch.library.custom_op("weightformer::pool_2x2_backward", mutates_args=())
def _pool_2x2_backward(grad: Tensor, height: int, width: int) -> Tensor:
    batch, _, _, channels = grad.shape
    grad_x = grad.new_empty(batch, height, width, channels)
    tokens = batch * height * width
    block_c, rows = _blocks(channels)
    programs = triton.cdiv(tokens, rows)
    grad = grad.contiguous()
    launch(_pool_backward_kernel, programs, grad, grad_x, height, width, tokens, C=channels, BLOCK_C=block_c, ROWS=rows)
    return grad_x


@_pool_2x2.register_fake
def _(x):
    batch, height, width, channels = x.shape
    return x.new_empty(batch, height // 2, width // 2, channels)


@_pool_2x2_backward.register_fake
def _(grad, height, width):
    return grad.new_empty(grad.shape[0], height, width, grad.shape[3])


def _pool_setup(ctx, inputs, output):
    ctx.height, ctx.width = inputs[0].shape[1:3]


def _pool_backward(ctx, grad):
    return _pool_2x2_backward(grad, ctx.height, ctx.width)


_pool_2x2.register_autograd(_pool_backward, setup_context=_pool_setup)


def _interval_means(x: Tensor, size: int) -> Tensor:
    """Means of (lines, length, C) over ``size`` intervals of each line, in float32."""
    lines, length, channels = x.shape
    means = x.new_empty(lines, size, channels, dtype=torch.float32)
    block_c = min(128, pad_channels(channels))
    programs = lines * size * triton.cdiv(channels, block_c)
    launch(_interval_mean_kernel, programs, x, means, length, K=size, C=channels, BLOCK_C=block_c, STEP=16)
    return means


@torch.library.custom_op("weightformer::region_mean", mutates_args=())
def _region_mean(x: Tensor, size: int) -> Tensor:
    batch, height, width, channels = x.shape
    columns = _interval_means(x.contiguous().view(batch * height, width, channels), size)
    return _interval_means(columns.view(batch, height, size * channels), size).view(batch, size, size, channels)


@torch.library.custom_op("weightformer::region_mean_backward", mutates_args=())
def _region_mean_backward(grad: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    batch, size, _, channels = grad.shape
    grad_x = grad.new_empty(batch, height, width, channels, dtype=dtype)
    tokens = batch * height * width
    block_c, rows = _blocks(channels)
    launch(
        _region_backward_kernel,
        triton.cdiv(tokens, rows),
        grad.contiguous(),
        grad_x,
        height,
        width,
        tokens,
        K=size,
        C=channels,
        BLOCK_C=block_c,
        ROWS=rows,
    )
    return grad_x


@_region_mean.register_fake
def _(x, size):
    return x.new_empty(x.shape[0], size, size, x.shape[3], dtype=torch.float32)


@_region_mean_backward.register_fake
def _(grad, height, width, dtype):
    return grad.new_empty(grad.shape[0], height, width, grad.shape[3], dtype=dtype)


def _region_setup(ctx, inputs, output):
    ctx.height, ctx.width = inputs[0].shape[1:3]
    ctx.dtype = inputs[0].dtype


def _region_backward(ctx, grad):
    return _region_mean_backward(grad, ctx.height, ctx.width, ctx.dtype), None


_region_mean.register_autograd(_region_backward, setup_context=_region_setup)


def pool_2x2(x: Tensor) -> Tensor:
    check(x)
    return _pool_2x2(x)


def region_mean(x: Tensor, size: int) -> Tensor:
    check(x)
    return _region_mean(x, size)
