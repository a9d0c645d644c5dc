"""The MLP in row blocks that stay in cache, on a CPU; its backward recomputes what is cheap.

Suffixes: G groups of tokens with one first weight each (one group, or one an image), M tokens of a group, C channels,
O hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dispatch import capturing, exporting
from weightformer.ops.mlp import reference
from weightformer.ops.precision import autocasting
from weightformer.ops.products import product, too_small

__all__ = ["backward_blocks", "in_groups", "mlp"]

_FORWARD_ROWS = 512  # tokens whose hidden layer (1.5 MB for C = 192) stays in cache between the two products
_BACKWARD_ROWS = 1024  # longer: every block adds to the weights' gradients


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
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, w1, b1, w2, b2))
    if capturing() and x.device.type == "cpu" and not (exporting() or learns or autocasting(x)):
        return _compiled(x, y, w1, b1, w2, b2, gate, approximate)
    if x.device.type != "cpu" or x.numel() == 0 or autocasting(x) or capturing() or _too_small(x, w1):
        return reference.mlp(x, y, w1, b1, w2, b2, gate, approximate)
    form: Callable[..., Tensor] = _RowBlocks.apply if learns else partial(forward_blocks, overwrite_y=overwrite_y)
    return in_groups(form, x, y, w1, b1, w2, b2, gate, approximate)


@torch.library.custom_op("weightformer::mlp_row_blocks", mutates_args=(), device_types="cpu")
def _compiled(
    x: Tensor, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, gate: Tensor | None, approximate: str
) -> Tensor:
    """`mlp` as one node of a compiled graph: the compiler would send the products to the slower library."""
    return mlp(x, y, w1, b1, w2, b2, gate, approximate)


@_compiled.register_fake
def _(
    x: Tensor, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, gate: Tensor | None, approximate: str
) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _too_small(x: Tensor, w1: Tensor) -> bool:
    """Whether each image has a first weight of its own and too few tokens to pay for a loop over the images."""
    return w1.ndim == 3 and too_small(x.shape[1] * x.shape[2], w1.shape[1], w1.shape[2])


def in_groups(
    form: Callable[..., Tensor],
    x: Tensor,
    y: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gate: Tensor | None,
    approximate: str,
) -> Tensor:
    """Call ``form`` on tokens (G, M, C) and first weights (G, C, O); what a gate scales, it computes without x."""
    shape = x.shape
    if w1.ndim == 2:
        w1_GCO = w1.mT[None]
        x, y = x.reshape(1, -1, shape[-1]), y.reshape(1, -1, shape[-1])
    else:
        w1_GCO = w1.to(y.dtype)
        x, y = x.flatten(1, 2), y.flatten(1, 2)
    if gate is None:
        return form(x, y, w1_GCO, b1, w2, b2, approximate).view(shape)
    branch = form(None, y, w1_GCO, b1, w2, b2, approximate).view(shape)
    return torch.addcmul(x.view(shape), gate.to(branch.dtype), branch)


class _RowBlocks(torch.autograd.Function):
    """``x + gelu(y w1 + b1) w2 + b2``, keeping only y and the first product for the backward (five widths, not ten)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_GMC: Tensor | None,
        y_GMC: Tensor,
        w1_GCO: Tensor,
        b1: Tensor,
        w2_CO: Tensor,
        b2: Tensor,
        approximate: str,
    ) -> Tensor:
        out_GMC = torch.empty_like(y_GMC, memory_format=torch.contiguous_format)
        hidden = [product(y, w1.mT, b1) for y, w1 in zip(y_GMC, w1_GCO, strict=True)]
        for g, h_MO in enumerate(hidden):
            for rows in _blocks(len(h_MO), _FORWARD_ROWS):
                out_GMC[g, rows] = product(
                    F.gelu(h_MO[rows], approximate=approximate),
                    w2_CO,
                    b2,
                    add=None if x_GMC is None else x_GMC[g, rows],
                )
        ctx.save_for_backward(y_GMC, w1_GCO, w2_CO, *hidden)
        ctx.approximate = approximate
        return out_GMC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_GMC: Tensor) -> tuple[Tensor | None, ...]:
        y_GMC, w1_GCO, w2_CO, *hidden = ctx.saved_tensors
        wants = ctx.needs_input_grad[:6]
        return *backward_blocks(grad_GMC, y_GMC, w1_GCO, w2_CO, hidden, ctx.approximate, wants), None


def backward_blocks(
    grad_GMC: Tensor,
    y_GMC: Tensor,
    w1_GCO: Tensor,
    w2_CO: Tensor,
    hidden_GMO: Sequence[Tensor] | Tensor,
    approximate: str,
    wants: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, y, w1, b1, w2 and b2, where wanted: the activation is recomputed, block by block."""
    wants_x, wants_y, wants_w1, wants_b1, wants_w2, wants_b2 = wants
    grad_GMC = grad_GMC.contiguous()
    sums = torch.promote_types(grad_GMC.dtype, torch.float32)
    grad_y = torch.empty_like(y_GMC, memory_format=torch.contiguous_format) if wants_y else None
    grad_w1 = torch.zeros_like(w1_GCO, dtype=sums) if wants_w1 else None
    grad_w2 = torch.zeros_like(w2_CO, dtype=sums) if wants_w2 else None
    grad_b1 = w2_CO.new_zeros(w2_CO.shape[1], dtype=sums) if wants_b1 else None
    for g, h_MO in enumerate(hidden_GMO):
        for rows in _blocks(len(h_MO), _BACKWARD_ROWS):
            d_mC, h_mO = grad_GMC[g, rows], h_MO[rows]
            if grad_w2 is not None:
                grad_w2 += product(d_mC.mT, F.gelu(h_mO, approximate=approximate).mT)
            if not (wants_y or wants_w1 or wants_b1):
                continue
            dh_mO = torch.ops.aten.gelu_backward(product(d_mC, w2_CO.mT), h_mO, approximate=approximate)
            if grad_y is not None:
                grad_y[g, rows] = product(dh_mO, w1_GCO[g])
            if grad_w1 is not None:
                grad_w1[g] += product(y_GMC[g, rows].mT, dh_mO.mT)
            if grad_b1 is not None:
                grad_b1 += dh_mO.sum(0)
    narrow = (None if s is None else s.to(grad_GMC.dtype) for s in (grad_w1, grad_b1, grad_w2))
    return grad_GMC if wants_x else None, grad_y, *narrow, grad_GMC.sum((0, 1)) if wants_b2 else None


def forward_blocks(
    x_GMC: Tensor | None,
    y_GMC: Tensor,
    w1_GCO: Tensor,
    b1: Tensor,
    w2_CO: Tensor,
    b2: Tensor,
    approximate: str,
    *,
    overwrite_y: bool = False,
) -> Tensor:
    """The forward alone: no more than one block of the hidden layer exists at a time."""
    out_GMC = y_GMC if overwrite_y else torch.empty_like(y_GMC, memory_format=torch.contiguous_format)
    for g, w1_CO in enumerate(w1_GCO):
        for rows in _blocks(y_GMC.shape[1], _FORWARD_ROWS):
            hidden = product(y_GMC[g, rows], w1_CO.mT, b1, gelu=approximate)
            out_GMC[g, rows] = product(hidden, w2_CO, b2, add=None if x_GMC is None else x_GMC[g, rows])
    return out_GMC


def _blocks(tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, tokens, rows)]
