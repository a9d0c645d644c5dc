"""Where reductions over tokens are computed: in float32 at least, and in float64 where the input is float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["full_precision", "normalize_update", "wide"]


def wide(x: Tensor) -> Tensor:
    """``x`` in float32 at least: half precision is widened, float32 and float64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(device: torch.device) -> torch.autocast:
    """A context in which autocast does not narrow matrix products: predicted weights are sums over all tokens."""
    return torch.autocast(device.type, enabled=False)


def normalize_update(update: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """``update / (||update|| + 1)``: keeps the norm of a predicted weight over ``dim`` below one, smoothly."""
    return update / (torch.linalg.vector_norm(update, dim=dim, keepdim=True) + 1)
