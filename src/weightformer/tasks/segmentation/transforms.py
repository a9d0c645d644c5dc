"""What training does to an image and its mask together, and how evaluation scales an image."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.segmentation.masks import IGNORE

if TYPE_CHECKING:
    from weightformer.tasks.segmentation.data import DataConfig

__all__ = ["TrainTransform", "photometric_distortion", "resize", "scaled_size"]

_LONG_OVER_SHORT = 4  # a scale of (2048, 512), as ADE20K is trained and tested at


def scaled_size(height: int, width: int, short_side: int, factor: float = 1.0) -> tuple[int, int]:
    """The size of an image whose shorter side becomes ``short_side``, times a factor.

    It is less where the longer side would exceed 4 times that. A ``short_side`` of 0 is the image's own.
    """
    scale = factor
    if short_side:
        scale *= min(short_side / min(height, width), _LONG_OVER_SHORT * short_side / max(height, width))
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (C, H, W) at another size, bilinear and antialiased."""
    return image if image.shape[-2:] == size else tv.resize(image, list(size), v2.InterpolationMode.BILINEAR)


class TrainTransform:
    """Random resize, crop, flip and photometric distortion, in that order and with mmsegmentation's settings.

    Draws from Python's global stream, see `weightformer.training.loader.item_rng`.

    Args:
        config: which of them, and how strong.
        normalize: of the image; what is padded to the crop's size comes after it, as zeros.
    """

    def __init__(self, config: DataConfig, normalize: Normalize) -> None:
        self.config, self.normalize = config, normalize

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """An image (C, H, W) and labels (H, W) to floats (C, S, S) and labels (S, S) int64, where S is the crop."""
        config, side = self.config, self.config.crop_size
        height, width = mask.shape
        size = scaled_size(height, width, config.short_side, random.uniform(*config.scale))
        image = resize(image, size)
        mask = tv.resize(mask[None], list(size), v2.InterpolationMode.NEAREST_EXACT)[0]
        window = self._choose_window(mask)
        image, mask = image[:, window[0], window[1]], mask[window]
        if random.random() < config.hflip:
            image, mask = image.flip(-1), mask.flip(-1)
        if config.photometric:
            image = photometric_distortion(image)
        missing = (0, side - mask.shape[1], 0, side - mask.shape[0])
        return F.pad(self.normalize(image), missing), F.pad(mask, missing, value=IGNORE).long()

    def _choose_window(self, mask: Tensor) -> tuple[slice, slice]:
        """A window of the crop's size, or of the whole mask where that is smaller; the last of ten tries is taken."""
        side = self.config.crop_size
        for _ in range(10):
            top, left = (random.randint(0, max(0, full - side)) for full in mask.shape)
            window = slice(top, top + side), slice(left, left + side)
            counts = torch.bincount(mask[window].flatten(), minlength=IGNORE + 1)[:IGNORE]
            if 0 < counts.max() <= self.config.cat_max_ratio * counts.sum():
                break
        return window


def photometric_distortion(image: Tensor) -> Tensor:
    """Brightness by up to 32 levels, contrast and saturation by 0.5 to 1.5, hue by up to 36 degrees: each with 1/2.

    Args:
        image: (C, H, W) uint8, of 1 channel (then only brightness and contrast change) or 3.
    """

    def chance() -> bool:
        return random.random() < 0.5

    def linear(x: Tensor, gain: float, offset: float) -> Tensor:
        return (x.float() * gain + offset).round_().clamp_(0, 255).to(torch.uint8)

    if chance():
        image = linear(image, 1, random.uniform(-32, 32))
    contrast_comes_first, changes_contrast = chance(), chance()
    if changes_contrast and contrast_comes_first:
        image = linear(image, random.uniform(0.5, 1.5), 0)
    if image.shape[0] == 3:
        if chance():
            image = tv.adjust_saturation(image, random.uniform(0.5, 1.5))
        if chance():
            image = tv.adjust_hue(image, random.uniform(-0.1, 0.1))
    if changes_contrast and not contrast_comes_first:
        image = linear(image, random.uniform(0.5, 1.5), 0)
    return image
