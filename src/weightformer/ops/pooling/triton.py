"""GPU forms of the two poolings: each token is read once and the sums are float32 (loaded on demand).

`region_mean` averages every row over its column regions in the kernel; the few rows that remain are combined by one
small product. Its backward writes each token once, from the regions that hold it: no atomics, so it is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.pooling.eager import interval_matrix
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


@triton.jit(do_not_specialize=["width"])
def _region_kernel(x, means, width, K: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of all images
    c = tl.arange(0, BLOCK_C)
    in_c = c < C
    for j in tl.static_range(K):
        start = j * width // K
        end = ((j + 1) * width + K - 1) // K
        acc = tl.zeros((COLS, BLOCK_C), tl.float32)
        for first in range(start, end, COLS):
            col = first + tl.arange(0, COLS)
            mask = (col < end)[:, None] & in_c[None, :]
            acc += tl.load(x + (row * width + col)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(acc, axis=0) / (end - start)
        tl.store(means + (row * K + j) * C + c, mean, mask=in_c)


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
    launch(
        _pool_backward_kernel, programs, grad, grad_x, height, width, tokens, C=channels, BLOCK_C=block_c, ROWS=rows
    )
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


@torch.library.custom_op("weightformer::region_mean", mutates_args=())
def _region_mean(x: Tensor, size: int) -> Tensor:
    batch, height, width, channels = x.shape
    means = x.new_empty(batch, height, size * channels, dtype=torch.float32)
    block_c, cols = _blocks(channels)
    launch(
        _region_kernel,
        batch * height,
        x.contiguous(),
        means,
        width,
        K=size,
        C=channels,
        BLOCK_C=block_c,
        COLS=min(cols, 16),
    )
    return (interval_matrix(height, size, means) @ means).view(batch, size, size, channels)


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
