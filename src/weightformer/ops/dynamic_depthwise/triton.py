"""GPU kernels of the depthwise convolution, alone or with what follows it in a block (loaded on demand).

Forward: one pass reads the tokens and writes ``z = residual + conv + bias`` and, if asked, its LayerNorm.
Backward of the convolution: one pass reads the output's gradient around each token once, for both the gradient of the
tokens and that of the kernel, whose partial sums (one a tile) are added afterwards: no atomics, so it is deterministic.

All arithmetic is float32. Suffixes: B images, H x W tokens, C channels, K kernel side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.triton_support import check, launch, pad_channels, tile_of, token_offset

__all__ = ["convolve", "convolve_backward", "dynamic_depthwise_conv2d"]


@triton.jit(do_not_specialize=["height", "width"])
def _forward_kernel(
    x,
    taps,  # (B or 1, K, K, C)
    bias,
    norm_weight,
    norm_bias,
    z,
    normed,
    height,
    width,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    K: tl.constexpr,
    PER_IMAGE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):
    image, rows, cols = tile_of(tl.program_id(0), height, width, TILE_H, TILE_W)
    c = tl.arange(0, BLOCK_C)
    in_c = c < C
    acc = tl.zeros((TILE_H * TILE_W, BLOCK_C), tl.float32)
    acc += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if PER_IMAGE:
        taps += image.to(tl.int64) * (K * K * C)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            row = rows + (i - K // 2)
            col = cols + (j - K // 2)
            inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
            offset = token_offset(image, row, col, height, width, C)
            value = tl.load(x + offset[:, None] + c[None, :], mask=inside[:, None] & in_c[None, :], other=0.0)
            value = value.to(tl.float32)
            tap = tl.load(taps + (i * K + j) * C + c, mask=in_c, other=0.0).to(tl.float32)
            acc += value * tap[None, :]
            if RESIDUAL and i == K // 2 and j == K // 2:
                acc += value  # on its own: 1 + tap would round the tap away
    offset = token_offset(image, rows, cols, height, width, C)[:, None] + c[None, :]
    mask = ((rows < height) & (cols < width))[:, None] & in_c[None, :]
    rounded = acc.to(z.dtype.element_ty)
    tl.store(z + offset, rounded, mask=mask)
    if NORM:
        s = rounded.to(tl.float32)
        mean = tl.sum(s, axis=1) / C
        centred = tl.where(in_c[None, :], s - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)
        weight = tl.load(norm_weight + c, mask=in_c, other=0.0).to(tl.float32)
        shift = tl.load(norm_bias + c, mask=in_c, other=0.0).to(tl.float32)
        y = centred * rstd[:, None] * weight[None, :] + shift[None, :]
        tl.store(normed + offset, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["height", "width"])
def _backward_kernel(
    grad,  # of the convolution's output
    x,
    taps,
    grad_x,
    partial,  # (tiles, K, K, C): each tile's sum for the kernel's gradient
    height,
    width,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    K: tl.constexpr,
    PER_IMAGE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):
    blocks_c: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0) // blocks_c
    c = tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < C
    image, rows, cols = tile_of(tile, height, width, TILE_H, TILE_W)
    if PER_IMAGE:
        taps += image.to(tl.int64) * (K * K * C)
    partial += tile.to(tl.int64) * (K * K * C)
    offset_x = token_offset(image, rows, cols, height, width, C)[:, None] + c[None, :]
    mask_x = ((rows < height) & (cols < width))[:, None] & in_c[None, :]
    value = tl.load(x + offset_x, mask=mask_x, other=0.0).to(tl.float32)
    acc = tl.zeros((TILE_H * TILE_W, BLOCK_C), tl.float32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            row = rows - (i - K // 2)
            col = cols - (j - K // 2)
            inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
            offset = token_offset(image, row, col, height, width, C)
            g = tl.load(grad + offset[:, None] + c[None, :], mask=inside[:, None] & in_c[None, :], other=0.0)
            g = g.to(tl.float32)
            tap = tl.load(taps + (i * K + j) * C + c, mask=in_c, other=0.0).to(tl.float32)
            acc += g * tap[None, :]
            if RESIDUAL and i == K // 2 and j == K // 2:
                acc += g
            tl.store(partial + (i * K + j) * C + c, tl.sum(g * value, axis=0), mask=in_c)
    tl.store(grad_x + offset_x, acc.to(grad_x.dtype.element_ty), mask=mask_x)


def _tiles(x: Tensor, tile_h: int, tile_w: int) -> int:
    batch, height, width, _ = x.shape
    return batch * triton.cdiv(height, tile_h) * triton.cdiv(width, tile_w)


def _tile_shape(block_c: int) -> tuple[int, int]:
    """Tokens a program of the forward kernel, near a square: 16 values a thread, which spills at no width."""
    tokens = min(64, max(1, 4096 // block_c))
    tile_h = 2 ** ((tokens.bit_length() - 1) // 2)
    return tile_h, tokens // tile_h


def _taps(kernel: Tensor) -> Tensor:
    """(B, C, K, K) or (C, K, K) to channels-last taps, without a copy if the predictor laid them out so."""
    return kernel.movedim(-3, -1).contiguous()


def convolve(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor,
    norm: tuple[Tensor, Tensor, float, torch.dtype] | None = None,
    *,
    residual: bool,
) -> tuple[Tensor, Tensor]:
    """The forward kernel: (x + conv(x)) or conv(x), and its LayerNorm if ``norm`` gives (weight, bias, eps, dtype)."""
    x = x.contiguous()
    _, height, width, channels = x.shape
    z = torch.empty_like(x)
    normed = torch.empty_like(x, dtype=norm[3]) if norm else z
    norm_weight, norm_bias, eps, _ = norm or (bias, bias, 0.0, None)
    block_c = pad_channels(channels)
    tile_h, tile_w = _tile_shape(block_c)
    launch(
        _forward_kernel,
        _tiles(x, tile_h, tile_w),
        x,
        _taps(kernel),
        bias.contiguous(),
        norm_weight.contiguous(),
        norm_bias.contiguous(),
        z,
        normed,
        height,
        width,
        eps,
        C=channels,
        BLOCK_C=block_c,
        K=kernel.shape[-1],
        PER_IMAGE=kernel.ndim == 4,
        RESIDUAL=residual,
        NORM=norm is not None,
        TILE_H=tile_h,
        TILE_W=tile_w,
        num_warps=8,
    )
    return z, normed


def convolve_backward(grad: Tensor, x: Tensor, kernel: Tensor, *, residual: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the kernel, in the dtypes of both."""
    grad, x = grad.contiguous(), x.contiguous()
    batch, height, width, channels = x.shape
    size, per_image = kernel.shape[-1], kernel.ndim == 4
    tile_h, tile_w = 8, 16
    block_c = min(32, pad_channels(channels))
    tiles = _tiles(x, tile_h, tile_w)
    grad_x = torch.empty_like(x)
    partial = x.new_empty(tiles, size, size, channels, dtype=torch.float32)
    launch(
        _backward_kernel,
        tiles * triton.cdiv(channels, block_c),
        grad,
        x,
        _taps(kernel),
        grad_x,
        partial,
        height,
        width,
        C=channels,
        BLOCK_C=block_c,
        K=size,
        PER_IMAGE=per_image,
        RESIDUAL=residual,
        TILE_H=tile_h,
        TILE_W=tile_w,
        num_warps=8,
    )
    if per_image:
        partial = partial.view(batch, tiles // max(batch, 1), size, size, channels)
    grad_taps = partial.sum(1 if per_image else 0)
    return grad_x, grad_taps.movedim(-1, -3).to(kernel.dtype)


@torch.library.custom_op("weightformer::depthwise", mutates_args=())
def _depthwise(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return convolve(x, kernel, bias, residual=False)[0]


@torch.library.custom_op("weightformer::depthwise_backward", mutates_args=())
def _depthwise_backward(grad: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    return convolve_backward(grad, x, kernel, residual=False)


@_depthwise.register_fake
def _(x, kernel, bias):
    return x.new_empty(x.shape)


@_depthwise_backward.register_fake
def _(grad, x, kernel):
    return x.new_empty(x.shape), _grad_kernel_like(kernel)


def _grad_kernel_like(kernel: Tensor) -> Tensor:
    """What `convolve_backward` returns for the kernel: channels innermost in memory."""
    return kernel.new_empty((*kernel.shape[:-3], *kernel.shape[-2:], kernel.shape[-3])).movedim(-1, -3)


def _setup_context(ctx, inputs, output):
    x, kernel, bias = inputs
    ctx.save_for_backward(x, kernel)
    ctx.bias_dtype = bias.dtype


def _backward(ctx, grad):
    grad_x, grad_kernel = _depthwise_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_kernel, grad.sum((0, 1, 2), dtype=torch.float32).to(ctx.bias_dtype)


_depthwise.register_autograd(_backward, setup_context=_setup_context)


def dynamic_depthwise_conv2d(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    check(x, kernel, bias)
    return _depthwise(x, kernel, bias)
