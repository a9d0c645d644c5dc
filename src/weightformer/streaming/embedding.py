"""From the pixels of an image to strips of embedded tokens, region by region."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from weightformer import ops
from weightformer.models import WeightFormer
from weightformer.streaming.passes import Strips, ahead
from weightformer.streaming.sources import Source

__all__ = ["check_image", "embedded"]

_READ_BYTES = 8 * 2**20  # of pixels read at once, unless one tile is larger


def check_image(model: WeightFormer, image: Source) -> None:
    """Raise ValueError if the image is smaller than a patch or has other channels than the model."""
    patch, wanted = model.patch_embed.patch_size, model.patch_embed.proj.in_channels
    if image.height < patch or image.width < patch:
        raise ValueError(
            f"{image.name} is {image.height} x {image.width} px, smaller than one patch of {patch} x {patch} px"
        )
    if image.channels not in (1, wanted) and (image.channels, wanted) not in ((4, 3), (3, 1), (4, 1)):
        raise ValueError(f"{image.name} has {image.channels} channels, the model takes {wanted}")


def embedded(model: WeightFormer, image: Source, start: int, stop: int, strip_rows: int) -> Strips:
    """Token rows ``start`` to ``stop`` as they enter the first block, in strips; the next region is read meanwhile."""
    patch, weight = model.patch_embed.patch_size, model.patch_embed.proj.weight
    width = -(-image.width // patch)
    strip = weight.new_empty(0)
    for row, left, pixels in ahead(_regions(image, patch, start, stop, strip_rows)):
        count, col = min(strip_rows, stop - row), left // patch
        if left == 0:
            strip = weight.new_empty(count, width, model.embed_dim)
        for i in range(count):
            band = _model_input(model, pixels[:, i * patch : (i + 1) * patch])
            tokens = model.embed_norm(model.patch_embed(band[None]))[0, 0]
            strip[i, col : col + len(tokens)] = tokens
        if left + pixels.shape[2] == image.width:
            yield strip


def _regions(image: Source, patch: int, start: int, stop: int, strip_rows: int) -> Iterator[tuple[int, int, Tensor]]:
    """First token row, first pixel column and pixels of regions that cover the strips from left to right."""
    tile = image.tile[1]
    columns = max(_READ_BYTES // (strip_rows * patch * image.channels), tile)
    columns = max(columns // tile * tile // patch, 1) * patch
    for row in range(start, stop, strip_rows):
        bottom = min(min(row + strip_rows, stop) * patch, image.height)
        for left in range(0, image.width, columns):
            yield row, left, image.read(row * patch, bottom, left, min(left + columns, image.width))


def _model_input(model: WeightFormer, pixels: Tensor) -> Tensor:
    """Pixels as the model takes them, with zeros at the right and bottom up to whole patches."""
    weight, patch = model.patch_embed.proj.weight, model.patch_embed.patch_size
    x = pixels.to(weight.device)
    x = _luma(x) if len(x) >= 3 and weight.shape[1] == 1 else x[: weight.shape[1]]
    if not x.is_floating_point():
        top, dtype = torch.iinfo(x.dtype).max, ops.wide(weight[:0]).dtype
        mean, std = (torch.tensor(v, dtype=dtype, device=x.device)[:, None, None] for v in _mean_std(model))
        x = (x.to(dtype) / top - mean) / std
    x = x.to(weight.dtype).expand(weight.shape[1], -1, -1)
    return F.pad(x, (0, -x.shape[2] % patch, 0, -x.shape[1] % patch))


def _luma(pixels: Tensor) -> Tensor:
    """Red, green, blue to grey (1, h, w) in the same type, by ITU-R 601 in the integers that Pillow uses."""
    red, green, blue = pixels[:3] if pixels.is_floating_point() else pixels[:3].long()
    grey = 19595 * red + 38470 * green + 7471 * blue
    return (grey / 65536 if pixels.is_floating_point() else (grey + 32768) >> 16).to(pixels.dtype)[None]


def _mean_std(model: WeightFormer) -> tuple[list[float], list[float]]:
    """Normalisation of the model's input; one value for all channels where a model has other than three of them."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    channels = model.patch_embed.proj.in_channels
    values = (cfg.get("mean", IMAGENET_DEFAULT_MEAN), cfg.get("std", IMAGENET_DEFAULT_STD))
    mean, std = (list(v) if len(v) == channels else [sum(v) / len(v)] * channels for v in values)
    return mean, std
