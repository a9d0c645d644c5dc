"""Images and their masks in files, as finished training batches or as whole images for evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as tv

from weightformer.tasks.classification.images import ImageReadError, Readable, read_image
from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.segmentation.masks import is_binary, read_values, to_labels
from weightformer.tasks.segmentation.transforms import TrainTransform, resize, scaled_size
from weightformer.training.loader import Key, item_rng

__all__ = ["EvalBatch", "MaskDataset", "TrainBatch", "load_image"]

TrainBatch = tuple[Tensor, Tensor]  # images (B, C, S, S), labels (B, S, S) int64
EvalBatch = list[tuple[Tensor, Tensor]]  # an image (C, h, w) as the model takes it, labels (H, W) of the file's size


def load_image(path: str | os.PathLike[str], in_chans: int, max_pixels: int) -> Tensor:
    """One image (C, H, W), uint8 for 1 and 3 channels; see `read_image`."""
    image = read_image(path, in_chans, max_pixels)
    return image if isinstance(image, Tensor) else tv.pil_to_tensor(image)


class MaskDataset(Dataset[Any]):
    """Pairs of files.

    What becomes of a pair that cannot be read is said in `Readable`; in evaluation it is left out.

    Args:
        pairs: N paths of images and masks.
        num_classes: K.
        reduce_zero_label: see `to_labels`.
        in_chans: C.
        short_side: of an evaluated image, see `scaled_size`; 0 leaves it as it is.
        normalize: of an evaluated image.
        transform: of a training image; without one the dataset is for evaluation.
        max_pixels: see `read_image`.
        skip_bad: pass over pairs that cannot be read.
        seed: of the transform's random numbers.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        num_classes: int,
        reduce_zero_label: bool,
        in_chans: int,
        short_side: int,
        normalize: Normalize,
        transform: TrainTransform | None,
        max_pixels: int,
        skip_bad: bool,
        seed: int,
    ) -> None:
        # One array: a long list of strings would be copied into every worker, reference count by count.
        self.pairs = np.array([[os.fsencode(path) for path in pair] for pair in pairs])
        self.num_classes, self.reduce_zero_label, self.in_chans = num_classes, reduce_zero_label, in_chans
        self.short_side, self.normalize, self.transform = short_side, normalize, transform
        self.max_pixels, self.seed = max_pixels, seed
        self._readable = Readable(len(pairs), skip=skip_bad, beside=" together with its mask")

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def skipped(self) -> list[str]:
        """Images passed over so far, by this process or its workers."""
        return [os.fsdecode(path) for path in self.pairs[self._readable.skipped(), 0]]

    def __getitems__(self, keys: Sequence[Key]) -> TrainBatch | EvalBatch | ImageReadError:
        """The batch of some (epoch, index) keys; an error is returned for `ResumableLoader` to raise."""
        try:
            found = [item for key in keys if (item := self._load(key))]
        except ImageReadError as error:
            return error
        if self.transform is None:
            return found
        images, masks = zip(*found, strict=True)
        return torch.stack(images), torch.stack(masks)

    def _load(self, key: Key) -> tuple[Tensor, Tensor] | None:
        """The finished item of a key; nothing where evaluation has to leave it out."""

        def read(place: int) -> tuple[Tensor, Tensor]:
            with item_rng(self.seed, *key):
                return self._prepare(*self._read(*map(os.fsdecode, self.pairs[place])))

        return self._readable.load(key[1], read, train=self.transform is not None)

    def _read(self, image_path: str, mask_path: str) -> tuple[Tensor, Tensor]:
        image = load_image(image_path, self.in_chans, self.max_pixels)
        values = read_values(mask_path, self.max_pixels)
        if image.shape[-2:] != values.shape:
            sizes = [f"{height} x {width}" for height, width in (image.shape[-2:], values.shape)]
            raise ImageReadError(f"image {image_path} is {sizes[0]} px (upright), its mask {mask_path} {sizes[1]}")
        if is_binary(values) and not self._has_class_numbers:
            raise ImageReadError(
                f"mask {mask_path} holds 0 and 255 alone, and so do the others: write classes as 0, 1, ..., where 255 "
                "means a pixel that is not counted"
            )
        labels = to_labels(values, self.num_classes, reduce_zero_label=self.reduce_zero_label, path=mask_path)
        return image, labels

    def _prepare(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.transform is not None:
            return self.transform(image, mask)
        height, width = mask.shape
        return self.normalize(resize(image, scaled_size(height, width, self.short_side))), mask

    @cached_property
    def _has_class_numbers(self) -> bool:
        """Whether any of the first hundred masks holds more than black and white."""
        for mask in self.pairs[:100, 1]:
            try:
                values = read_values(os.fsdecode(mask), self.max_pixels)
            except ImageReadError:  # named when its turn comes
                continue
            if np.setdiff1d(values, (0, 255)).size:
                return True
        return False
