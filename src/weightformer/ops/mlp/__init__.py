"""The MLP of a block with its residual: two products and a GELU (forms in README.md here)."""

from __future__ import annotations

from torch import Tensor

from weightformer.ops.dispatch import on_demand, select
from weightformer.ops.mlp import eager, reference

__all__ = ["mlp"]


def mlp(
    x: Tensor,
    y: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    gate: Tensor | None = None,
    approximate: str = "none",
    overwrite_y: bool = False,
) -> Tensor:
    """``x + gate * (gelu(y w1 + b1) w2 + b2)``.

    Args:
        x: the residual stream (B, H, W, C).
        y: normalised tokens (B, H, W, C).
        w1: one weight for all images (O, C), in the layout of ``nn.Linear``, or one an image (B, C, O).
        b1: (O,).
        w2: (C, O), in the layout of ``nn.Linear``.
        b2: (C,).
        gate: factor of the branch (B, 1, 1, 1) or (B, 1, 1, C): a drop-path mask, or a learned gate.
        approximate: ``"none"`` or ``"tanh"``, as in ``F.gelu``.
        overwrite_y: ``y`` is needed no more: where no gradient is recorded, the result may take its memory.

    Returns:
        (B, H, W, C).

    Raises:
        ValueError: the shapes do not fit together.
    """
    hidden, channels = w2.shape[1], x.shape[-1]
    expected = (hidden, channels) if w1.ndim == 2 else (x.shape[0], channels, hidden)
    if y.shape != x.shape or w2.shape[0] != channels or tuple(w1.shape) != expected:
        raise ValueError(
            f"tokens {tuple(x.shape)} and {tuple(y.shape)} do not fit weights {tuple(w1.shape)} and {tuple(w2.shape)}"
        )
    forms = {
        "reference": reference.mlp,
        "eager": eager.mlp,
        "native": on_demand("weightformer.ops.mlp.native", "mlp"),
        "triton": on_demand("weightformer.ops.mlp.triton", "mlp"),
    }
    return select("mlp", forms, x)(x, y, w1, b1, w2, b2, gate, approximate, overwrite_y)
