"""The two poolings that feed the predictors, on channels-last token grids."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.pooling import eager, reference

__all__ = ["pool_2x2", "region_mean"]


def pool_2x2(x: Tensor) -> Tensor:
    """Mean of every 2 x 2 tokens; an odd last row or column is dropped, as in ``AvgPool2d(2)``.

    Args:
        x: tokens (B, H, W, C).

    Returns:
        Pooled tokens (B, H // 2, W // 2, C). A grid one token high or wide has no pair, so the result is empty there.
    """
    forms = {
        "reference": reference.pool_2x2,
        "eager": eager.pool_2x2,
        "native": eager.pool_2x2,  # nothing to add in C++
        "triton": on_demand("weightformer.ops.pooling.triton", "pool_2x2"),
    }
    return select("pool_2x2", forms, x)(x)


def region_mean(x: Tensor, size: int) -> Tensor:
    """Adaptive average pooling to ``size`` x ``size`` regions.

    Region i of a side of n tokens is ``[floor(i n / size), ceil((i + 1) n / size))``: neighbouring regions overlap
    when n is no multiple of ``size``.

    Args:
        x: tokens (B, H, W, C).
        size: regions a side.

    Returns:
        Region means (B, size, size, C), in float32 at least.
    """
    forms = {
        "reference": reference.region_mean,
        "eager": eager.region_mean,
        "native": eager.region_mean,  # nothing to add in C++
        "triton": on_demand("weightformer.ops.pooling.triton", "region_mean"),
    }
    return select("region_mean", forms, x)(x, size)
