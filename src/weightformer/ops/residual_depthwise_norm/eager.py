"""Residual, depthwise convolution and LayerNorm from PyTorch's own operators, on channels-last views."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dynamic_depthwise import eager

__all__ = ["residual_depthwise_norm"]


def residual_depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = x.to(dtype)
    if kernel.ndim == 4:
        conv = eager.dynamic_depthwise_conv2d(y, kernel, bias)
    else:
        weight = kernel[:, None].to(dtype)
        padding = kernel.shape[-1] // 2
        conv = F.conv2d(y.permute(0, 3, 1, 2), weight, bias.to(dtype), padding=padding, groups=len(kernel))
        conv = conv.permute(0, 2, 3, 1)
    stream = x + conv
    return stream, F.layer_norm(stream, x.shape[-1:], norm_weight, norm_bias, eps).to(dtype)
