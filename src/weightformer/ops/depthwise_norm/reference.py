"""Convolution, residual and norm as their formulas."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dynamic_depthwise.reference import dynamic_depthwise_conv2d
from weightformer.ops.precision import autocast

__all__ = ["depthwise_norm", "static_depthwise"]


def static_depthwise(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """One kernel a channel, (C, K, K), for all images."""
    size = kernel.shape[-1]
    y = F.conv2d(x.permute(0, 3, 1, 2), kernel[:, None], bias, padding=size // 2, groups=len(kernel))
    return y.permute(0, 2, 3, 1)


def depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y = static_depthwise(x, kernel, bias) if kernel.ndim == 3 else dynamic_depthwise_conv2d(autocast(x), kernel, bias)
    z = x + y
    return z, F.layer_norm(z, z.shape[-1:], weight, shift, eps)
