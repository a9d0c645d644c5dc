"""The per-image depthwise convolution as its definition: image b is convolved with its own kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["dynamic_depthwise_conv2d"]


def dynamic_depthwise_conv2d(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    channels, size = kernel.shape[1], kernel.shape[-1]
    outputs = [
        F.conv2d(image.movedim(-1, 0), k[:, None], bias, padding=size // 2, groups=channels).movedim(0, -1)
        for image, k in zip(x, kernel.to(x.dtype), strict=True)
    ]
    return torch.stack(outputs) if outputs else x * kernel.sum() + bias  # no image: keep the graph, shape (0, H, W, C)
