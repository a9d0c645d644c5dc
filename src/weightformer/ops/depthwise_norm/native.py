"""Convolution, residual and norm in C++: one pass, a token's sum is normalised while it is in registers and cache."""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops import native

__all__ = ["depthwise_norm"]


def depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    native.check(x, bias, weight, shift)
    z, normed, _, _ = torch.ops.weightformer_native.depthwise_norm(x, kernel.to(x.dtype), bias, weight, shift, eps)
    return z, normed
