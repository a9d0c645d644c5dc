"""Datasets that return finished batches: images in memory, and images in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as tv

from weightformer.tasks.classification.images import ImageReadError, Readable, own_pixel_limit, read_image
from weightformer.tasks.classification.transforms import BatchAugmentation, Normalize
from weightformer.training.loader import Key, item_rng

__all__ = ["ArrayDataset", "Batch", "FileDataset"]

Batch = tuple[Tensor, Tensor]  # images (B, C, S, S), labels (B,)


class _ImageDataset(Dataset[Any]):
    """What both kinds share.

    Args:
        labels: (N,).
        framing: an image, or a batch of equal ones, to the model's size.
        normalize: of a batch.
        augmentation: of a batch, in training.
        seed: of the framing's random numbers.
    """

    def __init__(
        self,
        labels: Tensor,
        framing: Callable[[Any], Any],
        normalize: Normalize,
        augmentation: BatchAugmentation | None,
        *,
        seed: int,
    ) -> None:
        self.labels, self.framing, self.seed = labels, framing, seed
        self.normalize, self.augmentation = normalize, augmentation

    def __len__(self) -> int:
        return len(self.labels)

    def _finish(self, images: Tensor, keys: Sequence[Key]) -> Tensor:
        if self.augmentation is None:
            return self.normalize(images)
        images = self.normalize(self.augmentation.shift_and_flip(images, keys))
        return self.augmentation.erase(images, keys)


class ArrayDataset(_ImageDataset):
    """Images in memory, framed a whole batch at a time unless the framing is random.

    Args:
        images: (N, C, H, W) uint8.
        one_by_one: the framing draws random numbers for each image.
        **shared: see `_ImageDataset`.
    """

    def __init__(self, images: Tensor, *, one_by_one: bool, **shared: Any) -> None:
        super().__init__(**shared)
        self.images, self.one_by_one = images, one_by_one

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """The batch of some (epoch, index) keys of one epoch."""
        indices = [index for _, index in keys]
        images = self.images[indices]
        if self.one_by_one:
            images = torch.stack([self._frame(image, key) for image, key in zip(images, keys, strict=True)])
        else:
            images = self.framing(images)
        return self._finish(images, keys), self.labels[indices]

    def _frame(self, image: Tensor, key: Key) -> Tensor:
        with item_rng(self.seed, *key):
            return tv.pil_to_tensor(self.framing(tv.to_pil_image(image)))


class FileDataset(_ImageDataset):
    """Images in files, read when asked for.

    What becomes of a file that cannot be read is said in `Readable`; in evaluation the batch is smaller by one,
    possibly empty.

    Args:
        paths: N files.
        in_chans: C.
        max_pixels: see `read_image`.
        skip_bad: pass over files that cannot be read.
        **shared: see `_ImageDataset`.
    """

    def __init__(self, paths: Sequence[str], *, in_chans: int, max_pixels: int, skip_bad: bool, **shared: Any) -> None:
        super().__init__(**shared)
        # One array: a list of a million strings would be copied into every worker, reference count by count.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.in_chans, self.max_pixels = in_chans, max_pixels
        self._readable = Readable(len(paths), skip=skip_bad)

    @property
    def skipped(self) -> list[str]:
        """Files passed over so far, by this process or its workers."""
        return [os.fsdecode(path) for path in self.paths[self._readable.skipped()]]

    def __getitems__(self, keys: Sequence[Key]) -> Batch | ImageReadError:
        """The batch of some (epoch, index) keys of one epoch; an error is returned for `ResumableLoader` to raise."""
        try:
            found = [(key, *item) for key in keys if (item := self._load(key))]
        except ImageReadError as error:
            return error
        images = torch.stack([image for _, _, image in found]) if found else self._no_images()
        labels = self.labels[[place for _, place, _ in found]]
        return self._finish(images, [key for key, _, _ in found]), labels

    def _load(self, key: Key) -> tuple[int, Tensor] | None:
        """Place in the dataset and framed image of a key; nothing where evaluation has to leave it out."""

        def read(place: int) -> tuple[int, Tensor]:
            path = os.fsdecode(self.paths[place])
            with item_rng(self.seed, *key), own_pixel_limit():
                image = self.framing(read_image(path, self.in_chans, self.max_pixels))
            return place, image if isinstance(image, Tensor) else tv.pil_to_tensor(image)

        return self._readable.load(key[1], read, train=self.augmentation is not None)

    def _no_images(self) -> Tensor:
        height, width = self.framing(torch.zeros(self.in_chans, 8, 8)).shape[-2:]
        return torch.zeros(0, self.in_chans, height, width)
