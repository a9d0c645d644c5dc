"""UperNet on any timm backbone, with a norm that can be chosen.

Papers: "Unified Perceptual Parsing for Scene Understanding" (UperNet, arXiv 1807.10221); its pyramid pooling is that of
PSPNet (arXiv 1612.01105), the neck that makes a pyramid of an isotropic backbone that of BEiT and Vim. Differs in this:
maps of odd size keep their last row and column, and all of them stay aligned with the image.

B images, C channels, H x W cells of a map, K classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer.ops import region_mean
from weightformer.training.backbone import FeatureMap, groups_below

__all__ = ["FCNHead", "PyramidNeck", "UperHead", "UperNet", "build_norm"]

Norm = Callable[[int], nn.Module]

_GROUP_CHANNELS = 16  # "Group Normalization" (arXiv 1803.08494), table 3: about as good as 32 groups


def build_norm(name: str) -> Norm:
    """The constructor of a norm over maps (B, C, H, W), by its name in `HeadConfig.norm`.

    Raises:
        ValueError: an unknown name, or with ``group`` a number of channels that is no multiple of 16.
    """

    def group(channels: int) -> nn.Module:
        if channels % _GROUP_CHANNELS:
            raise ValueError(f"norm: group needs channels in multiples of {_GROUP_CHANNELS}, got {channels}")
        return nn.GroupNorm(channels // _GROUP_CHANNELS, channels)

    norms: dict[str, Norm] = {"batch": _BatchNorm, "sync_batch": _SyncBatchNorm, "group": group}
    if name not in norms:
        raise ValueError(f"unknown norm {name!r}; choose one of {', '.join(norms)}")
    return norms[name]


class _BatchNorm(nn.BatchNorm2d):
    """Says what to do where there is nothing to take a mean over: one image's pooled map of one cell."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.shape[1]:
            raise ValueError(
                "norm: batch cannot train on one image a process; use data.batch_size 2 or more, or head.norm: group "
                "(on several GPUs sync_batch), or call eval() first"
            )
        return super().forward(input)


class _SyncBatchNorm(nn.SyncBatchNorm):
    """Likewise where there is one process."""

    def forward(self, input: Tensor) -> Tensor:
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if self.training and alone and input.numel() == input.shape[1]:
            raise ValueError(
                "norm: sync_batch cannot train on one image in all; use data.batch_size 2 or more, or "
                "head.norm: group, or call eval() first"
            )
        return super().forward(input)


class ConvNormReLU(nn.Sequential):
    """Convolution that keeps the size, norm, ReLU."""

    def __init__(self, in_chans: int, out_chans: int, kernel: int, norm: Norm) -> None:
        super().__init__(
            nn.Conv2d(in_chans, out_chans, kernel, padding=kernel // 2, bias=False),
            norm(out_chans),
            nn.ReLU(inplace=True),
        )


class PyramidNeck(nn.Module):
    """Maps of one size to maps of doubling stride; the finest gets stride 4, or what comes nearest.

    Of a backbone with stride 16 they get 4, 8, 16 and 32: two transposed convolutions, one, none, and a maximum over
    2 x 2 cells. A map of odd size keeps its last row and column in that.

    Args:
        channels: C of every map.
        stride: pixels a side to a cell of the maps.
        num_maps: how many there are.
        norm: between two transposed convolutions.
    """

    def __init__(self, channels: int, stride: int, num_maps: int, norm: Norm) -> None:
        super().__init__()
        finest = max(round(math.log2(stride / 4)), 0)  # doublings of the first map's resolution
        self.scale_exponents = [finest - level for level in range(num_maps)]
        self.scales = nn.ModuleList(_rescale(channels, exponent, norm) for exponent in self.scale_exponents)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps (B, C, H, W), one a level, to maps (B, C, H * 2^e, W * 2^e) for falling exponents e, rounded up."""
        return [scale(x) for scale, x in zip(self.scales, maps, strict=True)]


def _rescale(channels: int, exponent: int, norm: Norm) -> nn.Module:
    """A map's resolution times 2^exponent."""
    if exponent <= 0:
        return nn.MaxPool2d(2**-exponent, ceil_mode=True) if exponent else nn.Identity()
    parts: list[nn.Module] = []
    for step in range(exponent):
        parts += [norm(channels), nn.GELU()] if step else []
        parts.append(nn.ConvTranspose2d(channels, channels, 2, stride=2))
    return nn.Sequential(*parts)


class UperHead(nn.Module):
    """Pyramid pooling on the coarsest map, a feature pyramid down to the finest, and all of them fused there.

    Args:
        in_chans: channels of the maps, finest first.
        channels: width of the head.
        num_classes: K.
        norm: after each convolution.
        dropout: share of channels dropped before the classifier.
        pool_scales: cells a side of the pooled maps.
    """

    def __init__(
        self,
        in_chans: Sequence[int],
        channels: int,
        num_classes: int,
        norm: Norm,
        *,
        dropout: float = 0.1,
        pool_scales: Sequence[int] = (1, 2, 3, 6),
    ) -> None:
        super().__init__()
        *fine, coarsest = in_chans
        self.pool_scales = tuple(pool_scales)
        self.pooled = nn.ModuleList(ConvNormReLU(coarsest, channels, 1, norm) for _ in pool_scales)
        self.context = ConvNormReLU(coarsest + len(pool_scales) * channels, channels, 3, norm)
        self.lateral = nn.ModuleList(ConvNormReLU(c, channels, 1, norm) for c in fine)
        self.smooth = nn.ModuleList(ConvNormReLU(channels, channels, 3, norm) for _ in fine)
        self.fuse = ConvNormReLU(len(in_chans) * channels, channels, 3, norm)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, C, H, W), finest first, each half as large as the one before, to logits (B, K, H0, W0)."""
        tokens = maps[-1].permute(0, 2, 3, 1)
        means = [region_mean(tokens, scale).permute(0, 3, 1, 2).to(tokens.dtype) for scale in self.pool_scales]
        size = maps[-1].shape[-2:]
        return self.decode(maps, [F.interpolate(x, size=size, mode="bilinear") for x in self.pool(means)])

    def pool(self, means: Sequence[Tensor]) -> list[Tensor]:
        """What the means (B, C, s, s) of the coarsest map's regions, one for each scale, say of the whole image."""
        return [branch(x) for branch, x in zip(self.pooled, means, strict=True)]

    def decode(self, maps: Sequence[Tensor], context: Sequence[Tensor]) -> Tensor:
        """`forward` where the results of `pool` were enlarged to the size of the coarsest map: the local rest."""
        *fine, coarsest = maps
        levels = [self.context(torch.cat([coarsest, *context], 1))]
        for x, lateral in zip(reversed(fine), reversed(self.lateral), strict=True):
            levels.append(lateral(x) + _enlarge(levels[-1], 2, x))
        levels = levels[::-1]
        outputs = [*(smooth(x) for x, smooth in zip(levels[:-1], self.smooth, strict=True)), levels[-1]]
        fused = self.fuse(torch.cat([_enlarge(x, 2**level, maps[0]) for level, x in enumerate(outputs)], 1))
        return self.classifier(self.dropout(fused))


