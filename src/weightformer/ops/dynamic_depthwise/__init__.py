"""A depthwise convolution in which every image has its own kernel (maths in README.md here)."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.dynamic_depthwise import eager, reference
from weightformer.ops.precision import autocast

__all__ = ["dynamic_depthwise_conv2d"]


def dynamic_depthwise_conv2d(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """``y[b, :, :, c] = x[b, :, :, c] * kernel[b, c] + bias[c]``, zero padding, stride 1.

    Args:
        x: tokens (B, H, W, C).
        kernel: one odd-sided kernel per image and channel (B, C, K, K).
        bias: (C,).

    Returns:
        (B, H, W, C) in the dtype of ``x``, or in autocast's unless ``x`` is float64.

    Raises:
        ValueError: the kernel's batch or channels differ from the tokens', or it is not square with an odd side.
    """
    size = kernel.shape[-1]
    if kernel.shape != (x.shape[0], x.shape[3], size, size) or size % 2 == 0:
        raise ValueError(
            f"kernel {tuple(kernel.shape)} does not fit tokens {tuple(x.shape)}: expected (B, C, K, K), K odd"
        )
    forms = {
        "reference": reference.dynamic_depthwise_conv2d,
        "eager": eager.dynamic_depthwise_conv2d,
        "native": on_demand("weightformer.ops.dynamic_depthwise.native", "dynamic_depthwise_conv2d"),
        "triton": on_demand("weightformer.ops.dynamic_depthwise.triton", "dynamic_depthwise_conv2d"),
    }
    return select("dynamic_depthwise_conv2d", forms, x)(autocast(x), kernel, bias)
