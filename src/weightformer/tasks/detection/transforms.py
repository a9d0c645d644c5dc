"""What training does to an image with its masks, and how evaluation scales an image."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from weightformer.tasks.classification.transforms import Normalize

if TYPE_CHECKING:
    from weightformer.tasks.detection.data import DataConfig

__all__ = ["TrainTransform", "fitted_size", "mask_boxes", "resize"]

_SMALLEST_SIDE = 1  # of a box, in pixels: what is no larger says nothing about its object


def fitted_size(size: Sequence[int], side: float) -> tuple[int, int]:
    """The size (height, width) of an image scaled to fit a square of ``side`` pixels, of the same shape."""
    height, width = size
    scale = side / max(height, width)
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (C, H, W) at another size, bilinear and antialiased."""
    return image if image.shape[-2:] == size else tv.resize(image, list(size), v2.InterpolationMode.BILINEAR)


def mask_boxes(masks: Tensor) -> Tensor:
    """Boxes (N, 4), x1 y1 x2 y2 in pixels, around masks (N, H, W); zeros for an empty mask."""
    boxes = masks.new_zeros(len(masks), 4, dtype=torch.float32)
    for i, mask in enumerate(masks):
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        if len(rows):
            boxes[i] = torch.stack([columns[0, 0], rows[0, 0], columns[-1, 0] + 1, rows[-1, 0] + 1])
    return boxes


class TrainTransform:
    """Left-right flip and large-scale jitter: a random scale, then a crop where the image has become too large.

    As in ViTDet (and "Simple Copy-Paste", arXiv 2012.07177), but an image that became smaller is not padded:
    padding would enter the weights that the backbone predicts. Draws from Python's global stream, see
    `weightformer.training.loader.item_rng`.

    Args:
        config: how strong.
        normalize: of the image.
    """

    def __init__(self, config: DataConfig, normalize: Normalize) -> None:
        self.config, self.normalize = config, normalize

    def __call__(self, image: Tensor, masks: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """An image (C, H, W), masks (N, H, W) and labels (N,) to floats (C, h, w) and boxes, masks and labels.

        Objects that are cut down to a side of one pixel or less are left out.
        """
        config, side = self.config, self.config.image_size
        if random.random() < config.hflip:
            image, masks = image.flip(-1), masks.flip(-1)
        size = fitted_size(image.shape[-2:], side * random.uniform(*config.jitter))
        image = resize(image, size)
        if masks.shape[-2:] != size:
            masks = tv.resize(masks, list(size), v2.InterpolationMode.NEAREST_EXACT)
        top, left = (random.randint(0, max(0, full - side)) for full in size)
        window = (..., slice(top, top + side), slice(left, left + side))
        image, masks = image[window], masks[window]
        boxes = mask_boxes(masks)
        keep = ((boxes[:, 2:] - boxes[:, :2]) > _SMALLEST_SIDE).all(1)
        return self.normalize(image), {"boxes": boxes[keep], "masks": masks[keep], "labels": labels[keep]}
