"""The two poolings that feed the predictors, on channels-last token grids.

B images, H x W tokens, C channels, K regions a side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dispatch import select
from weightformer.ops.precision import full_precision, wide

__all__ = ["pool_2x2", "region_mean"]


def pool_2x2(x: Tensor) -> Tensor:
    """Mean of every 2 x 2 tokens; an odd last row or column is dropped, as in ``AvgPool2d(2)``.

    Args:
        x: tokens (B, H, W, C).

    Returns:
        Pooled tokens (B, H // 2, W // 2, C). A grid one token high or wide has no pair, so the result is empty there.
    """
    _, height, width, _ = x.shape
    if height < 2 or width < 2:
        return x[:, : height // 2, : width // 2]  # empty, but still part of the graph
    return F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


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
    forms = {"reference": _region_mean_reference, "eager": _region_mean_eager}
    return select("region_mean", forms)(x, size)


def _region_mean_reference(x: Tensor, size: int) -> Tensor:
    return F.adaptive_avg_pool2d(wide(x).permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)  # noqa: TID251 - the definition


def _region_mean_eager(x: Tensor, size: int) -> Tensor:
    """Two products with interval matrices.

    The exported graph stays right at every height and width, the backward is deterministic on a GPU, and no operator
    is needed that MPS lacks.
    """
    batch, height, width, channels = x.shape
    with full_precision(x.device):
        x = wide(x)
        rows = _interval_matrix(height, size, x)
        cols = _interval_matrix(width, size, x)
        x = (rows @ x.reshape(batch, height, width * channels)).view(batch, size, width, channels)
        return cols @ x


def _interval_matrix(length: int, size: int, like: Tensor) -> Tensor:
    """The (size, length) matrix whose row i averages region i."""
    region = torch.arange(size, device=like.device)[:, None]
    start = region * length // size
    end = ((region + 1) * length + size - 1) // size
    position = torch.arange(length, device=like.device)
    inside = (position >= start) & (position < end)
    return inside.to(like.dtype) / (end - start).to(like.dtype)
