"""One block of the backbone: local mixing by a depthwise convolution, then an MLP, both static or both dynamic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from weightformer import ops
from weightformer.layers.depthwise import DepthwiseConv2d, DynamicDepthwiseConv2d
from weightformer.layers.dynamic_linear import DynamicLinear
from weightformer.ops.dispatch import exporting

__all__ = ["Block", "untouched"]

_STATIC_PARTS = (DepthwiseConv2d, nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear)
_DYNAMIC_PARTS = (DynamicDepthwiseConv2d, nn.LayerNorm, DynamicLinear, nn.GELU, nn.Linear)


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
        static_weight: see both; likewise the next.
        normalize: see both.
        pool: see `DynamicLinear`.
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
        static_weight: bool = True,
        normalize: bool = True,
        pool: int | str = 2,
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
            parts: dict[str, Any] = {"static_weight": static_weight, "normalize": normalize, **dd}
            self.conv = DynamicDepthwiseConv2d(dim, predictor=conv_predictor, **parts)
            self.fc1 = DynamicLinear(dim, hidden, predictor=linear_predictor, pool=pool, **parts)
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
        if self._fuses():
            return self._fused(x)
        x = self.norm1(x)
        x = x + self.conv(x)
        return x + self.drop_path(self.fc2(self.act(self.fc1(self.norm2(x)))))

    def _fuses(self) -> bool:
        """See `untouched`."""
        own = _DYNAMIC_PARTS if self.dynamic else _STATIC_PARTS
        return untouched(dict(zip((self.conv, self.norm2, self.fc1, self.act, self.fc2), own, strict=True)))

    def _fused(self, x: Tensor) -> Tensor:
        """`forward` in the ops that compute several of its steps at once."""
        x = self.norm1(x)
        conv: Any = self.conv
        fc1: Any = self.fc1
        fc2, norm = self.fc2, self.norm2
        kernel = conv.predict(x) if self.dynamic else conv.weight.squeeze(1)
        x, y = ops.depthwise_norm(x, kernel, conv.bias, norm.weight, norm.bias, norm.eps)
        weight = fc1.predict(y, y.dtype) if self.dynamic else fc1.weight
        dropping = self.training and not isinstance(self.drop_path, nn.Identity)
        gate = self.drop_path(x.new_ones(len(x), 1, 1, 1)) if dropping else None
        return ops.mlp(x, y, weight, fc1.bias, fc2.weight, fc2.bias, gate=gate, overwrite_y=True)


def untouched(parts: Mapping[nn.Module, type[nn.Module]]) -> bool:
    """Whether an op may read the parameters of these modules, each of the class given, instead of calling them.

    Not in a graph captured to be exported, nor where someone hooked, replaced, parametrised or off-loaded a module.
    """
    return not exporting() and all(
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and "forward" not in vars(module)
        for module, kind in parts.items()
    )
