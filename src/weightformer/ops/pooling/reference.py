"""The two poolings as their definitions: every window is cut out and averaged."""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.precision import wide

__all__ = ["pool_2x2", "region_mean"]


def pool_2x2(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    windows = wide(x)[:, : height // 2 * 2, : width // 2 * 2]
    windows = windows.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return (windows.sum((2, 4)) / 4).to(x.dtype)


def region_mean(x: Tensor, size: int) -> Tensor:
    height, width = x.shape[1:3]
    x = wide(x)
    rows = []
    for i in range(size):
        region = x[:, i * height // size : -((i + 1) * height // -size)]
        means = [region[:, :, j * width // size : -((j + 1) * width // -size)].mean((1, 2)) for j in range(size)]
        rows.append(torch.stack(means, 1))
    return torch.stack(rows, 1)
