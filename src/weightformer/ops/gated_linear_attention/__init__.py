"""Attention without softmax whose memory of the tokens before decays (arXiv 2312.06635): the mixer of a baseline."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import select
from weightformer.ops.gated_linear_attention import eager, reference

__all__ = ["gated_linear_attention"]


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """``y_n = K^-0.5 q_n S_n`` with ``S_n = exp(log_decay_n) S_(n-1) + k_n^T v_n``, S_0 = 0.

    The state S (K, V) of each head is all that a token sees of those before it, so the cost is linear in N. The decay
    acts on its rows. Sums over tokens are taken in float32 at least.

    Args:
        q: queries (B, heads, N, K); at least one token.
        k: keys, likewise.
        v: values (B, heads, N, V).
        log_decay: logarithms of the decay (B, heads, N, K), zero or negative.

    Returns:
        (B, heads, N, V) in the dtype of ``q``.
    """
    forms = {
        "reference": reference.gated_linear_attention,
        "eager": eager.gated_linear_attention,
        "native": eager.gated_linear_attention,  # nothing to add in C++
        "triton": eager.gated_linear_attention,  # a baseline: flash-linear-attention has the kernels
    }
    return select("gated_linear_attention", forms, q)(q, k, v, log_decay)
