"""The MLP in C++: each thread takes blocks of tokens from the norm to the residual without leaving its cache."""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops import native
from weightformer.ops.mlp.eager import in_groups

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
    native.check(x, y, b1, w2, b2)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, w1, b1, w2, b2))

    def form(x: Tensor | None, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, approximate: str) -> Tensor:
        return torch.ops.weightformer_native.mlp(x, y, w1, b1, w2, b2, approximate == "tanh", keep)[0]

    return in_groups(form, x, y, w1, b1, w2, b2, gate, approximate)
