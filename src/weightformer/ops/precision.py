"""Where reductions over tokens are computed: in float32 at least, and in float64 where the input is float64."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast", "autocasting", "full_precision", "normalize_update", "wide"]


def wide(x: Tensor) -> Tensor:
    """``x`` in float32 at least: half precision is widened, float32 and float64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast does not narrow matrix products: predicted weights are sums over all tokens."""
    if device.type == "meta":  # has no autocast; asking PyTorch breaks graph capture in torch 2.11
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocasting(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast would give a convolution; unchanged outside autocast and in float64."""
    if autocasting(x) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def normalize_update(update: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """``update / (||update|| + 1)``: keeps the norm of a predicted weight over ``dim`` below one, smoothly."""
    return update / (torch.linalg.vector_norm(update, dim=dim, keepdim=True) + 1)
