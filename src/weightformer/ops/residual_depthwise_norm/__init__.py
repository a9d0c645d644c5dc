"""A block's local mixing in one step: residual, depthwise convolution, LayerNorm (maths in README.md here)."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.precision import autocast_dtype
from weightformer.ops.residual_depthwise_norm import eager, reference

__all__ = ["residual_depthwise_norm"]


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
    size = kernel.shape[-1]
    one = (x.shape[3], size, size)
    if kernel.shape not in (one, (x.shape[0], *one)) or size % 2 == 0:
        raise ValueError(
            f"kernel {tuple(kernel.shape)} does not fit tokens {tuple(x.shape)}: expected (C, K, K) or (B, C, K, K), K odd"
        )
    forms = {
        "reference": reference.residual_depthwise_norm,
        "eager": eager.residual_depthwise_norm,
        "triton": on_demand("weightformer.ops.residual_depthwise_norm.triton", "residual_depthwise_norm"),
    }
    form = select("residual_depthwise_norm", forms, x)
    return form(x, kernel, bias, norm_weight, norm_bias, eps, autocast_dtype(x))
