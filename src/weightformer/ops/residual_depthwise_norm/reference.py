"""Residual, depthwise convolution and LayerNorm as their definitions, with every sum in float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dynamic_depthwise import reference
from weightformer.ops.precision import full_precision, wide

__all__ = ["residual_depthwise_norm"]


def residual_depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    kernel = kernel.expand(x.shape[0], -1, -1, -1)
    with full_precision(x.device):
        conv = reference.dynamic_depthwise_conv2d(wide(x), wide(kernel), wide(bias))
        stream = (wide(x) + conv).to(x.dtype)
        normed = F.layer_norm(wide(stream), x.shape[-1:], wide(norm_weight), wide(norm_bias), eps)
    return stream, normed.to(dtype)
