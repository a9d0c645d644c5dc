"""The MLP as its formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["mlp"]


def mlp(
    x: Tensor,
    y: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gate: Tensor | None,
    approximate: str,
    overwrite_y: bool = False,
) -> Tensor:
    hidden = F.linear(y, w1, b1) if w1.ndim == 2 else torch.einsum("bhwc,bco->bhwo", y, w1.to(y.dtype)) + b1
    branch = F.linear(F.gelu(hidden, approximate=approximate), w2, b2)
    return x + (branch if gate is None else gate * branch)
