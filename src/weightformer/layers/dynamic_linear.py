"""The linear layer whose weight is predicted from the tokens it is applied to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer import ops

__all__ = ["LINEAR_PREDICTORS", "POOLS", "DynamicLinear"]

LINEAR_PREDICTORS = ("gap", "linear", "nonlinear", "deep", "bilateral")
POOLS = ("1", "2", "7x7")


class DynamicLinear(nn.Module):
    """``Y = X W + bias`` with ``W = dW / (||dW|| + 1) + weight`` predicted from the tokens X (paper, section 3).

    ``dW = scale * A^T D``, where the factors A (P, C) and D (P, O) come from the pooled tokens Xp (P, C). How they do
    is the strategy; ``bilateral`` is the released one, the others are inferred from the paper's figures:

    | predictor | A | D |
    |---|---|---|
    | ``gap`` | as ``bilateral``, with the mean token for Xp (P = 1) | |
    | ``linear`` | ``Xp w1`` | ``Xp w2`` |
    | ``nonlinear`` | ``Xp`` | ``silu(Xp Wa) w2`` |
    | ``deep`` | ``Xp`` | ``silu(silu(Xp Wa) Wb) w2`` |
    | ``bilateral`` | ``silu(Xp Wa) w1`` | ``silu(Xp Wb) w2`` |

    The projections have biases; those of a left side are C / 4 wide, those of a right side O / 4. At initialisation the
    predicted part is small: every factor is drawn with standard deviation 0.02.

    Args:
        in_features: C; a multiple of 4.
        out_features: O; a multiple of 4.
        predictor: the strategy, one of `LINEAR_PREDICTORS`.
        static_weight: whether the static part ``weight`` is added.
        normalize: whether dW is divided by ``||dW|| + 1``, one norm per output column.
        pool: how tokens are pooled for the prediction: 2 averages every 2 x 2 of them (released), 1 takes each as it
            is, ``"7x7"`` averages over 7 x 7 regions of the grid (the paper's pictures; on 14 x 14 tokens the same
            as 2).

    Raises:
        ValueError: an unknown predictor or pool, a pool for ``gap``, or a width that is no multiple of 4.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        predictor: str = "bilateral",
        static_weight: bool = True,
        normalize: bool = True,
        pool: int | str = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if predictor not in LINEAR_PREDICTORS:
            raise ValueError(f"unknown linear_predictor {predictor!r}; choose one of {', '.join(LINEAR_PREDICTORS)}")
        if str(pool) not in POOLS:
            raise ValueError(f"unknown pool {pool!r}; choose one of {', '.join(POOLS)}")
        if predictor == "gap" and str(pool) != "2":
            raise ValueError(f"pool={pool!r} does not apply to linear_predictor 'gap', which pools to one token")
        if in_features % 4 or out_features % 4:
            raise ValueError(f"DynamicLinear needs widths that are multiples of 4, got {in_features} -> {out_features}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.predictor, self.normalize, self.pool = predictor, normalize, str(pool)
        self.in_features, self.out_features = in_features, out_features
        left, right = in_features // 4, out_features // 4
        self.ranks: tuple[int, int]
        self.w1: nn.Parameter | None = None
        if predictor in ("gap", "bilateral"):
            self.ranks = (left, right)
            self.proj = nn.Linear(in_features, left + right, **dd)
        elif predictor == "linear":
            self.ranks = (in_features, in_features)
        else:
            self.ranks = (in_features, right)
            self.proj = nn.Linear(in_features, right, **dd)
            if predictor == "deep":
                self.proj2 = nn.Linear(right, right, **dd)
        if predictor in ("gap", "linear", "bilateral"):
            self.w1 = nn.Parameter(torch.empty(self.ranks[0], in_features, **dd))
        self.w2 = nn.Parameter(torch.empty(self.ranks[1], out_features, **dd))
        self.weight = nn.Parameter(torch.empty(in_features, out_features, **dd)) if static_weight else None
        self.bias = nn.Parameter(torch.empty(out_features, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The released initialisation: truncated normal 0.02, the bias included; the projections' biases are 0."""
        projections = [module for module in self.children() if isinstance(module, nn.Linear)]
        for weight in (*(p.weight for p in projections), self.w1, self.w2, self.weight, self.bias):
            if weight is not None:
                nn.init.trunc_normal_(weight, std=0.02)
        for projection in projections:
            nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C) to (B, H, W, O)."""
        left, right = self.factors(x)
        scale = self.scale(x.shape[1] * x.shape[2])
        y = ops.dynamic_linear(
            x.flatten(1, 2), left, right, self.w1, self.w2, self.weight, self.bias, scale, self.normalize
        )
        return y.unflatten(1, x.shape[1:3])

    def predict(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (B, C, O) that `forward` applies to these tokens (B, H, W, C).

        Args:
            x: the tokens.
            dtype: of the weight; by default float32 at least.
        """
        return self.weight_from(self.pooled(x), x.shape[1] * x.shape[2], dtype)

    def weight_from(self, pooled: Tensor, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same from the pooled tokens (B, P, C) of a grid of so many tokens."""
        left, right = self.features(pooled)
        scale = self.scale(num_tokens)
        return ops.linear_weight(left, right, self.w1, self.w2, self.weight, scale, dtype, self.normalize)

    def pooled(self, x: Tensor) -> Tensor:
        """The tokens (B, H, W, C) as the prediction sees them: (B, P, C)."""
        if self.regions:
            return ops.region_mean(x, self.regions).to(x.dtype).flatten(1, 2)
        return (ops.pool_2x2(x) if self.pool == "2" else x).flatten(1, 2)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the tokens (B, H, W, C) contribute to A and D, before w1 and w2: (B, P, R) and (B, P, S)."""
        return self.features(self.pooled(x))

    def features(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """What the pooled tokens (B, P, C) contribute, as in `factors`."""
        if self.predictor == "linear":
            return pooled, pooled
        hidden = F.silu(self.proj(pooled))
        if self.predictor == "nonlinear":
            return pooled, hidden
        if self.predictor == "deep":
            return pooled, F.silu(self.proj2(hidden))
        left, right = hidden.split(self.ranks, dim=-1)
        return left, right

    @property
    def regions(self) -> int:
        """Regions a side that tokens are pooled to, whatever the size of the grid; 0 where P grows with the grid."""
        return 1 if self.predictor == "gap" else 7 if self.pool == "7x7" else 0

    def scale(self, num_tokens: int) -> float:
        """``C^-0.5 / N`` for N tokens; where they are not pooled by 2 x 2, N is four times the pooled ones instead."""
        if self.regions:
            num_tokens = 4 * self.regions**2
        elif self.pool == "1":
            num_tokens = 4 * num_tokens
        return self.in_features**-0.5 / num_tokens

    def extra_repr(self) -> str:
        """The widths, and what differs from the released layer, for ``print(model)``."""
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"predictor={self.predictor!r}"] * (self.predictor != "bilateral")
        parts += ["static_weight=False"] * (self.weight is None) + ["normalize=False"] * (not self.normalize)
        parts += [f"pool={self.pool}"] * (self.pool != "2")
        return ", ".join(parts)
