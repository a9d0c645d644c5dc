"""GPU form: one forward kernel, and two in the backward (LayerNorm, then convolution); loaded on demand.

The backward keeps the two token tensors that exist anyway, the input and z, and recomputes the rest: mean and
deviation of a token come from the row that its gradient needs in any case. Suffixes: C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.dynamic_depthwise.triton import _grad_kernel_like, convolve, convolve_backward
from weightformer.ops.precision import autocasting
from weightformer.ops.triton_support import check, launch, pad_channels

__all__ = ["depthwise_norm"]


@triton.jit(do_not_specialize=["tokens", "steps"])
def _norm_backward_kernel(
    z,
    weight,
    grad_z,
    grad_normed,
    grad_sum,  # of z, from both its uses
    partial,  # (programs, 3, C): sums for weight, shift and the convolution's bias
    tokens,
    steps,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    in_c = c < C
    weight = tl.load(weight + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    sum_weight = tl.zeros((ROWS, BLOCK_C), tl.float32)
    sum_shift = tl.zeros((ROWS, BLOCK_C), tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for step in range(steps):
        row = (program.to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < tokens)[:, None] & in_c[None, :]
        offset = row[:, None] * C + c[None, :]
        s = tl.load(z + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad_normed + offset, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(s, axis=1) / C
        centred = tl.where(in_c[None, :], s - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)[:, None]
        unit = centred * rstd
        weighted = g * weight
        along_one = tl.sum(weighted, axis=1)[:, None] / C
        along_unit = tl.sum(weighted * unit, axis=1)[:, None] / C
        total = (weighted - along_one - unit * along_unit) * rstd
        total += tl.load(grad_z + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_sum + offset, total.to(grad_sum.dtype.element_ty), mask=mask)
        sum_weight += g * unit
        sum_shift += g
        sum_bias += tl.where(mask, total, 0.0)
    partial += program.to(tl.int64) * (3 * C) + c
    tl.store(partial, tl.sum(sum_weight, axis=0), mask=in_c)
    tl.store(partial + C, tl.sum(sum_shift, axis=0), mask=in_c)
    tl.store(partial + 2 * C, tl.sum(sum_bias, axis=0), mask=in_c)


@torch.library.custom_op("weightformer::depthwise_norm", mutates_args=())
def _op(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return convolve(x, kernel, bias, (weight, shift, eps, dtype), residual=True)


@torch.library.custom_op("weightformer::depthwise_norm_backward", mutates_args=())
def _op_backward(
    grad_z: Tensor,
    grad_normed: Tensor,
    x: Tensor,
    kernel: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.shape[-1]
    tokens = z.numel() // max(channels, 1)
    block_c = pad_channels(channels)
    rows = max(1, 2048 // block_c)
    steps = min(32, triton.cdiv(tokens, rows * 1024)) or 1
    programs = triton.cdiv(tokens, rows * steps)
    grad_sum = torch.empty_like(z)
    partial = x.new_empty(programs, 3, channels, dtype=torch.float32)
    launch(
        _norm_backward_kernel,
        programs,
        z,
        weight.contiguous(),
        grad_z.contiguous(),
        grad_normed.contiguous(),
        grad_sum,
        partial,
        tokens,
        steps,
        eps,
        C=channels,
        BLOCK_C=block_c,
        ROWS=rows,
        num_warps=4,
    )
    grad_x, grad_kernel = convolve_backward(grad_sum, x, kernel, residual=True)
    return grad_x, grad_kernel, partial.sum(0)


@_op.register_fake
def _(x, kernel, bias, weight, shift, eps, dtype):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype)


@_op_backward.register_fake
def _(grad_z, grad_normed, x, kernel, z, weight, eps):
    return x.new_empty(x.shape), _grad_kernel_like(kernel), x.new_empty(3, x.shape[-1], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    x, kernel, bias, weight, shift, ctx.eps, _ = inputs
    ctx.save_for_backward(x, kernel, output[0], weight)
    ctx.dtypes = weight.dtype, shift.dtype, bias.dtype


def _backward(ctx, grad_z, grad_normed):
    grad_x, grad_kernel, vectors = _op_backward(grad_z, grad_normed, *ctx.saved_tensors, ctx.eps)
    weight, shift, bias = (vector.to(dtype) for vector, dtype in zip(vectors, ctx.dtypes, strict=True))
    return grad_x, grad_kernel, bias, weight, shift, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


def depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    check(x, kernel, bias, weight, shift)
    # A product follows the norm: under autocast its tokens are written as narrow as the product wants them.
    dtype = torch.get_autocast_dtype(x.device.type) if autocasting(x) else x.dtype
    return _op(x, kernel, bias, weight, shift, eps, dtype)
