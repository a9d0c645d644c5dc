"""GPU form: the first product's epilogue adds the bias and applies the GELU (loaded on demand).

So the hidden layer, four times as wide as the tokens, is written once and read once. The backward keeps nothing but the
operands: the same kernel recomputes the product and writes both what the second product's gradients need, the hidden
layer and the gradient before the GELU. The other products are cuBLAS's, and `fused` says where all of them are.

Suffixes: G groups of tokens with one first weight each (one group, or one an image), M tokens of a group, C channels,
O hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.mlp import reference
from weightformer.ops.precision import autocast
from weightformer.ops.triton_support import INTERPRETED, check, dot, launch, precision

__all__ = ["fused", "mlp"]


@triton.jit
def _product_kernel(
    y,
    weight,
    bias,
    grad_hidden,
    hidden,
    grad_inner,
    tokens,
    weight_stride_b,
    weight_stride_c,
    weight_stride_o,
    C: tl.constexpr,
    O: tl.constexpr,
    TANH: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_o: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    blocks_m = tl.cdiv(tokens, BLOCK_M)
    # Output blocks of one strip of tokens follow each other, so that the strip is read from memory once.
    program = tl.program_id(0)
    group = (program // (blocks_o * blocks_m)).to(tl.int64)
    m = program // blocks_o % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o = program % blocks_o * BLOCK_O + tl.arange(0, BLOCK_O)
    row = group * tokens + m
    in_m, in_o = m < tokens, o < O
    acc = tl.zeros((BLOCK_M, BLOCK_O), tl.float32)
    weight += group * weight_stride_b
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        in_c = c < C
        a = tl.load(y + row[:, None] * C + c[None, :], mask=in_m[:, None] & in_c[None, :], other=0.0)
        at = c.to(tl.int64)[:, None] * weight_stride_c + o[None, :] * weight_stride_o
        b = tl.load(weight + at, mask=in_c[:, None] & in_o[None, :], other=0.0)
        acc = dot(a, b, acc, PRECISION, UPCAST)
    acc += tl.load(bias + o, mask=in_o, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None] * O + o[None, :]
    mask = in_m[:, None] & in_o[None, :]
    if TANH:
        inner = 0.7978845608028654 * acc * (1.0 + 0.044715 * acc * acc)
        cdf = tl.sigmoid(2.0 * inner)
    else:
        cdf = 0.5 * (1.0 + tl.erf(acc * 0.7071067811865476))
    tl.store(hidden + offset, (acc * cdf).to(hidden.dtype.element_ty), mask=mask)
    if BACKWARD:
        if TANH:
            density = cdf * (1.0 - cdf) * 1.5957691216057308 * (1.0 + 0.134145 * acc * acc)
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * acc * acc)
        grad = tl.load(grad_hidden + offset, mask=mask, other=0.0).to(tl.float32) * (cdf + acc * density)
        tl.store(grad_inner + offset, grad.to(grad_inner.dtype.element_ty), mask=mask)


def _hidden(
    y_GMC: Tensor, w1_GCO: Tensor, b1: Tensor, approximate: str, grad_GMO: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The hidden layer, and with its gradient the gradient before the GELU (else the hidden layer again)."""
    groups, tokens, c = y_GMC.shape
    o = w1_GCO.shape[-1]
    hidden_GMO = y_GMC.new_empty(groups, tokens, o)
    grad_inner_GMO = hidden_GMO if grad_GMO is None else torch.empty_like(hidden_GMO)
    narrow = y_GMC.dtype != torch.float32
    # The backward holds the gradient and the two factors of the derivative beside the product: half as wide.
    block_m, block_o, block_c = (128, 128 if grad_GMO is None else 64, 64) if narrow else (64, 64, 32)
    launch(
        _product_kernel,
        groups * triton.cdiv(tokens, block_m) * triton.cdiv(o, block_o),
        y_GMC,
        w1_GCO,
        b1,
        hidden_GMO if grad_GMO is None else grad_GMO,
        hidden_GMO,
        grad_inner_GMO,
        tokens,
        *w1_GCO.stride(),
        C=c,
        O=o,
        TANH=approximate == "tanh",
        BACKWARD=grad_GMO is not None,
        BLOCK_M=block_m,
        BLOCK_O=block_o,
        BLOCK_C=block_c,
        PRECISION=precision(y_GMC.dtype),
        UPCAST=INTERPRETED,
        num_warps=8 if narrow else 4,
        num_stages=3,
    )
    return hidden_GMO, grad_inner_GMO


