"""Gated linear attention in chunks: inside a chunk all pairs of tokens at once, from chunk to chunk the recurrence.

Suffixes: B images, H heads, N tokens, T chunks, L tokens a chunk, K channels of queries and keys, V of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.precision import full_precision, wide

__all__ = ["gated_linear_attention"]

_CHUNK = 16  # pairs cost L * L * K a chunk in memory


def gated_linear_attention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay_BHNK: Tensor) -> Tensor:
    """Exact for every decay: only decays from an earlier token to a later one are exponentiated, so none overflows."""
    tokens, size = q_BHNK.shape[2:]
    pad = -tokens % _CHUNK
    q_BHTLK, k_BHTLK, v_BHTLV, log_decay_BHTLK = (
        F.pad(wide(t), (0, 0, 0, pad)).unflatten(2, (-1, _CHUNK)) for t in (q_BHNK, k_BHNK, v_BHNV, log_decay_BHNK)
    )
    with full_precision(q_BHNK.device):
        since_start_BHTLK = log_decay_BHTLK.cumsum(3)
        until_end_BHTLK = since_start_BHTLK[:, :, :, -1:] - since_start_BHTLK
        earlier_LL = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q_BHNK.device).tril()
        between_BHTLLK = since_start_BHTLK[:, :, :, :, None] - since_start_BHTLK[:, :, :, None]
        between_BHTLLK = between_BHTLLK.masked_fill(~earlier_LL[:, :, None], -torch.inf).exp()
        pairs_BHTLL = (q_BHTLK[:, :, :, :, None] * k_BHTLK[:, :, :, None] * between_BHTLLK).sum(-1)
        within_BHTLV = pairs_BHTLL @ v_BHTLV

        written_BHTKV = (k_BHTLK * until_end_BHTLK.exp()).mT @ v_BHTLV
        kept_BHTK = since_start_BHTLK[:, :, :, -1].exp()
        state_BHKV = torch.zeros_like(written_BHTKV[:, :, 0])
        states = []
        for t in range(written_BHTKV.shape[2]):
            states.append(state_BHKV)
            state_BHKV = kept_BHTK[:, :, t, :, None] * state_BHKV + written_BHTKV[:, :, t]
        before_BHTLV = (q_BHTLK * since_start_BHTLK.exp()) @ torch.stack(states, dim=2)
        y_BHNV = (within_BHTLV + before_BHTLV).flatten(2, 3)[:, :, :tokens]
    return (y_BHNV * size**-0.5).to(q_BHNK.dtype)
