"""ViTDet's simple feature pyramid on the last map of any timm backbone.

Paper: "Exploring Plain Vision Transformer Backbones for Object Detection" (ViTDet, arXiv 2203.16527), section 3: every
level is made of the last map alone, there is no top-down path. Differs in this: a map of odd size keeps its last row
and column where it is pooled, so that no part of the image is lost.

B images, C channels, H x W cells of a map, r the stride of the backbone's map.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from weightformer.tasks.detection.windows import check_windows, windowed_map
from weightformer.training.backbone import build_backbone
from weightformer.training.config import ModelConfig

__all__ = ["PyramidBackbone", "SimpleFeaturePyramid"]


class SimpleFeaturePyramid(nn.Module):
    """One map to maps of several strides, and a last one of every second cell for large anchors.

    Each doubling of the resolution is a transposed convolution that halves the channels (LayerNorm and GELU between
    two), each halving a maximum over 2 x 2 cells; then a 1 x 1 and a 3 x 3 convolution with LayerNorm.

    Args:
        in_chans: C of the backbone's map.
        stride: r, pixels a side to a cell of that map.
        channels: of every level.
        strides: of the levels, doubling.

    Raises:
        ValueError: a level's stride is not r times a power of two.
    """

    def __init__(self, in_chans: int, stride: int, *, channels: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_level(in_chans, channels, _doublings(stride, level)) for level in strides)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """A map (B, C, H, W) to ``{"0": ..., "1": ..., "pool": ...}``, each (B, channels, H * r / stride, ...)."""
        maps = OrderedDict((str(i), level(x)) for i, level in enumerate(self.levels))
        maps["pool"] = F.max_pool2d(maps[str(len(self.levels) - 1)], kernel_size=1, stride=2)
        return maps


def _doublings(stride: int, level: int) -> int:
    exponent = round(math.log2(stride / level))
    if level * 2.0**exponent != stride:
        raise ValueError(
            f"a pyramid level of stride {level} cannot be made of a map of stride {stride}; see head.strides"
        )
    return exponent


def _level(in_chans: int, channels: int, doublings: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for step in range(doublings):
        parts += [LayerNorm2d(in_chans, eps=1e-6), nn.GELU()] if step else []
        parts.append(nn.ConvTranspose2d(in_chans, in_chans // 2, 2, stride=2))
        in_chans //= 2
    if doublings < 0:
        parts.append(nn.MaxPool2d(2**-doublings, ceil_mode=True))
    return nn.Sequential(
        *parts,
        nn.Conv2d(in_chans, channels, 1, bias=False),
        LayerNorm2d(channels, eps=1e-6),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        LayerNorm2d(channels, eps=1e-6),
    )


class PyramidBackbone(nn.Module):
    """A timm model up to its last map of stride 16 (or its last map, if none has that stride), then the pyramid.

    Args:
        model: names the backbone, and the weights to start from.
        channels: of every level.
        strides: of the levels.
        window: tokens a side of attention windows, see `windowed_map`; 0 for none.

    Raises:
        ValueError: no such model; it returns no maps; the strides do not fit its own; windows for what is no ViT.
    """

    def __init__(self, model: ModelConfig, *, channels: int, strides: Sequence[int], window: int = 0) -> None:
        super().__init__()
        body, (found,) = build_backbone(model, _last_of_stride_16)
        self.body: Any = body
        self.index, self.stride, self.channels, self.window = found.index, found.stride, found.channels, window
        if window:
            check_windows(body, model.name)
        self.pyramid = SimpleFeaturePyramid(found.channels, found.stride, channels=channels, strides=strides)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (B, in_chans, height, width) of any size to the levels of `SimpleFeaturePyramid`.

        Sides are zero-padded at the right and bottom to a multiple of the backbone's stride.
        """
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.stride, 0, -height % self.stride))
        if self.window:
            return self.pyramid(windowed_map(self.body, images, self.window))
        return self.pyramid(self.body.forward_intermediates(images, indices=[self.index], intermediates_only=True)[0])


def _last_of_stride_16(strides: list[int]) -> list[int]:
    return [max((i for i, stride in enumerate(strides) if stride == 16), default=len(strides) - 1)]
