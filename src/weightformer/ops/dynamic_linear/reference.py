"""The dynamic linear layer as its formula.

Suffixes: B images, N tokens, P pooled tokens, C input and O output channels, R and S the two ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.precision import full_precision, normalize_update, wide

__all__ = ["dynamic_linear", "linear_weight"]


def linear_weight(
    left_BPR: Tensor,
    right_BPS: Tensor,
    w1_RC: Tensor | None,
    w2_SO: Tensor,
    static_CO: Tensor | None,
    scale: float,
    dtype: torch.dtype | None = None,
    normalize: bool = True,
) -> Tensor:
    with full_precision(left_BPR.device):
        a_BPC = wide(left_BPR) if w1_RC is None else wide(left_BPR) @ wide(w1_RC)
        d_BPO = wide(right_BPS) @ wide(w2_SO)
        weight_BCO = scale * (a_BPC.mT @ d_BPO)
        if normalize:
            weight_BCO = normalize_update(weight_BCO, dim=1)
        if static_CO is not None:
            weight_BCO = weight_BCO + static_CO
        return weight_BCO if dtype is None else weight_BCO.to(dtype)


def dynamic_linear(
    x_BNC: Tensor,
    left_BPR: Tensor,
    right_BPS: Tensor,
    w1_RC: Tensor | None,
    w2_SO: Tensor,
    static_CO: Tensor | None,
    bias_O: Tensor,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    weight_BCO = linear_weight(left_BPR, right_BPS, w1_RC, w2_SO, static_CO, scale, x_BNC.dtype, normalize)
    return x_BNC @ weight_BCO + bias_O.to(x_BNC.dtype)
