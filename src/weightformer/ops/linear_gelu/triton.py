"""GPU form: the product's epilogue adds the bias and applies the GELU, so the hidden tokens are written once.

The backward saves nothing but the operands: the same kernel recomputes the product and multiplies the incoming
gradient by the GELU's derivative, which costs less than writing and reading the pre-activation. The two products that
remain are cuBLAS's. `fused` says where cuBLAS and a separate GELU win.

Suffixes: B images, N tokens, C input and O output channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.linear_gelu import eager
from weightformer.ops.triton_support import INTERPRETED, check, dot, launch, precision

__all__ = ["fused", "linear_gelu"]


@triton.jit
def _product_kernel(
    x,
    weight,
    bias,
    grad,
    out,
    tokens,
    weight_stride_b,
    weight_stride_c,
    weight_stride_o,
    C: tl.constexpr,
    O: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_o: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    blocks_n = tl.cdiv(tokens, BLOCK_N)
    # Output blocks of one strip of tokens follow each other, so that the strip is read from memory once.
    program = tl.program_id(0)
    image = (program // (blocks_o * blocks_n)).to(tl.int64)
    n = program // blocks_o % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o = program % blocks_o * BLOCK_O + tl.arange(0, BLOCK_O)
    row = image * tokens + n
    in_n, in_o = n < tokens, o < O
    acc = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    weight += image * weight_stride_b
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        in_c = c < C
        a = tl.load(x + row[:, None] * C + c[None, :], mask=in_n[:, None] & in_c[None, :], other=0.0)
        at = c.to(tl.int64)[:, None] * weight_stride_c + o[None, :] * weight_stride_o
        b = tl.load(weight + at, mask=in_c[:, None] & in_o[None, :], other=0.0)
        acc = dot(a, b, acc, PRECISION, UPCAST)
    acc += tl.load(bias + o, mask=in_o, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None] * O + o[None, :]
    mask = in_n[:, None] & in_o[None, :]
    cdf = 0.5 * (1.0 + tl.erf(acc * 0.7071067811865476))
    if DERIVATIVE:
        density = tl.exp(-0.5 * acc * acc) * 0.3989422804014327
        result = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32) * (cdf + acc * density)
    else:
        result = acc * cdf
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)


def _product(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor | None) -> Tensor:
    """``gelu(x W + b)``, or with ``grad`` the gradient before the GELU; a shared weight sees one long image."""
    shape = *x.shape[:-1], weight.shape[-1]
    if weight.ndim == 2:
        x, weight = x.reshape(1, -1, x.shape[-1]), weight[None]
    x = x.contiguous()
    batch, tokens, c = x.shape
    o = weight.shape[-1]
    out = x.new_empty(shape)
    narrow = x.dtype != torch.float32
    block_n, block_o, block_c = (128, 128, 64) if narrow else (64, 64, 32)
    launch(
        _product_kernel,
        batch * triton.cdiv(tokens, block_n) * triton.cdiv(o, block_o),
        x,
        weight,
        bias.contiguous(),
        out if grad is None else grad.contiguous(),
        out,
        tokens,
        *weight.stride(),
        C=c,
        O=o,
        DERIVATIVE=grad is not None,
        BLOCK_N=block_n,
        BLOCK_O=block_o,
        BLOCK_C=block_c,
        PRECISION=precision(x.dtype),
        UPCAST=INTERPRETED,
        num_warps=8 if narrow else 4,
        num_stages=3,
    )
    return out


@torch.library.custom_op("weightformer::linear_gelu", mutates_args=())
def _op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _product(x, weight, bias, None)


@torch.library.custom_op("weightformer::linear_gelu_backward", mutates_args=())
def _op_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _product(x, weight, bias, grad)


@_op.register_fake
def _(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[-1]))


@_op_backward.register_fake
def _(grad, x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[-1]))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, weight, bias = ctx.saved_tensors
    inner = _op_backward(grad, x, weight, bias)
    if weight.ndim == 2:
        grad_weight = x.flatten(0, -2).mT @ inner.flatten(0, -2)
    else:
        grad_weight = x.mT @ inner
    grad_bias = inner.sum(tuple(range(inner.ndim - 1)), dtype=torch.float32)
    return inner @ weight.mT, grad_weight, grad_bias.to(bias.dtype)


_op.register_autograd(_backward, setup_context=_setup_context)


def fused(dtype: torch.dtype, c: int) -> bool:
    """Whether the fused kernel is expected to beat cuBLAS followed by a GELU pass.

    The pass saved costs 4 bytes of traffic an output value in half precision, the slower product about a quarter of
    its 2 c operations: they meet near c = 1000 on an H200. In float32 the units are the scalar ones, which cuBLAS
    uses better at any c.
    """
    return dtype != torch.float32 and c <= 1024


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    check(x, weight, bias)
    if not fused(x.dtype, x.shape[-1]):
        return eager.linear_gelu(x, weight, bias)
    return _op(x, weight.to(x.dtype), bias)
