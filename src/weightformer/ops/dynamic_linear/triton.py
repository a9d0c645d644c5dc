"""GPU form of the predicted weight, in two kernels (loaded on demand).

`gram` reads the activated features of the pooled tokens once, in chunks whose partial sums are added afterwards; the
chunk depends on the token count alone, so an image's weight does not depend on its batch. `predicted_weight` makes the
update of a strip of output columns in registers, takes its column norms there, adds the static weight and writes the
final weight once, in the dtype that the product wants.

Suffixes: B images, P pooled tokens, C input and O output channels, R and S the two ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightformer.ops.dynamic_linear import eager
from weightformer.ops.precision import wide
from weightformer.ops.triton_support import INTERPRETED, check, dot, launch, pad_channels, precision

__all__ = ["dynamic_linear", "gram", "linear_weight", "predicted_weight"]

_CHUNK = 256  # pooled tokens a partial sum of the Gram matrix


@triton.jit(do_not_specialize=["pooled"])
def _gram_kernel(
    left,
    right,
    partial,  # (B, chunks, R, S)
    pooled,
    left_stride_b,
    left_stride_p,
    right_stride_b,
    right_stride_p,
    R: tl.constexpr,
    S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    blocks_s: tl.constexpr = (S + BLOCK_S - 1) // BLOCK_S
    blocks: tl.constexpr = blocks_s * ((R + BLOCK_R - 1) // BLOCK_R)
    chunks = tl.cdiv(pooled, CHUNK)
    program = tl.program_id(0)
    block = program % blocks
    chunk = program // blocks % chunks
    image = (program // (blocks * chunks)).to(tl.int64)
    r = block // blocks_s * BLOCK_R + tl.arange(0, BLOCK_R)
    s = block % blocks_s * BLOCK_S + tl.arange(0, BLOCK_S)
    in_r, in_s = r < R, s < S
    left += image * left_stride_b
    right += image * right_stride_b
    acc = tl.zeros((BLOCK_R, BLOCK_S), tl.float32)
    for start in range(0, CHUNK, BLOCK_P):
        p = chunk * CHUNK + start + tl.arange(0, BLOCK_P)
        in_p = p < pooled
        p = p.to(tl.int64)
        a = tl.load(left + p[None, :] * left_stride_p + r[:, None], mask=in_p[None, :] & in_r[:, None], other=0.0)
        b = tl.load(right + p[:, None] * right_stride_p + s[None, :], mask=in_p[:, None] & in_s[None, :], other=0.0)
        acc = dot(a, b, acc, PRECISION, UPCAST)
    offset = (image * chunks + chunk) * (R * S) + r[:, None] * S + s[None, :]
    tl.store(partial + offset, acc, mask=in_r[:, None] & in_s[None, :])


@triton.jit
def _weight_kernel(
    gram,
    w1,
    w2,
    static,
    weight,
    scale,
    R: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks_o: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    program = tl.program_id(0)
    image = (program // blocks_o).to(tl.int64)
    o = program % blocks_o * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.arange(0, BLOCK_C)
    in_o, in_c = o < O, c < C
    gram += image * (R * S)
    update = tl.zeros((BLOCK_C, BLOCK_O), tl.float32)
    for start_r in range(0, R, BLOCK_R):
        r = start_r + tl.arange(0, BLOCK_R)
        in_r = r < R
        q = tl.zeros((BLOCK_R, BLOCK_O), tl.float32)
        for start_s in range(0, S, BLOCK_S):
            s = start_s + tl.arange(0, BLOCK_S)
            in_s = s < S
            g = tl.load(gram + r[:, None] * S + s[None, :], mask=in_r[:, None] & in_s[None, :], other=0.0)
            b = tl.load(w2 + s[:, None] * O + o[None, :], mask=in_s[:, None] & in_o[None, :], other=0.0)
            q = tl.dot(g * scale, b.to(tl.float32), q, input_precision=PRECISION)
        a = tl.load(w1 + r[None, :] * C + c[:, None], mask=in_r[None, :] & in_c[:, None], other=0.0)
        update = tl.dot(a.to(tl.float32), q, update, input_precision=PRECISION)
    norm = tl.sqrt(tl.sum(update * update, axis=0)) + 1.0
    offset = c[:, None] * O + o[None, :]
    mask = in_c[:, None] & in_o[None, :]
    result = update / norm[None, :] + tl.load(static + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(weight + image * (C * O) + offset, result.to(weight.dtype.element_ty), mask=mask)


def _rows(x: Tensor) -> Tensor:
    """``x`` with its channels next to each other; the halves of one projection are so without a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("weightformer::gram", mutates_args=())
def gram(left: Tensor, right: Tensor) -> Tensor:
    """``left^T right`` (B, R, S) in float32."""
    left, right = _rows(left), _rows(right)
    (batch, pooled, r), s = left.shape, right.shape[-1]
    chunks = triton.cdiv(pooled, _CHUNK)
    partial = left.new_empty(batch, chunks, r, s, dtype=torch.float32)
    block_r, block_s = min(64, pad_channels(r)), min(64, pad_channels(s))
    launch(
        _gram_kernel,
        batch * chunks * triton.cdiv(r, block_r) * triton.cdiv(s, block_s),
        left,
        right,
        partial,
        pooled,
        *left.stride()[:2],
        *right.stride()[:2],
        R=r,
        S=s,
        BLOCK_R=block_r,
        BLOCK_S=block_s,
        BLOCK_P=32,
        CHUNK=_CHUNK,
        PRECISION=precision(left.dtype),
        UPCAST=INTERPRETED,
        num_warps=4,
        num_stages=3,
    )
    return partial.sum(1)


