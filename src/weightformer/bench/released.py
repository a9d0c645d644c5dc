"""The released order of operations, as a baseline to measure against.

The same function and the same state dict as `weightformer.models.WeightFormer`; what differs is how it is computed:
tokens (B, N, C) make a round trip to channels-first around every convolution, the predicted weight is contracted over
tokens and normalised at full size, the batch is folded into the groups of one convolution, and no pass is fused.
For measurements only: nothing else in the package uses it.

Suffixes: B images, N = H x W tokens, P pooled tokens, C input and O output channels, K kernel side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer.layers import DepthwiseConv2d
from weightformer.models import WeightFormer

__all__ = ["ReleasedWeightFormer"]


def _to_map(x_BNC: Tensor, size: tuple[int, int]) -> Tensor:
    return x_BNC.transpose(1, 2).unflatten(2, size).contiguous()


def _to_tokens(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.flatten(2).transpose(1, 2).contiguous()


def _static_conv(conv: DepthwiseConv2d, x_BNC: Tensor, size: tuple[int, int]) -> Tensor:
    return _to_tokens(nn.Conv2d.forward(conv, _to_map(x_BNC, size)))


def _dynamic_conv(conv: Any, x_BNC: Tensor, size: tuple[int, int]) -> Tensor:
    x_BCHW = _to_map(x_BNC, size)
    batch, channels, k = len(x_BCHW), conv.channels, conv.kernel_size
    pooled = F.adaptive_avg_pool2d(x_BCHW, k)  # noqa: TID251  # the released order, never exported
    update_BCKK = conv.proj2(F.gelu(conv.proj1(pooled)))
    norm = torch.linalg.vector_norm(update_BCKK, dim=(2, 3), keepdim=True)
    kernel_BCKK = update_BCKK / (norm + 1) + conv.weight.squeeze(1)
    y = F.conv2d(
        x_BCHW.reshape(1, batch * channels, *size),
        kernel_BCKK.reshape(batch * channels, 1, k, k),
        padding=k // 2,
        groups=batch * channels,
    )
    return _to_tokens(y.view(batch, channels, *size) + conv.bias[:, None, None])


def _dynamic_linear(fc: Any, x_BNC: Tensor, size: tuple[int, int]) -> Tensor:
    x_BPC = _to_tokens(F.avg_pool2d(_to_map(x_BNC, size), 2))
    a, b = fc.proj(x_BPC).split(fc.ranks, dim=-1)
    left_BPC, right_BPO = F.silu(a) @ fc.w1, F.silu(b) @ fc.w2
    update_BCO = left_BPC.transpose(1, 2) @ right_BPO * (fc.in_features**-0.5 / x_BNC.shape[1])
    norm = torch.linalg.vector_norm(update_BCO, dim=1, keepdim=True)
    return x_BNC @ (update_BCO / (norm + 1) + fc.weight) + fc.bias


def _block(block: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    if block.dynamic:
        x = block.norm1(x)
        x = x + _dynamic_conv(block.conv, x, size)
        hidden = _dynamic_linear(block.fc1, block.norm2(x), size)
    else:
        x = x + _static_conv(block.conv, x, size)
        hidden = block.fc1(block.norm2(x))
    return x + block.drop_path(block.fc2(block.act(hidden)))


class ReleasedWeightFormer(WeightFormer):
    """A `WeightFormer` that computes in the released order; takes the same arguments and state dict."""

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to normalised tokens (B, H, W, C)."""
        x = self.patch_embed(x)
        size = (x.shape[1], x.shape[2])
        x = self.embed_norm(x.flatten(1, 2))
        for block in self.blocks:
            x = self._run(block, x, size)
        return self.norm(x).unflatten(1, size)

    def _run(self, block: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(_block, block, x, size, use_reentrant=False)
        return _block(block, x, size)
