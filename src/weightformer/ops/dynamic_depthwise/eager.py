"""Fast forms of the per-image depthwise convolution in plain PyTorch; `choose` picks one.

Suffixes: B images, H x W tokens, C channels, K kernel side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.dispatch import capturing

Form = Callable[[Tensor, Tensor, Tensor], Tensor]

__all__ = ["choose", "dynamic_depthwise_conv2d", "grouped", "per_image", "shifted"]


def grouped(x_BHWC: Tensor, kernel_BCKK: Tensor, bias_C: Tensor) -> Tensor:
    """One grouped convolution with the batch folded into the channels; copies to channels-first and back."""
    batch, height, width, channels = x_BHWC.shape
    size = kernel_BCKK.shape[-1]
    out = F.conv2d(
        x_BHWC.permute(0, 3, 1, 2).reshape(1, batch * channels, height, width),
        kernel_BCKK.reshape(batch * channels, 1, size, size),
        bias_C.repeat(batch),
        padding=size // 2,
        groups=batch * channels,
    )
    return out.view(batch, channels, height, width).permute(0, 2, 3, 1)


def per_image(x_BHWC: Tensor, kernel_BCKK: Tensor, bias_C: Tensor) -> Tensor:
    """One depthwise convolution an image, on channels-last views: no copies, best for few large images."""
    channels, size = kernel_BCKK.shape[1], kernel_BCKK.shape[-1]
    x_BCHW = x_BHWC.permute(0, 3, 1, 2)
    outputs = [
        F.conv2d(x_BCHW[i : i + 1], kernel_BCKK[i][:, None], bias_C, padding=size // 2, groups=channels)
        for i in range(len(x_BHWC))
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).permute(0, 2, 3, 1)


def shifted(x_BHWC: Tensor, kernel_BCKK: Tensor, bias_C: Tensor) -> Tensor:
    """K * K shifted multiply-adds: no batch size in any attribute, so it exports and compiles with free sizes."""
    _, height, width, _ = x_BHWC.shape
    size = kernel_BCKK.shape[-1]
    r = size // 2
    padded = F.pad(x_BHWC, (0, 0, r, r, r, r))
    taps = kernel_BCKK.permute(2, 3, 0, 1)[:, :, :, None, None, :]
    out = bias_C
    for i in range(size):
        for j in range(size):
            out = out + padded[:, i : i + height, j : j + width] * taps[i, j]
    return out


def choose(
    batch: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The form for these inputs. On a CPU, convolutions in half precision are several times slower than arithmetic."""
    if capturing() or batch == 0:
        return shifted
    if device.type == "cpu":
        if dtype in (torch.float16, torch.bfloat16):
            return shifted
        return per_image if tokens >= 1024 else grouped
    return grouped


def dynamic_depthwise_conv2d(x_BHWC: Tensor, kernel_BCKK: Tensor, bias_C: Tensor) -> Tensor:
    batch, height, width, _ = x_BHWC.shape
    form = choose(batch, height * width, x_BHWC.dtype, x_BHWC.device)
    return form(x_BHWC, kernel_BCKK.to(x_BHWC.dtype), bias_C.to(x_BHWC.dtype))
