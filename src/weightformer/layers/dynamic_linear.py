"""The linear layer whose weight is predicted from the tokens it is applied to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer import ops

__all__ = ["LINEAR_PREDICTORS", "DynamicLinear"]

LINEAR_PREDICTORS = ("bilateral",)


class DynamicLinear(nn.Module):
    """``Y = X W + bias`` with ``W = dW / (||dW|| + 1) + weight`` predicted by bilateral activation (paper, section 3).

    ``dW = C^-0.5 / N * (silu(a) w1)^T (silu(b) w2)``, where ``a, b`` are the two halves of one projection of the
    2 x 2 pooled tokens and N counts the tokens before pooling. At initialisation the predicted part is small: its
    factors are drawn with standard deviation 0.02.

    Args:
        in_features: C; a multiple of 4.
        out_features: O; a multiple of 4.
        predictor: how the weight is predicted, one of `LINEAR_PREDICTORS`.

    Raises:
        ValueError: an unknown predictor, or a width that is no multiple of 4.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        predictor: str = "bilateral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if predictor not in LINEAR_PREDICTORS:
            raise ValueError(f"unknown linear_predictor {predictor!r}; choose one of {', '.join(LINEAR_PREDICTORS)}")
        if in_features % 4 or out_features % 4:
            raise ValueError(f"DynamicLinear needs widths that are multiples of 4, got {in_features} -> {out_features}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.predictor = predictor
        self.in_features, self.out_features = in_features, out_features
        self.ranks = (in_features // 4, out_features // 4)
        self.proj = nn.Linear(in_features, sum(self.ranks), **dd)
        self.w1 = nn.Parameter(torch.empty(self.ranks[0], in_features, **dd))
        self.w2 = nn.Parameter(torch.empty(self.ranks[1], out_features, **dd))
        self.weight = nn.Parameter(torch.empty(in_features, out_features, **dd))
        self.bias = nn.Parameter(torch.empty(out_features, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The released initialisation: truncated normal 0.02, the bias included; the projection's bias is 0."""
        for weight in (self.proj.weight, self.w1, self.w2, self.weight, self.bias):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C) to (B, H, W, O)."""
        left, right = self.factors(x)
        y = ops.dynamic_linear(x.flatten(1, 2), left, right, self.w1, self.w2, self.weight, self.bias, self.scale(x))
        return y.unflatten(1, x.shape[1:3])

    def predict(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (B, C, O) that `forward` applies to these tokens (B, H, W, C).

        Args:
            x: the tokens.
            dtype: of the weight; by default float32 at least.
        """
        left, right = self.factors(x)
        return ops.linear_weight(left, right, self.w1, self.w2, self.weight, self.scale(x), dtype)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The activated features of the pooled tokens, (B, P, C / 4) and (B, P, O / 4)."""
        left, right = F.silu(self.proj(ops.pool_2x2(x).flatten(1, 2))).split(self.ranks, dim=-1)
        return left, right

    def scale(self, x: Tensor) -> float:
        """``C^-0.5 / N`` for tokens (B, H, W, C)."""
        return self.in_features**-0.5 / (x.shape[1] * x.shape[2])

    def extra_repr(self) -> str:
        """The widths, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