@gram.register_fake
def _(left, right):
    return left.new_empty(left.shape[0], left.shape[2], right.shape[2], dtype=torch.float32)


def _gram_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gram_backward(ctx, grad):
    left, right = ctx.saved_tensors
    grad = grad.to(left.dtype)
    return right @ grad.mT, left @ grad


gram.register_autograd(_gram_backward, setup_context=_gram_setup)


@torch.library.custom_op("weightformer::predicted_weight", mutates_args=())
def predicted_weight(gram: Tensor, w1: Tensor, w2: Tensor, static: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The final weights (B, C, O) in ``dtype`` from the Gram matrices (B, R, S)."""
    (r, c), (s, o) = w1.shape, w2.shape
    weight = gram.new_empty(len(gram), c, o, dtype=dtype)
    block_c = pad_channels(c)
    block_o = min(32 if dtype == torch.float32 else 64, max(16, 16384 // block_c))
    launch(
        _weight_kernel,
        len(gram) * triton.cdiv(o, block_o),
        gram.contiguous(),
        w1.contiguous(),
        w2.contiguous(),
        static.contiguous(),
        weight,
        scale,
        R=r,
        S=s,
        C=c,
        O=o,
        BLOCK_R=16 if r <= 16 else 32,
        BLOCK_S=32,
        BLOCK_C=block_c,
        BLOCK_O=block_o,
        PRECISION=precision(dtype),
        num_warps=8,
        num_stages=2,
    )
    return weight


@predicted_weight.register_fake
def _(gram, w1, w2, static, scale, dtype):
    return gram.new_empty(gram.shape[0], w1.shape[1], w2.shape[1], dtype=dtype)


def _weight_setup(ctx, inputs, output):
    gram, w1, w2, static, ctx.scale, _ = inputs
    ctx.save_for_backward(gram, w1, w2)
    ctx.static_dtype = static.dtype


def _weight_backward(ctx, grad):
    """The chain rule through the quarter-size ``q`` of `eager.weight_from_gram`, whose names these are."""
    gram, w1, w2 = ctx.saved_tensors
    w1_RC, w2_SO = wide(w1), wide(w2)
    kernel_RR = w1_RC @ w1_RC.mT
    q_BRO = (gram * ctx.scale) @ w2_SO
    kernel_q_BRO = kernel_RR @ q_BRO
    norm_B1O = (kernel_q_BRO * q_BRO).sum(1, keepdim=True).clamp_min(1e-24).sqrt()
    shrink_B1O = 1 / (norm_B1O + 1)

    # The two products as large as the weight itself stay in its dtype.
    grad_scaled_BRO = wide(w1.to(grad.dtype) @ grad)
    grad_w1 = wide((q_BRO * shrink_B1O).to(grad.dtype) @ grad.mT).sum(0)
    grad_squared_B1O = -(shrink_B1O**2) * (grad_scaled_BRO * q_BRO).sum(1, keepdim=True) / (2 * norm_B1O)
    grad_q_BRO = grad_scaled_BRO * shrink_B1O + 2 * grad_squared_B1O * kernel_q_BRO
    grad_kernel_RR = ((grad_squared_B1O * q_BRO) @ q_BRO.mT).sum(0)
    grad_w1 = grad_w1 + 2 * grad_kernel_RR @ w1_RC
    grad_gram = ctx.scale * (grad_q_BRO @ w2_SO.mT)
    grad_w2 = ctx.scale * (gram.mT @ grad_q_BRO).sum(0)
    grad_static = grad.sum(0, dtype=torch.float32)
    return grad_gram, grad_w1.to(w1.dtype), grad_w2.to(w2.dtype), grad_static.to(ctx.static_dtype), None, None


predicted_weight.register_autograd(_weight_backward, setup_context=_weight_setup)


def linear_weight(
    left: Tensor,
    right: Tensor,
    w1: Tensor | None,
    w2: Tensor,
    static: Tensor | None,
    scale: float,
    dtype: torch.dtype | None = None,
    normalize: bool = True,
) -> Tensor:
    check(left, right, w2)
    dtype = dtype or torch.float32
    # The update's columns must fit in registers, and the kernel knows the released form alone.
    if w1 is None or static is None or not normalize or w1.shape[1] > 1024:
        return eager.weight_from_gram(gram(left, right), w1, w2, static, scale, normalize).to(dtype)
    check(w1, static)
    return predicted_weight(gram(left, right), w1, w2, static, scale, dtype)


def dynamic_linear(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    w1: Tensor | None,
    w2: Tensor,
    static: Tensor | None,
    bias: Tensor,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    check(x)
    weight = linear_weight(left, right, w1, w2, static, scale, x.dtype, normalize)
    return torch.baddbmm(bias.to(x.dtype), x, weight)
