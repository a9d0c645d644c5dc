"""Convolution, residual and norm in plain PyTorch: in full precision the residual is one more tap of the kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.ops.depthwise_norm.reference import static_depthwise
from weightformer.ops.dynamic_depthwise.eager import dynamic_depthwise_conv2d
from weightformer.ops.precision import autocast, autocasting

__all__ = ["depthwise_norm"]


def depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    # In half precision 1 + w would lose the small w, so the residual stays an addition there.
    folds = x.dtype in (torch.float32, torch.float64) and not autocasting(x)
    if folds:
        kernel = _with_residual(kernel)
    y = static_depthwise(x, kernel, bias) if kernel.ndim == 3 else dynamic_depthwise_conv2d(autocast(x), kernel, bias)
    z = y if folds else x + y
    return z, F.layer_norm(z, z.shape[-1:], weight, shift, eps)


def _with_residual(kernel: Tensor) -> Tensor:
    """The kernel of ``x + conv(x)``: one more in the middle."""
    size = kernel.shape[-1]
    identity = torch.zeros(size * size, dtype=kernel.dtype, device=kernel.device)
    identity[size * size // 2] = 1
    return kernel + identity.view(size, size)
