"""Matrix products on a CPU.

torch sends float32 products to MKL, which keeps to narrow vectors on processors of another maker: half the speed of
oneDNN on an AMD core with AVX-512. oneDNN's product with its epilogues is the operator that torch.compile emits for
CPUs; where it is missing, or for another dtype, `product` is the plain operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dispatch import capturing

__all__ = ["accelerated", "matmul", "product", "too_small"]


_SMALL = 2**21  # multiply-adds, some 50 us


def accelerated(x: Tensor) -> bool:
    """Whether `product` has a faster way than torch's own product for this tensor."""
    return (
        not capturing()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: str | None = None, add: Tensor | None = None
) -> Tensor:
    """``x weight^T + bias``, then GELU, or plus ``add``; without autograd.

    Args:
        x: (M, K), any strides.
        weight: (N, K), any strides.
        bias: (N,).
        gelu: ``"none"`` (exact) or ``"tanh"``, as in ``F.gelu``.
        add: (M, N).
    """
    if not accelerated(x):
        y = F.linear(x, weight, bias)
        y = y if gelu is None else F.gelu(y, approximate=gelu)
        return y if add is None else y.add_(add)
    x, weight = _dense(x), _dense(weight)
    if add is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, weight, bias, "add")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none" if gelu is None else "gelu", [], gelu)


def _dense(x: Tensor) -> Tensor:
    """``x`` without gaps between rows or columns: oneDNN takes a slow path for those."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


def too_small(m: int, k: int, n: int) -> bool:
    """Whether products (M, K) x (K, N) are too short to pay for a call each: a batch of them goes to torch's own."""
    return m * k * n < _SMALL


def matmul(a: Tensor, b: Tensor, add: Tensor | None = None) -> Tensor:
    """``a @ b + add`` for matrices or batches of them, differentiable.

    Args:
        a: (M, K) or (B, M, K).
        b: (K, N) or (B, K, N).
        add: (M, N), to every product.
    """
    if not accelerated(a) or a.numel() == 0 or b.numel() == 0:
        return a @ b if add is None else a @ b + add
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, add)):
        return _Matmul.apply(a, b, add)
    return _forward(a, b, add)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, add: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return _forward(a, b, add)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wants_a, wants_b, wants_add = ctx.needs_input_grad
        batched = grad.ndim == 3
        grad_a = grad_b = None
        if wants_a:
            grad_a = _sum_batch(grad, b.mT) if a.ndim == 2 and batched else _forward(grad, b.mT)
        if wants_b:
            grad_b = _sum_batch(a.mT, grad) if b.ndim == 2 and batched else _forward(a.mT, grad)
        grad_add = (grad.sum(0) if batched else grad) if wants_add else None
        return grad_a, grad_b, grad_add


def _forward(a: Tensor, b: Tensor, add: Tensor | None = None) -> Tensor:
    if a.ndim == b.ndim == 2:
        return product(a, b.mT, add=add)
    if b.ndim == 2 and add is None:
        return product(a.reshape(-1, a.shape[-1]), b.mT).view(*a.shape[:-1], b.shape[-1])
    batch = len(a) if a.ndim == 3 else len(b)
    left, right = (t if t.ndim == 3 else t.expand(batch, -1, -1) for t in (a, b))
    if too_small(a.shape[-2], a.shape[-1], b.shape[-1]):
        return torch.bmm(left, right) if add is None else torch.baddbmm(add, left, right)
    return torch.stack([product(x, w.mT, add=add) for x, w in zip(left, right, strict=True)])


def _sum_batch(a: Tensor, b: Tensor) -> Tensor:
    """``sum_b a[b] @ b[b]`` as one product."""
    return product(a.transpose(0, 1).flatten(1), b.mT.transpose(0, 1).flatten(1))
