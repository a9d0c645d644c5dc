"""Linear layer and GELU from PyTorch's own operators: the product with its bias, then one pass for the GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear_gelu"]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    if weight.ndim == 3:
        return F.gelu(torch.baddbmm(bias, x, weight))
    return F.gelu(F.linear(x, weight.mT, bias))
