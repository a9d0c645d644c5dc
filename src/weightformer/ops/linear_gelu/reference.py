"""Linear layer and GELU as their definitions, in float32 at least."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.precision import full_precision, wide

__all__ = ["linear_gelu"]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with full_precision(x.device):
        return F.gelu(wide(x) @ wide(weight.to(x.dtype)) + wide(bias)).to(x.dtype)
