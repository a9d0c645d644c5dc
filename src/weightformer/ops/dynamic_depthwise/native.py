"""The per-image depthwise convolution in C++, on channels-last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops import native

__all__ = ["dynamic_depthwise_conv2d"]


def dynamic_depthwise_conv2d(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    native.check(x, bias)
    return torch.ops.weightformer_native.depthwise(x, kernel.to(x.dtype), bias, False)
