"""One block of the backbone: local mixing by a depthwise convolution, then an MLP, both static or both dynamic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from weightformer import ops
from weightformer.layers.depthwise import DepthwiseConv2d, DynamicDepthwiseConv2d
from weightformer.layers.dynamic_linear import DynamicLinear
from weightformer.ops.dispatch import capturing, exporting
from weightformer.ops.precision import autocasting

__all__ = ["Block", "untouched"]

_STATIC_PARTS = (DepthwiseConv2d, nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear)
_DYNAMIC_PARTS = (DynamicDepthwiseConv2d, nn.LayerNorm, DynamicLinear, nn.GELU, nn.Linear)
_STRIP_TOKENS = 2048  # few enough to stay in cache from the convolution to the second product
_STRIP_ROWS = 8  # at least, since every strip convolves a row more on either side


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

    def forward(self, x: Tensor, overwrite_x: bool = False) -> Tensor:
        """Tokens (B, H, W, C), same size out.

        Args:
            x: the tokens.
            overwrite_x: they are needed no more: where no gradient is recorded, the result may take their memory.
        """
        if not self._fuses():
            x = self.norm1(x)
            x = x + self.conv(x)
            return x + self.drop_path(self.fc2(self.act(self.fc1(self.norm2(x)))))
        strips = self._strips(x)
        if not strips:
            return self._fused(x)
        out = x if overwrite_x and x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        for image, result in zip(x.split(1), out.split(1), strict=True):
            self._fused_strips(image, result, strips)
        return out

    def _fuses(self) -> bool:
        """See `untouched`."""
        own = _DYNAMIC_PARTS if self.dynamic else _STATIC_PARTS
        return untouched(dict(zip((self.conv, self.norm2, self.fc1, self.act, self.fc2), own, strict=True)))

    def _fused(self, x: Tensor) -> Tensor:
        """`forward` in the ops that compute several of its steps at once."""
        x = self.norm1(x)
        x, y = self._mix(x, self._kernel(x))
        fc1: Any = self.fc1
        dropping = self.training and not isinstance(self.drop_path, nn.Identity)
        gate = self.drop_path(x.new_ones(len(x), 1, 1, 1)) if dropping else None
        return self._mlp(x, y, fc1.predict(y, y.dtype) if self.dynamic else fc1.weight, gate)

    def _fused_strips(self, x: Tensor, out: Tensor, strips: list[slice]) -> None:
        """The same for one image, strip by strip, from ``x`` to ``out``, which may be one tensor."""
        fc1: Any = self.fc1
        if not self.dynamic:
            for rows, y in self._mix_strips(x, out, self._kernel(x), strips):
                out[:, rows] = self._mlp(out[:, rows], y, fc1.weight)
            return
        for rows in strips:
            out[:, rows] = self.norm1(x[:, rows])
        mixed = self._mix_strips(out, out, self._kernel(out), strips)
        pooled = torch.cat([fc1.pooled(y) for _, y in mixed], dim=1)
        weight = fc1.weight_from(pooled, x.shape[1] * x.shape[2], x.dtype)
        for rows in strips:
            out[:, rows] = self._mlp(out[:, rows], self.norm2(out[:, rows]), weight)

    def _strips(self, x: Tensor) -> list[slice]:
        """The rows of each strip; none in an image of less than two, or where the prediction needs all rows at once."""
        height, width = x.shape[1:3]
        fc1: Any = self.fc1
        norm1 = {self.norm1: nn.LayerNorm if self.dynamic else nn.Identity}
        whole = self.training or torch.is_grad_enabled() or capturing() or autocasting(x) or x.device.type != "cpu"
        small = height * width < 2 * _STRIP_TOKENS
        if small or whole or (self.dynamic and fc1.regions) or not untouched(norm1):
            return []
        rows = max(_STRIP_ROWS, _STRIP_TOKENS // width // 2 * 2)  # even: no pair of rows to be pooled is torn
        return [slice(start, min(start + rows, height)) for start in range(0, height, rows)]

    def _kernel(self, x: Tensor) -> Tensor:
        conv: Any = self.conv
        return conv.predict(x) if self.dynamic else conv.weight.squeeze(1)

    def _mix(self, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """``z = x + conv(x)`` and ``norm2(z)``."""
        norm: Any = self.norm2
        conv: Any = self.conv
        return ops.depthwise_norm(x, kernel, conv.bias, norm.weight, norm.bias, norm.eps)

    def _mix_strips(
        self, x: Tensor, out: Tensor, kernel: Tensor, strips: list[slice]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Write z to ``out`` strip by strip, and yield ``norm2(z)`` of each; ``out`` may be ``x``."""
        halo = kernel.shape[-1] // 2
        above = x[:, :0]
        for rows in strips:
            window = torch.cat((above, x[:, rows.start : rows.stop + halo]), dim=1)
            inside = slice(above.shape[1], above.shape[1] + rows.stop - rows.start)
            z, y = self._mix(window, kernel)
            above = window[:, inside][:, -halo:].clone()  # a copy: the window is freed
            out[:, rows] = z[:, inside]
            del window, z
            yield rows, y[:, inside]

    def _mlp(self, x: Tensor, y: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
        """``x + gate * fc2(gelu(y weight))``; ``y`` may be overwritten."""
        fc1: Any = self.fc1
        fc2: Any = self.fc2
        return ops.mlp(x, y, weight, fc1.bias, fc2.weight, fc2.bias, gate=gate, overwrite_y=True)


def untouched(parts: Mapping[nn.Module, type[nn.Module]]) -> bool:
    """Whether an op may read the parameters of these modules, each of the class given, instead of calling them.

    Not in a graph captured to be exported, nor where someone hooked, replaced, parametrised or off-loaded a module.
    """
    return not (exporting() or torch.nn.modules.module._has_any_global_hook()) and all(
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        and "forward" not in vars(module)
        for module, kind in parts.items()
    )
