"""The MLP as its formula."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["mlp"]


def mlp(
    x: Tensor, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, gate: Tensor | None, approximate: str
) -> Tensor:
    if w1.ndim == 2:
        hidden = F.linear(y, w1, b1)
    else:  # one product an image
        hidden = (y.flatten(1, 2) @ w1.to(y.dtype)).unflatten(1, y.shape[1:3]) + b1
    branch = F.linear(F.gelu(hidden, approximate=approximate), w2, b2)
    return x + (branch if gate is None else gate * branch)
