"""Fast forms of the dynamic linear layer in plain PyTorch.

Suffixes: B images, N tokens, P pooled tokens, C input and O output channels, R and S the two ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.dynamic_linear import reference
from weightformer.ops.precision import full_precision, wide

__all__ = ["cheaper_order", "dynamic_linear", "gram", "linear_weight", "weight_from_gram"]


def cheaper_order(tokens: int, r: int, s: int, c: int, o: int) -> str:
    """``"tokens"`` or ``"channels"``: the order of contraction with fewer multiply-adds.

    Over tokens: two expansions and the product of ``tokens`` outer products. Over channels: the Gram matrix, its two
    expansions, and the (R, R) form that yields the column norms. Only the Gram matrix grows with the tokens.
    """
    over_tokens = tokens * (r * c + s * o + c * o)
    over_channels = tokens * r * s + r * s * o + r * c * o + r * r * (c + o)
    return "tokens" if over_tokens < over_channels else "channels"


def gram(left_BPR: Tensor, right_BPS: Tensor) -> Tensor:
    """``left^T right`` (B, R, S), in float32 at least: the only part of the weight that sees tokens."""
    with full_precision(left_BPR.device):
        return torch.bmm(wide(left_BPR).mT, wide(right_BPS))  # `@` would bar batch 1 from a graph exported with batch 2


def weight_from_gram(gram_BRS: Tensor, w1_RC: Tensor, w2_SO: Tensor, static_CO: Tensor, scale: float) -> Tensor:
    """The predicted weight from the Gram matrix of the pooled tokens, never forming the update itself.

    With ``q = scale * gram @ w2`` the update is ``w1^T q`` and its squared column norms are ``sum(q * (w1 w1^T q))``,
    so columns are scaled on the quarter-size ``q`` and one product writes the final weight.
    """
    with full_precision(gram_BRS.device):
        w1_RC = wide(w1_RC)
        q_BRO = (gram_BRS * scale) @ wide(w2_SO)
        squared_BO = ((w1_RC @ w1_RC.mT) @ q_BRO * q_BRO).sum(1, keepdim=True)
        # The clamp keeps the gradient of the root finite where the update is zero; 1e-12 vanishes beside the + 1.
        q_BRO = q_BRO / (squared_BO.clamp_min(1e-24).sqrt() + 1)
        return torch.matmul(w1_RC.mT, q_BRO) + static_CO


def linear_weight(
    left_BPR: Tensor,
    right_BPS: Tensor,
    w1_RC: Tensor,
    w2_SO: Tensor,
    static_CO: Tensor,
    scale: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    pooled, (r, c), (s, o) = left_BPR.shape[1], w1_RC.shape, w2_SO.shape
    # A symbolic token count (export with free sizes) must not be compared: the graph would hold one side only.
    if not isinstance(pooled, torch.SymInt) and cheaper_order(pooled, r, s, c, o) == "tokens":
        return reference.linear_weight(left_BPR, right_BPS, w1_RC, w2_SO, static_CO, scale, dtype)
    weight_BCO = weight_from_gram(gram(left_BPR, right_BPS), w1_RC, w2_SO, static_CO, scale)
    return weight_BCO if dtype is None else weight_BCO.to(dtype)


def dynamic_linear(
    x_BNC: Tensor,
    left_BPR: Tensor,
    right_BPS: Tensor,
    w1_RC: Tensor,
    w2_SO: Tensor,
    static_CO: Tensor,
    bias_O: Tensor,
    scale: float,
) -> Tensor:
    weight_BCO = linear_weight(left_BPR, right_BPS, w1_RC, w2_SO, static_CO, scale, x_BNC.dtype)
    return torch.baddbmm(bias_O.to(x_BNC.dtype), x_BNC, weight_BCO)
