"""A block's local mixing in one step: residual, depthwise convolution, LayerNorm (maths in README.md here)."""

from __future__ import annotations

import torch
from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.residual_depthwise_norm import eager, reference

__all__ = ["residual_depthwise_norm"]

_FORMS = {
    "reference": reference.residual_depthwise_norm,
    "eager": eager.residual_depthwise_norm,
    "triton": on_demand("weightformer.ops.residual_depthwise_norm.triton", "residual_depthwise_norm"),
}


def residual_depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``stream = x + conv(x) + bias`` and ``normed = LayerNorm(stream)``, zero padding, stride 1.

    Args:
        x: tokens (B, H, W, C).
        kernel: an odd-sided kernel per channel (C, K, K), or per image and channel (B, C, K, K).
        bias: of the convolution (C,).
        norm_weight: of the LayerNorm over channels (C,).
        norm_bias: likewise (C,).
        eps: of the LayerNorm.

    Returns:
        The stream (B, H, W, C) in the dtype of ``x``, and the normed tokens (B, H, W, C) in that dtype or in autocast's:
        what follows the norm is a matrix product, what follows the stream a sum.

    Raises:
        ValueError: the kernel does not fit the tokens, or its side is even.
    """
    fits = kernel.shape[-3] == x.shape[3] and (kernel.ndim == 3 or (kernel.ndim == 4 and len(kernel) == len(x)))
    if not fits or kernel.shape[-1] % 2 == 0:
        raise ValueError(
            f"kernel {tuple(kernel.shape)} does not fit tokens {tuple(x.shape)}: expected (C, K, K) or (B, C, K, K), K odd"
        )
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return select("residual_depthwise_norm", _FORMS, x)(x, kernel, bias, norm_weight, norm_bias, eps, dtype)
