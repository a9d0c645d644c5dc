"""Softmax attention written as what it is: an MLP, applied to every query, whose weights are predicted from the image.

Nothing in this package needs attention; this module states where the idea comes from (docs/idea.md) and is tested
against PyTorch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["AttentionMLP", "attention_mlp"]


def attention_mlp(query: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | None = None) -> Tensor:
    """``softmax(query w1) w2``: a two-layer MLP without biases, with softmax between its layers.

    With ``w1 = key^T / sqrt(D)`` and ``w2 = value`` this is scaled dot-product attention; its hidden width is the
    number of tokens that are attended to.

    Args:
        query: inputs of the MLP (..., N, D).
        w1: weight of its first layer (..., D, M).
        w2: weight of its second layer (..., M, E).
        mask: which hidden units an input may use, broadcast to (..., N, M): boolean (true where it may), or added to
            what enters the softmax. An input that may use none gives zero.

    Returns:
        (..., N, E)
    """
    hidden = query @ w1
    if mask is not None:
        hidden = hidden.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else hidden + mask
    none = hidden.amax(-1, keepdim=True) == -torch.inf
    return hidden.masked_fill(none, 0).softmax(-1).masked_fill(none, 0) @ w2


class AttentionMLP(nn.Module):
    """Multi-head self-attention as an MLP that `predict` makes for each image and head.

    The parameters are those of ``timm.layers.Attention`` and of its vision transformers, whose weights it loads.

    Args:
        dim: C.
        num_heads: heads; each has an MLP of its own with inputs of C / num_heads channels.
        qkv_bias: whether queries, keys and values have biases.

    Raises:
        ValueError: the width is no multiple of the number of heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"a width of {dim} cannot be shared by {num_heads} heads")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C), same size out.

        Args:
            x: the tokens.
            mask: which tokens each one may look at, broadcast to (B, heads, N, N); see `attention_mlp`.
        """
        y = attention_mlp(self._split(x)[0], *self.predict(x), mask)
        return self.proj(y.transpose(1, 2).flatten(2))

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the MLP for these tokens (B, N, C): (B, heads, D, N) and (B, heads, N, D), D = C / heads."""
        _, key, value = self._split(x)
        return key.mT * key.shape[-1] ** -0.5, value

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (B, heads, N, D)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
