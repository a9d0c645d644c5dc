"""From an image to the model's input: framing and augmentation of one image, then of a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from weightformer.training.loader import Key, derive_seed, item_rng

if TYPE_CHECKING:
    from weightformer.tasks.classification.data import DataConfig

__all__ = ["FinishBatch", "eval_framing", "eval_transform", "normalize", "train_framing"]


def eval_transform(config: DataConfig, in_chans: int, mean: Sequence[float], std: Sequence[float]) -> v2.Compose:
    """What evaluation and prediction do to an image of `read_image`: a normalised float tensor (C, S, S).

    Raises:
        ValueError: mean or std of another length than ``in_chans``.
    """
    mean, std = check_statistics(in_chans, mean, std)
    return v2.Compose([*eval_framing(config), v2.ToImage(), v2.ToPureTensor(), _Normalize(mean, std)])


def eval_framing(config: DataConfig) -> list[nn.Module]:
    """Resize to ``image_size / crop_pct``, a square or on the short side, and cut out the centre."""
    resized = math.floor(config.image_size / config.crop_pct)
    size = [resized, resized] if config.crop_mode == "squash" else [resized]
    steps: list[nn.Module] = [v2.Resize(size, _interpolation(config), antialias=True)]
    return steps if resized == config.image_size and len(size) == 2 else [*steps, v2.CenterCrop(config.image_size)]


def train_framing(config: DataConfig, in_chans: int, mean: Sequence[float]) -> list[Any]:
    """The random part that needs the whole image: random-resized-crop (else evaluation's framing) and RandAugment."""
    steps: list[Any] = eval_framing(config)
    if config.scale:
        steps = [v2.RandomResizedCrop(config.image_size, config.scale, config.ratio, _interpolation(config))]
    if config.rand_augment:
        steps.append(_rand_augment(config, in_chans, mean))
    return steps


class FinishBatch:
    """Finish a batch of framed images: shifted crops and flips in training, normalisation, erasing in training.

    Shifts and flips of a whole epoch are drawn at once, so that an item's are its own whatever batch it is in.

    Args:
        config: the augmentation; ``None`` for evaluation.
        mean: per channel.
        std: per channel.
        seed: of the random numbers.
        num_items: size of the dataset.
    """

    def __init__(
        self,
        config: DataConfig | None,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        seed: int = 0,
        num_items: int = 0,
    ) -> None:
        self.config, self.mean, self.std = config, mean, std
        self.seed, self.num_items = seed, num_items
        self._drawn: tuple[int, tuple[Tensor, Tensor, Tensor]] | None = None

    def __call__(self, images: Tensor, keys: Sequence[Key]) -> Tensor:
        """Images (B, C, S, S), uint8 or floats in [0, 1], to normalised floats; ``keys`` are of one epoch."""
        if self.config is None or not keys:
            return normalize(images, self.mean, self.std)
        top, left, flip = (draws[[index for _, index in keys]] for draws in self._draw(keys[0][0]))
        if self.config.pad_crop:
            images = _shift(images, top.long(), left.long(), self.config.pad_crop)
        if self.config.hflip:
            images = torch.where(flip[:, None, None, None], images.flip(-1), images)
        images = normalize(images, self.mean, self.std)
        if self.config.erasing:
            for image, key in zip(images, keys, strict=True):
                # The same key seeded the item's framing: keep the two streams apart.
                with item_rng(derive_seed(self.seed, _ERASING), *key):
                    _erasing(self.config.erasing)(image)
        return images

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.config is not None and (self._drawn is None or self._drawn[0] != epoch):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch, _SHIFTS))
            reach = 2 * self.config.pad_crop + 1
            top, left = torch.randint(reach, (2, self.num_items), generator=generator, dtype=torch.int16)
            flip = torch.rand(self.num_items, generator=generator) < self.config.hflip
            self._drawn = epoch, (top, left, flip)
        assert self._drawn is not None
        return self._drawn[1]


_ERASING, _SHIFTS = 1, 2  # what a derived seed is for


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``(x - mean) / std`` per channel of (..., C, H, W); uint8 images are first scaled to [0, 1]."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    return (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def check_statistics(
    in_chans: int, mean: Sequence[float], std: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std as tuples of floats, one value per channel.

    Raises:
        ValueError: another number of values, or a std that is not positive.
    """
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != in_chans:
            raise ValueError(f"{name} has {len(values)} values for {in_chans} input channels: {list(values)}")
    if min(std) <= 0:
        raise ValueError(f"std must be positive, got {list(std)}")
    return tuple(map(float, mean)), tuple(map(float, std))


class _Normalize(nn.Module):
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, image: Tensor) -> Tensor:
        return normalize(image, self.mean, self.std)


def _interpolation(config: DataConfig) -> v2.InterpolationMode:
    return v2.InterpolationMode(config.interpolation)


def _shift(images: Tensor, top: Tensor, left: Tensor, pad: int) -> Tensor:
    """Each image of (B, C, H, W) padded with black by ``pad`` and cut back to size at its own offset."""
    windows = F.pad(images, (pad,) * 4).unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    return windows[torch.arange(len(images)), :, top, left]


def _erasing(probability: float) -> Any:
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(probability, mode="pixel", device="cpu")


def _rand_augment(config: DataConfig, in_chans: int, mean: Sequence[float]) -> Any:
    """timm's RandAugment, with the arguments of its own training script."""
    from timm.data.auto_augment import rand_augment_transform

    if in_chans not in (1, 3):
        raise ValueError(f"data.rand_augment works on grey or RGB images, not on {in_chans} channels; leave it empty")
    fill = tuple(min(255, round(255 * value)) for value in mean)
    options = {
        "translate_const": int(config.image_size * 0.45),
        "img_mean": fill,
        "interpolation": getattr(Image.Resampling, config.interpolation.upper()),
    }
    augment = rand_augment_transform(config.rand_augment, options)
    for op in augment.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = _posterize
    return augment


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the highest ``bits``: timm may ask for none, which Pillow 13 refuses; it used to give black."""
    return image if bits >= 8 else image.point(lambda value: value & ~(0xFF >> bits))
