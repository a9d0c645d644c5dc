"""Matrix products on a CPU.

torch sends float32 products to MKL, which keeps to narrow vectors on processors of another maker: half the speed of
oneDNN on an AMD core with AVX-512. oneDNN's product with its epilogues is the operator that torch.compile emits for CPUs;
where it is missing, or for another dtype, `product` is the plain operator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["accelerated", "product"]


def accelerated(x: Tensor) -> bool:
    """Whether `product` has a faster way than torch's own product for this tensor."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled  # type: ignore[truthy-function]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: str | None = None, add: Tensor | None = None
) -> Tensor:
    """``x weight^T + bias``, then GELU, or plus ``add``; without autograd.

    Args:
        x: (M, K), any strides.
        weight: (N, K), any strides.
        bias: (N,).
        gelu: ``"none"`` (exact) or ``"tanh"``, as in ``F.gelu``.
        add: (M, N).
    """
    if not accelerated(x):
        y = F.linear(x, weight, bias)
        y = y if gelu is None else F.gelu(y, approximate=gelu)
        return y if add is None else y.add_(add)
    if add is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, weight, bias, "add")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none" if gelu is None else "gelu", [], gelu)
