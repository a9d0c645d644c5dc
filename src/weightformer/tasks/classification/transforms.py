"""From an image to the model's input: framing and augmentation of one image, then of a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from weightformer.training.loader import Key, derive_seed, item_rng

if TYPE_CHECKING:
    from weightformer.tasks.classification.data import DataConfig

__all__ = ["BatchAugmentation", "Normalize", "eval_framing", "eval_transform", "train_framing"]


class Normalize:
    """``(x - mean) / std`` per channel of images (..., C, H, W); uint8 images are first scaled to [0, 1].

    Raises:
        ValueError: mean or std of another length than ``in_chans``, or a std that is not positive.
    """

    def __init__(self, in_chans: int, mean: Sequence[float], std: Sequence[float]) -> None:
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != in_chans:
                raise ValueError(f"{name} has {len(values)} values for {in_chans} input channels: {list(values)}")
        if not min(std) > 0:
            raise ValueError(f"std must be positive, got {list(std)}")
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        """Images (..., C, H, W), uint8 or floats in [0, 1], to floats."""
        x = images.float() / 255 if images.dtype == torch.uint8 else images
        return (x - self.mean) / self.std


def eval_transform(config: DataConfig, in_chans: int, mean: Sequence[float], std: Sequence[float]) -> v2.Compose:
    """What evaluation and prediction do to an image of `read_image`: a normalised float tensor (C, height, width).

    Raises:
        ValueError: mean or std of another length than ``in_chans``.
    """
    return v2.Compose([*eval_framing(config), v2.ToImage(), v2.ToPureTensor(), Normalize(in_chans, mean, std)])


def eval_framing(config: DataConfig) -> list[Any]:
    """Resize to ``image_size / crop_pct``, exactly or on the short side, and cut out the centre."""
    size = [math.floor(side / config.crop_pct) for side in config.size]
    if config.crop_mode == "center":
        size = size[:1]
    return [v2.Resize(size, _interpolation(config)), v2.CenterCrop(config.size)]


def train_framing(config: DataConfig, in_chans: int, mean: Sequence[float]) -> list[Any]:
    """The part of augmentation that needs the whole image: random-resized-crop, else evaluation's framing; RandAugment.

    Raises:
        ValueError: RandAugment on other than 1 or 3 channels.
    """
    steps = eval_framing(config)
    if config.scale:
        steps = [v2.RandomResizedCrop(config.size, config.scale, config.ratio, _interpolation(config))]
    if config.rand_augment:
        steps.append(_rand_augment(config, in_chans, mean))
    return steps


class BatchAugmentation:
    """The part of augmentation that works on a batch of framed images: shifts, flips and erasing.

    RandAugment comes before the flip here and after it in timm; as its moves go to either side with equal chance, the
    images are distributed alike.

    Args:
        config: what to do, and how much.
        seed: of the random numbers.
        num_items: size of the dataset. Shifts and flips of a whole epoch are drawn at once and looked up by index:
            cheap, and an item's are the same in any batch.
    """

    def __init__(self, config: DataConfig, *, seed: int, num_items: int) -> None:
        self.pad, self.hflip, self.erasing = config.pad_crop, config.hflip, None
        # Not the framing's seed itself: the three must not draw the same numbers.
        self.shift_seed, self.erase_seed = derive_seed(seed, 1), derive_seed(seed, 2)
        self.num_items = num_items
        self._epoch: int | None = None
        if config.erasing:
            from timm.data.random_erasing import RandomErasing

            self.erasing = RandomErasing(config.erasing, mode="pixel", device="cpu")

    def shift_and_flip(self, images: Tensor, keys: Sequence[Key]) -> Tensor:
        """Images (B, C, S, S) of one epoch, same size out."""
        if not (keys and (self.pad or self.hflip)):
            return images
        self._draw(keys[0][0])
        indices = [index for _, index in keys]
        if self.pad:
            windows = F.pad(images, (self.pad,) * 4).unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
            images = windows[torch.arange(len(images)), :, self._top[indices].long(), self._left[indices].long()]
        return torch.where(self._flip[indices][:, None, None, None], images.flip(-1), images)

    def erase(self, images: Tensor, keys: Sequence[Key]) -> Tensor:
        """Normalised images (B, C, S, S), changed in place."""
        if self.erasing:
            for image, key in zip(images, keys, strict=True):
                with item_rng(self.erase_seed, *key):
                    self.erasing(image)
        return images

    def _draw(self, epoch: int) -> None:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.shift_seed, epoch))
            shape = (2, self.num_items)
            self._top, self._left = torch.randint(2 * self.pad + 1, shape, generator=generator, dtype=torch.int16)
            self._flip = torch.rand(self.num_items, generator=generator) < self.hflip
            self._epoch = epoch


def _interpolation(config: DataConfig) -> v2.InterpolationMode:
    return v2.InterpolationMode(config.interpolation)


def _rand_augment(config: DataConfig, in_chans: int, mean: Sequence[float]) -> Any:
    """timm's RandAugment, with the arguments of its own training script."""
    from timm.data.auto_augment import rand_augment_transform

    if in_chans not in (1, 3):
        raise ValueError(f"data.rand_augment works on grey or RGB images, not on {in_chans} channels; leave it empty")
    options = {
        "translate_const": int(min(config.size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
        "interpolation": Image.Resampling[config.interpolation.upper()],
    }
    augment = rand_augment_transform(config.rand_augment, options)
    for op in augment.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = _posterize
    return augment


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the highest ``bits`` of each value: timm may ask for none, black, which Pillow 13 refuses to make."""
    return image if bits >= 8 else image.point(lambda value: value & ~(0xFF >> bits))
