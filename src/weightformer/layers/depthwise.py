"""Depthwise convolutions on channels-last tokens: one kernel for all images, or one predicted for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer import ops

__all__ = ["CONV_PREDICTORS", "DepthwiseConv2d", "DynamicDepthwiseConv2d"]

CONV_PREDICTORS = ("adaptive",)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution on tokens (B, H, W, C), same size out; the parameters are those of ``nn.Conv2d``."""

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class DynamicDepthwiseConv2d(nn.Module):
    """A depthwise convolution whose kernel is predicted from the image by spatially adaptive pooling (paper).

    ``kernel = dK / (||dK|| + 1) + weight`` with ``dK = conv1x1(gelu(conv1x1(region_mean(x))))`` and one norm per image
    and channel: region (i, j) of the image predicts tap (i, j) of its kernel.

    Args:
        channels: C.
        kernel_size: K, odd.
        predictor: how the kernel is predicted, one of `CONV_PREDICTORS`.

    Raises:
        ValueError: an unknown predictor or an even kernel size.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        *,
        predictor: str = "adaptive",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if predictor not in CONV_PREDICTORS:
            raise ValueError(f"unknown conv_predictor {predictor!r}; choose one of {', '.join(CONV_PREDICTORS)}")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.predictor = predictor
        self.channels, self.kernel_size = channels, kernel_size
        self.proj1 = nn.Conv2d(channels, channels, 1, **dd)
        self.proj2 = nn.Conv2d(channels, channels, 1, bias=False, **dd)
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, kernel_size, **dd))
        self.bias = nn.Parameter(torch.empty(channels, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's default for the two 1 x 1 convolutions, truncated normal 0.02 for the static kernel and bias."""
        self.proj1.reset_parameters()
        self.proj2.reset_parameters()
        nn.init.trunc_normal_(self.weight, std=0.02)
        nn.init.trunc_normal_(self.bias, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out."""
        return ops.dynamic_depthwise_conv2d(x, self.predict(x), self.bias)

    def predict(self, x: Tensor) -> Tensor:
        """The kernel (B, C, K, K) that `forward` applies to these tokens (B, H, W, C), in float32 at least."""
        return self.kernel(ops.region_mean(x, self.kernel_size))

    def kernel(self, region_means: Tensor) -> Tensor:
        """The kernel (B, C, K, K) predicted from the means (B, K, K, C) of the image's regions."""
        regions = region_means.permute(0, 3, 1, 2).to(self.proj1.weight.dtype)
        update = self.proj2(F.gelu(self.proj1(regions)))
        return ops.normalize_update(ops.wide(update), dim=(2, 3)) + self.weight.squeeze(1)

    def extra_repr(self) -> str:
        """The widths, for ``print(model)``."""
        return f"channels={self.channels}, kernel_size={self.kernel_size}"
