"""The two poolings that feed the predictors, on channels-last token grids."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.pooling import eager, reference

__all__ = ["pool_2x2", "region_mean"]

_POOL_2X2 = {
    "reference": reference.pool_2x2,
    "eager": eager.pool_2x2,
    "triton": on_demand("weightformer.ops.pooling.triton", "pool_2x2"),
}
_REGION_MEAN = {
    "reference": reference.region_mean,
    "eager": eager.region_mean,
    "triton": on_demand("weightformer.ops.pooling.triton", "region_mean"),
}


def pool_2x2(x: Tensor) -> Tensor:
    """Mean of every 2 x 2 tokens; an odd last row or column is dropped, as in ``AvgPool2d(2)``.

    Args:
        x: tokens (B, H, W, C).

    Returns:
        Pooled tokens (B, H // 2, W // 2, C). A grid one token high or wide has no pair, so the result is empty there.
    """
    return select("pool_2x2", _POOL_2X2, x)(x)


def region_mean(x: Tensor, size: int) -> Tensor:
    """Adaptive average pooling to ``size`` x ``size`` regions.

    Region i of a side of n tokens is ``[floor(i n / size), ceil((i + 1) n / size))``: neighbouring regions overlap
    when n is no multiple of ``size``. Equal to ``adaptive_avg_pool2d``, but the exported graph stays right at every
    height and width, the backward is deterministic on a GPU, and it needs no operator that MPS lacks.

    Args:
        x: tokens (B, H, W, C).
        size: regions a side.

    Returns:
        Region means (B, size, size, C), in float32 at least.
    """
    return select("region_mean", _REGION_MEAN, x)(x, size)
