"""The two poolings in plain PyTorch.

B images, H x W tokens, C channels, K regions a side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.precision import full_precision, wide

__all__ = ["pool_2x2", "region_mean"]


def pool_2x2(x: Tensor) -> Tensor:
    _, height, width, _ = x.shape
    if height < 2 or width < 2:
        return x[:, : height // 2, : width // 2]  # empty, but still part of the graph
    x = x.permute(0, 3, 1, 2)
    if torch.compiler.is_exporting():  # in torch 2.11 an exported avg_pool2d refuses grids of other parity
        channels = x.shape[1]
        return F.conv2d(x, x.new_full((channels, 1, 2, 2), 0.25), stride=2, groups=channels).permute(0, 2, 3, 1)
    return F.avg_pool2d(x, 2).permute(0, 2, 3, 1)


def region_mean(x: Tensor, size: int) -> Tensor:
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
