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


def cheaper_order(tokens: int, r: int, s: int, c: int, o: int, expands: bool = True) -> str:
    """``"tokens"`` or ``"channels"``: the order of contraction with fewer multiply-adds.

    Both end in the norms and the product of `weight_from_factors`, over tokens or over R. Over tokens two expansions go
    before, over channels the Gram matrix and one expansion. Only the Gram matrix grows with many tokens. Where the left
    side has the input's width already (not ``expands``), its expansion falls away in both.
    """
    over_tokens = tokens * s * o + tokens * tokens * (c + o) + tokens * c * o
    over_channels = tokens * r * s + r * s * o
    if expands:
        over_tokens += tokens * r * c
        over_channels += r * r * o + r * c * o
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


def weight_from_factors(a_PC: Tensor | None, q_BPO: Tensor, static_CO: Tensor | None, normalize: bool = True) -> Tensor:
    """``dW / (||dW|| + 1) + static`` for ``dW = a^T q``, without forming dW.

    The squared column norms of dW are ``sum(q * (a a^T q))``, so the columns of the small q are scaled and one product
    writes the final weight. P may be any number; ``a`` may be one for all images, (P, C), or (B, P, C), or ``None`` for
    the identity.
    """
    if normalize:
        projected_BPO = q_BPO if a_PC is None else matmul(matmul(a_PC, a_PC.mT), q_BPO)
        squared_BO = (projected_BPO * q_BPO).sum(1, keepdim=True)
        # The clamp keeps the gradient of the root finite where the update is zero; 1e-12 vanishes beside the + 1.
        q_BPO = q_BPO / (squared_BO.clamp_min(1e-24).sqrt() + 1)
    static_CO = None if static_CO is None else wide(static_CO)
    if a_PC is not None:
        return matmul(a_PC.mT, q_BPO, add=static_CO)
    return q_BPO if static_CO is None else q_BPO + static_CO


def weight_from_gram(
    gram_BRS: Tensor,
    w1_RC: Tensor | None,
    w2_SO: Tensor,
    static_CO: Tensor | None,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """The predicted weight from the Gram matrix of the pooled tokens: ``dW = w1^T (scale * gram w2)``."""
    with full_precision(gram_BRS.device):
        a_RC = None if w1_RC is None else wide(w1_RC)
        return weight_from_factors(a_RC, matmul(gram_BRS * scale, wide(w2_SO)), static_CO, normalize)


def weight_from_tokens(
    left_BPR: Tensor,
    right_BPS: Tensor,
    w1_RC: Tensor | None,
    w2_SO: Tensor,
    static_CO: Tensor | None,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """The predicted weight from few tokens: ``dW = (left w1)^T (scale * right w2)``."""
    with full_precision(left_BPR.device):
        a_BPC = wide(left_BPR) if w1_RC is None else matmul(wide(left_BPR), wide(w1_RC))
        return weight_from_factors(a_BPC, matmul(wide(right_BPS) * scale, wide(w2_SO)), static_CO, normalize)


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
    pooled, r = left_BPR.shape[1:]
    s, o = w2_SO.shape
    c = r if w1_RC is None else w1_RC.shape[1]
    if cheaper_order(pooled, r, s, c, o, expands=w1_RC is not None) == "tokens":
        weight_BCO = weight_from_tokens(left_BPR, right_BPS, w1_RC, w2_SO, static_CO, scale, normalize)
    else:
        gram_BRS = gram(left_BPR, right_BPS)
        weight_BCO = weight_from_gram(gram_BRS, w1_RC, w2_SO, static_CO, scale, normalize)
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
    return torch.baddbmm(bias_O.to(x_BNC.dtype), x_BNC, weight_BCO)
