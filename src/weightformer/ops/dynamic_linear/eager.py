"""Fast forms of the dynamic linear layer in plain PyTorch.

Suffixes: B images, N tokens, P pooled tokens, C input and O output channels, R and S the two ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.dispatch import capturing
from weightformer.ops.precision import full_precision, wide
from weightformer.ops.products import matmul

__all__ = [
    "cheaper_order",
    "dynamic_linear",
    "gram",
    "linear_weight",
    "weight_from_factors",
    "weight_from_gram",
    "weight_from_tokens",
]


def cheaper_order(tokens: int, r: int, s: int, c: int, o: int) -> str:
    """``"tokens"`` or ``"channels"``: the order of contraction with fewer multiply-adds.

    Both end in the norms and the product of `weight_from_factors`, over tokens or over R. Over tokens two expansions go
    before, over channels the Gram matrix and one expansion. Only the Gram matrix grows with many tokens.
    """
    over_tokens = tokens * (r * c + s * o) + tokens * tokens * (c + o) + tokens * c * o
    over_channels = tokens * r * s + r * s * o + r * r * o + r * c * o
    if capturing():  # a free token count must not be compared: the graph would hold for one side only
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        fewer = over_tokens < over_channels  # a tensor where torch.jit traces
        return "tokens" if not isinstance(fewer, Tensor) and statically_known_true(fewer) else "channels"
    return "tokens" if over_tokens < over_channels else "channels"


def gram(left_BPR: Tensor, right_BPS: Tensor) -> Tensor:
    """``left^T right`` (B, R, S), in float32 at least: the only part of the weight that sees tokens."""
    with full_precision(left_BPR.device):
        left, right = wide(left_BPR).mT, wide(right_BPS)
        # in a graph, `@` would bar batch 1 where the example had batch 2
        return torch.bmm(left, right) if capturing() else matmul(left, right)


def weight_from_factors(a_PC: Tensor, q_BPO: Tensor, static_CO: Tensor) -> Tensor:
    """``dW / (||dW|| + 1) + static`` for ``dW = a^T q``, without forming dW.

    The squared column norms of dW are ``sum(q * (a a^T q))``, so the columns of the small q are scaled and one product
    writes the final weight. P may be any number; ``a`` may be one for all images, (P, C), or (B, P, C).
    """
    squared_BO = (matmul(matmul(a_PC, a_PC.mT), q_BPO) * q_BPO).sum(1, keepdim=True)
    # The clamp keeps the gradient of the root finite where the update is zero; 1e-12 vanishes beside the + 1.
    q_BPO = q_BPO / (squared_BO.clamp_min(1e-24).sqrt() + 1)
    return matmul(a_PC.mT, q_BPO, add=wide(static_CO))


def weight_from_gram(gram_BRS: Tensor, w1_RC: Tensor, w2_SO: Tensor, static_CO: Tensor, scale: float) -> Tensor:
    """The predicted weight from the Gram matrix of the pooled tokens: ``dW = w1^T (scale * gram w2)``."""
    with full_precision(gram_BRS.device):
        return weight_from_factors(wide(w1_RC), matmul(gram_BRS * scale, wide(w2_SO)), static_CO)


def weight_from_tokens(
    left_BPR: Tensor, right_BPS: Tensor, w1_RC: Tensor, w2_SO: Tensor, static_CO: Tensor, scale: float
) -> Tensor:
    """The predicted weight from few tokens: ``dW = (left w1)^T (scale * right w2)``."""
    with full_precision(left_BPR.device):
        a_BPC = matmul(wide(left_BPR), wide(w1_RC))
        return weight_from_factors(a_BPC, matmul(wide(right_BPS) * scale, wide(w2_SO)), static_CO)


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
    if cheaper_order(pooled, r, s, c, o) == "tokens":
        weight_BCO = weight_from_tokens(left_BPR, right_BPS, w1_RC, w2_SO, static_CO, scale)
    else:
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
