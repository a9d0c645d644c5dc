"""A linear layer whose weight is predicted from the image (paper, section 3; maths in README.md here)."""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.dynamic_linear import eager, reference
from weightformer.ops.precision import autocast

__all__ = ["dynamic_linear", "linear_weight"]


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
    """The predicted weight ``W = dW / (||dW|| + 1) + static`` with ``dW = scale * (left w1)^T (right w2)``.

    The norm runs over the input axis, one per output column. Sums over tokens are taken in float32 at least. What the
    strategies of the paper differ in is how ``left`` and ``right`` come from the tokens (`weightformer.layers`).

    Args:
        left: features of the pooled tokens (B, P, R).
        right: likewise (B, P, S).
        w1: expansion of ``left`` to the input width (R, C); ``None`` where it has that width (R = C).
        w2: expansion of ``right`` to the output width (S, O).
        static: the static weight W0 (C, O), or ``None`` for none.
        scale: C^-0.5 / N, with N the number of tokens before pooling.
        dtype: of the result, for a product in half precision; by default float32 at least.
        normalize: ``False`` takes dW itself in place of ``dW / (||dW|| + 1)``.

    Returns:
        One weight an image (B, C, O). Without pooled tokens (P = 0) it is ``static``, or zero.
    """
    forms = {
        "reference": reference.linear_weight,
        "eager": eager.linear_weight,
        "native": eager.linear_weight,  # nothing to add in C++
        "triton": on_demand("weightformer.ops.dynamic_linear.triton", "linear_weight"),
    }
    return select("linear_weight", forms, left)(left, right, w1, w2, static, scale, dtype, normalize)


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
    """``x W + bias`` with the weight of `linear_weight`, each image with its own.

    Args:
        x: tokens (B, N, C).
        bias: (O,).
        left, right, w1, w2, static, scale, normalize: as in `linear_weight`.

    Returns:
        (B, N, O) in the dtype of ``x``, or in autocast's unless ``x`` is float64.
    """
    forms = {
        "reference": reference.dynamic_linear,
        "eager": eager.dynamic_linear,
        "native": eager.dynamic_linear,  # nothing to add in C++
        "triton": on_demand("weightformer.ops.dynamic_linear.triton", "dynamic_linear"),
    }
    return select("dynamic_linear", forms, x)(autocast(x), left, right, w1, w2, static, bias, scale, normalize)
