"""A depthwise convolution with its residual, and the LayerNorm that follows (forms in README.md here)."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.depthwise_norm import eager, reference
from weightformer.ops.dispatch import on_demand, select

__all__ = ["depthwise_norm"]


def depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``z = x + conv(x) + bias`` and ``layer_norm(z) * weight + shift``.

    Args:
        x: tokens (B, H, W, C).
        kernel: one odd-sided kernel a channel, for all images (C, K, K) or for each (B, C, K, K); zero padding.
        bias: of the convolution (C,).
        weight: of the norm (C,).
        shift: of the norm (C,).
        eps: of the norm.

    Returns:
        z and its normalised tokens, both (B, H, W, C).

    Raises:
        ValueError: the kernel's batch or channels differ from the tokens', or its side is even.
    """
    expected = x.shape[3:] if kernel.ndim == 3 else (x.shape[0], x.shape[3])
    if kernel.shape[:-2] != expected or kernel.shape[-1] % 2 == 0:
        raise ValueError(
            f"kernel {tuple(kernel.shape)} does not fit tokens {tuple(x.shape)}: expected (C, K, K) or (B, C, K, K), "
            "K odd"
        )
    forms = {
        "reference": reference.depthwise_norm,
        "eager": eager.depthwise_norm,
        "native": on_demand("weightformer.ops.depthwise_norm.native", "depthwise_norm"),
        "triton": on_demand("weightformer.ops.depthwise_norm.triton", "depthwise_norm"),
    }
    return select("depthwise_norm", forms, x)(x, kernel, bias, weight, shift, eps)
