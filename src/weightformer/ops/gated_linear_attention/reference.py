"""Gated linear attention as its recurrence, one token after another.

Suffixes: B images, H heads, N tokens, K channels of queries and keys, V of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.precision import full_precision, wide

__all__ = ["gated_linear_attention"]


def gated_linear_attention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay_BHNK: Tensor) -> Tensor:
    q, k, v, log_decay = (wide(t) for t in (q_BHNK, k_BHNK, v_BHNV, log_decay_BHNK))
    state_BHKV = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    with full_precision(q.device):
        for n in range(q.shape[2]):
            written_BHKV = k[:, :, n, :, None] @ v[:, :, n, None, :]
            state_BHKV = log_decay[:, :, n, :, None].exp() * state_BHKV + written_BHKV
            outputs.append(q[:, :, n, None, :] @ state_BHKV)
    return (torch.cat(outputs, dim=2) * q.shape[-1] ** -0.5).to(q_BHNK.dtype)
