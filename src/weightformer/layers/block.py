"""One block of the backbone: local mixing by a depthwise convolution, then an MLP, both static or both dynamic."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from weightformer.layers.depthwise import DepthwiseConv2d, DynamicDepthwiseConv2d
from weightformer.layers.dynamic_linear import DynamicLinear

__all__ = ["Block"]


class Block(nn.Module):
    """``x = norm1(x); x = x + conv(x); x = x + fc2(gelu(fc1(norm2(x))))`` (paper, section 4).

    In a dynamic block the convolution and fc1 predict their weights from the image, and norm1 *replaces* the residual
    stream; a static block has no norm1. Only the MLP branch has a drop-path.

    Args:
        dim: C.
        mlp_ratio: hidden width of the MLP over C.
        dynamic: whether the block predicts its weights.
        linear_predictor: see `DynamicLinear`.
        conv_predictor: see `DynamicDepthwiseConv2d`.
        drop_path: probability of dropping the MLP branch of an image in training.
    """

    def __init__(
        self,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        dynamic: bool = False,
        linear_predictor: str = "bilateral",
        conv_predictor: str = "adaptive",
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = int(dim * mlp_ratio)
        self.dynamic = dynamic
        self.conv: nn.Module
        self.fc1: nn.Module
        if dynamic:
            self.norm1: nn.Module = nn.LayerNorm(dim, eps=1e-6, **dd)
            self.conv = DynamicDepthwiseConv2d(dim, predictor=conv_predictor, **dd)
            self.fc1 = DynamicLinear(dim, hidden, predictor=linear_predictor, **dd)
        else:
            self.norm1 = nn.Identity()
            self.conv = DepthwiseConv2d(dim, **dd)
            self.fc1 = nn.Linear(dim, hidden, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim, **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out."""
        x = self.norm1(x)
        x = x + self.conv(x)
        return x + self.drop_path(self.fc2(self.act(self.fc1(self.norm2(x)))))
