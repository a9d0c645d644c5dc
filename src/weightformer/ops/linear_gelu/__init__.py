"""A linear layer and the exact GELU in one step, with one weight or one an image (maths in README.md here)."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.linear_gelu import eager, reference
from weightformer.ops.precision import autocast

__all__ = ["linear_gelu"]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight + bias)``.

    Args:
        x: tokens (B, N, C).
        weight: (C, O), or one an image (B, C, O); any strides, so the transpose of an ``nn.Linear`` weight will do.
        bias: (O,).

    Returns:
        (B, N, O) in the dtype of ``x``, or in autocast's unless ``x`` is float64.

    Raises:
        ValueError: the weight does not fit the tokens.
    """
    if weight.shape[-2] != x.shape[-1] or (weight.ndim == 3 and len(weight) != len(x)):
        raise ValueError(
            f"weight {tuple(weight.shape)} does not fit tokens {tuple(x.shape)}: expected (C, O) or (B, C, O)"
        )
    forms = {
        "reference": reference.linear_gelu,
        "eager": eager.linear_gelu,
        "triton": on_demand("weightformer.ops.linear_gelu.triton", "linear_gelu"),
    }
    return select("linear_gelu", forms, x)(autocast(x), weight, bias)