class FCNHead(nn.Module):
    """One convolution and a classifier on one map; a second loss in training.

    Args:
        in_chans: channels of the map.
        channels: width of the head.
        num_classes: K.
        norm: after the convolution.
        dropout: share of channels dropped before the classifier.
    """

    def __init__(self, in_chans: int, channels: int, num_classes: int, norm: Norm, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormReLU(in_chans, channels, 3, norm)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, C, H, W) to logits (B, K, H, W)."""
        return self.classifier(self.dropout(self.conv(x)))


class UperNet(nn.Module):
    """Backbone, neck and heads: a class for every pixel of an image of any height and width.

    ``backbone`` is the timm model itself, ``neck`` turns its maps into a pyramid (a hierarchical backbone's are one
    already), ``decode_head`` turns the pyramid into logits on its finest map, and ``aux_head`` gives the second loss.

    Args:
        backbone: a model of `build_backbone`.
        maps: what it returns.
        num_classes: K.
        channels: width of the decode head.
        aux_channels: width of the auxiliary head; 0 has none.
        norm: see `build_norm`.
        dropout: share of channels dropped before the classifiers.

    Raises:
        ValueError: maps that neither share one stride nor double it from one to the next.
    """

    def __init__(
        self,
        backbone: nn.Module,
        maps: Sequence[FeatureMap],
        num_classes: int,
        *,
        channels: int = 512,
        aux_channels: int = 256,
        norm: str = "batch",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        strides, widths = [m.stride for m in maps], [m.channels for m in maps]
        make = build_norm(norm)
        self.indices = [m.index for m in maps]
        self.patch_size = max(strides)
        self.backbone = backbone
        self.neck: nn.Module = nn.Identity()
        if len(maps) > 1 and len(set(strides)) == 1:
            self.neck = PyramidNeck(widths[0], strides[0], len(maps), make)
        elif any(2 * fine != coarse for fine, coarse in itertools.pairwise(strides)):
            raise ValueError(f"the strides of the feature maps must be equal or double each time, got {strides}")
        self.decode_head = UperHead(widths, channels, num_classes, make, dropout=dropout)
        self._aux_map = max(len(maps) - 2, 0)
        self.aux_head: FCNHead | None = None
        if aux_channels:
            self.aux_head = FCNHead(widths[self._aux_map], aux_channels, num_classes, make, dropout=dropout)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Images (B, in_chans, height, width) to maps (B, C, H, W), finest first.

        Sides that are no multiple of the coarsest stride of the backbone are zero-padded at the right and bottom.
        """
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch_size, 0, -height % self.patch_size))
        backbone = cast(Any, self.backbone)
        return self.neck(backbone.forward_intermediates(images, indices=self.indices, intermediates_only=True))

    def forward(self, images: Tensor, *, auxiliary: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Images (B, in_chans, height, width) to logits (B, K, height, width).

        Args:
            images: of any size.
            auxiliary: return the auxiliary head's logits beside them.

        Raises:
            ValueError: there is no auxiliary head.
        """
        maps = self.pyramid(images)
        logits = self._to_image(self.decode_head(maps), images)
        if not auxiliary:
            return logits
        if self.aux_head is None:
            raise ValueError("this model was built without an auxiliary head")
        return logits, self._to_image(self.aux_head(maps[self._aux_map]), images)

    def _to_image(self, logits: Tensor, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        padded = [side + -side % self.patch_size for side in (height, width)]
        return F.interpolate(logits, size=padded, mode="bilinear")[..., :height, :width]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups by depth of the backbone; neck and heads come last, at the full learning rate."""
        return groups_below("backbone", self.backbone, coarse)

    def no_weight_decay(self) -> set[str]:
        """What the backbone exempts."""
        exempt: set[str] = getattr(self.backbone, "no_weight_decay", set)()
        return {f"backbone.{name}" for name in exempt}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass."""
        cast(Any, self.backbone).set_grad_checkpointing(enable)


def _enlarge(x: Tensor, factor: int, like: Tensor) -> Tensor:
    """A map (B, C, H, W) enlarged and cut to the height and width of a finer one."""
    if factor == 1:
        return x
    return F.interpolate(x, scale_factor=factor, mode="bilinear")[..., : like.shape[-2], : like.shape[-1]]
