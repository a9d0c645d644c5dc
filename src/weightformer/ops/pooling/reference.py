"""The two poolings as their definitions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.precision import wide

__all__ = ["pool_2x2", "region_mean"]


def pool_2x2(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    pairs = wide(x)[:, : height // 2 * 2, : width // 2 * 2]
    pairs = pairs.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return (pairs.sum((2, 4)) / 4).to(x.dtype)


def region_mean(x: Tensor, size: int) -> Tensor:
    return F.adaptive_avg_pool2d(wide(x).permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)  # noqa: TID251 - the definition