def _groups(y: Tensor, w1: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and first weight as (G, M, C) and (G, C, O); a shared weight sees one long image."""
    w1 = w1.to(y.dtype)
    if w1.ndim == 2:
        return y.reshape(1, -1, y.shape[-1]), w1.mT[None]
    return y.reshape(len(y), y.shape[1] * y.shape[2], y.shape[3]), w1


@torch.library.custom_op("weightformer::mlp_branch", mutates_args=())
def _branch(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, approximate: str) -> Tensor:
    y_GMC, w1_GCO = _groups(y.contiguous(), w1)
    hidden_GMO, _ = _hidden(y_GMC, w1_GCO, b1.contiguous(), approximate)
    return F.linear(hidden_GMO, w2.to(y.dtype), b2.to(y.dtype)).view(y.shape)


@torch.library.custom_op("weightformer::mlp_branch_backward", mutates_args=())
def _branch_backward(
    grad: Tensor, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, approximate: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y_GMC, w1_GCO = _groups(y.contiguous(), w1)
    grad_GMC = grad.reshape(y_GMC.shape)
    grad_hidden_GMO = grad_GMC @ w2.to(y.dtype)
    hidden_GMO, grad_inner_GMO = _hidden(y_GMC, w1_GCO, b1.contiguous(), approximate, grad_hidden_GMO)
    del grad_hidden_GMO
    grad_w2 = grad_GMC.flatten(0, 1).mT @ hidden_GMO.flatten(0, 1)
    del hidden_GMO
    grad_y = (grad_inner_GMO @ w1_GCO.mT).view(y.shape)
    grad_w1 = grad_inner_GMO[0].mT @ y_GMC[0] if w1.ndim == 2 else y_GMC.mT @ grad_inner_GMO
    grad_b1 = grad_inner_GMO.sum((0, 1), dtype=torch.float32)
    grad_b2 = grad_GMC.sum((0, 1), dtype=torch.float32)
    return grad_y, grad_w1.to(w1.dtype), grad_b1, grad_w2.to(w2.dtype), grad_b2


@_branch.register_fake
def _(y, w1, b1, w2, b2, approximate):
    return y.new_empty(y.shape)


@_branch_backward.register_fake
def _(grad, y, w1, b1, w2, approximate):
    grad_b1, grad_b2 = (y.new_empty(b.shape[:1], dtype=torch.float32) for b in (b1, w2))
    return y.new_empty(y.shape), w1.new_empty(w1.shape), grad_b1, w2.new_empty(w2.shape), grad_b2


def _setup_context(ctx, inputs, output):
    y, w1, b1, w2, b2, ctx.approximate = inputs
    ctx.save_for_backward(y, w1, b1, w2)
    ctx.dtypes = b1.dtype, b2.dtype


def _backward(ctx, grad):
    grad_y, grad_w1, grad_b1, grad_w2, grad_b2 = _branch_backward(grad, *ctx.saved_tensors, ctx.approximate)
    return grad_y, grad_w1, grad_b1.to(ctx.dtypes[0]), grad_w2, grad_b2.to(ctx.dtypes[1]), None


_branch.register_autograd(_backward, setup_context=_setup_context)


def fused(dtype: torch.dtype, c: int) -> bool:
    """Whether the kernel is expected to beat cuBLAS followed by a GELU pass.

    The pass saved costs 4 bytes of traffic a hidden value in half precision, the slower product about a quarter of its
    2 c operations: they meet near c = 1000 on an H200. In float32 the product runs on scalar units, which cuBLAS uses
    better at any c.
    """
    return dtype != torch.float32 and c <= 1024


def mlp(
    x: Tensor,
    y: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gate: Tensor | None,
    approximate: str,
    overwrite_y: bool = False,
) -> Tensor:
    check(x, y, w1, b1, w2, b2)
    y = autocast(y)
    if not fused(y.dtype, y.shape[-1]):
        return reference.mlp(x, y, w1, b1, w2, b2, gate, approximate)
    branch = _branch(y, w1, b1, w2, b2, approximate)
    return x + (branch if gate is None else gate * branch)
