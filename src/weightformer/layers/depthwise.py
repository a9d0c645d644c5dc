"""Depthwise convolutions on channels-last tokens: one kernel for all images, or one predicted for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer import ops

__all__ = ["CONV_PREDICTORS", "DepthwiseConv2d", "DynamicDepthwiseConv2d"]

CONV_PREDICTORS = ("gap", "adaptive", "amp_dir", "conv")


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution on tokens (B, H, W, C), same size out; the parameters are those of ``nn.Conv2d``."""

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=bias, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class DynamicDepthwiseConv2d(nn.Module):
    r"""A depthwise convolution whose kernel is predicted from the image (paper, section 4).

    ``kernel = dK / (||dK|| + 1) + weight`` with one norm per image and channel. How dK comes from the tokens x is the
    strategy; ``adaptive`` is the released one, the others are inferred from the paper's figures:

    | predictor | dK (C, K, K) |
    |---|---|
    | ``gap`` | ``conv1x1(gelu(conv1x1(mean(x))))``, C to C / 4 to C K K channels |
    | ``adaptive`` | ``conv1x1(gelu(conv1x1(region_mean(x))))``: region (i, j) of the image predicts tap (i, j) |
    | ``amp_dir`` | ``a D / \|\|D\|\|``, D as in ``adaptive``, an amplitude a channel ``a = linear(mean(x))`` |
    | ``conv`` | ``region_mean(dwconv3x3(gelu(dwconv3x3(x))))`` |

    Args:
        channels: C.
        kernel_size: K, odd.
        predictor: the strategy, one of `CONV_PREDICTORS`.
        static_weight: whether the static part ``weight`` is added.
        normalize: whether dK is divided by ``||dK|| + 1``.

    Raises:
        ValueError: an unknown predictor or an even kernel size.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        *,
        predictor: str = "adaptive",
        static_weight: bool = True,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if predictor not in CONV_PREDICTORS:
            raise ValueError(f"unknown conv_predictor {predictor!r}; choose one of {', '.join(CONV_PREDICTORS)}")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.predictor, self.normalize = predictor, normalize
        self.channels, self.kernel_size = channels, kernel_size
        self.proj1: nn.Conv2d
        self.proj2: nn.Conv2d
        if predictor == "conv":
            self.proj1 = DepthwiseConv2d(channels, **dd)
            self.proj2 = DepthwiseConv2d(channels, bias=False, **dd)
        else:
            hidden, taps = (-(-channels // 4), kernel_size**2) if predictor == "gap" else (channels, 1)
            self.proj1 = nn.Conv2d(channels, hidden, 1, **dd)
            self.proj2 = nn.Conv2d(hidden, channels * taps, 1, bias=False, **dd)
        if predictor == "amp_dir":
            self.amplitude = nn.Linear(channels, channels, **dd)
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, kernel_size, **dd)) if static_weight else None
        self.bias = nn.Parameter(torch.empty(channels, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's default for the convolutions of the predictor, truncated normal 0.02 for all else."""
        self.proj1.reset_parameters()
        self.proj2.reset_parameters()
        if self.predictor == "amp_dir":
            nn.init.trunc_normal_(self.amplitude.weight, std=0.02)
            nn.init.zeros_(self.amplitude.bias)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out."""
        return ops.dynamic_depthwise_conv2d(x, self.predict(x), self.bias)

    def predict(self, x: Tensor) -> Tensor:
        """The kernel (B, C, K, K) that `forward` applies to these tokens (B, H, W, C), in float32 at least."""
        if self.predictor == "conv":
            x = self.proj2(F.gelu(self.proj1(x)))
        return self.kernel(*(ops.region_mean(x, size) for size in self.region_sizes))

    @property
    def halo(self) -> int:
        """Rows of tokens above and below a row that its share in the prediction depends on."""
        return 2 if self.predictor == "conv" else 0

    @property
    def region_sizes(self) -> tuple[int, ...]:
        """The numbers of regions a side whose means `kernel` takes; 1 stands for the mean token."""
        return {"gap": (1,), "amp_dir": (self.kernel_size, 1)}.get(self.predictor, (self.kernel_size,))

    def kernel(self, region_means: Tensor, mean: Tensor | None = None) -> Tensor:
        """The kernel (B, C, K, K) from the means of the image's regions.

        Args:
            region_means: (B, n, n, C) for the first n of `region_sizes`: of the tokens or, for ``conv``, of what its
                two convolutions make of them.
            mean: the mean token (B, 1, 1, C), for ``amp_dir``.
        """
        update = region_means.permute(0, 3, 1, 2).to(self.proj1.weight.dtype)
        if self.predictor != "conv":
            update = self.proj2(F.gelu(self.proj1(update)))
        if self.predictor == "gap":
            update = update.flatten(1).unflatten(1, (self.channels, self.kernel_size, self.kernel_size))
        update = ops.wide(update)
        if mean is not None:
            amplitude = ops.wide(self.amplitude(mean[:, 0, 0].to(self.amplitude.weight.dtype)))
            length = torch.linalg.vector_norm(update, dim=(2, 3), keepdim=True).clamp_min(1e-12)
            update = amplitude[..., None, None] * update / length
        if self.normalize:
            update = ops.normalize_update(update, dim=(2, 3))
        return update if self.weight is None else update + self.weight.squeeze(1)

    def extra_repr(self) -> str:
        """The widths, and what differs from the released layer, for ``print(model)``."""
        parts = [f"channels={self.channels}", f"kernel_size={self.kernel_size}"]
        parts += [f"predictor={self.predictor!r}"] * (self.predictor != "adaptive")
        parts += ["static_weight=False"] * (self.weight is None) + ["normalize=False"] * (not self.normalize)
        return ", ".join(parts)
