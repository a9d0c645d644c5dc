"""Batches of images and labels for training and evaluation, from any source, resumable and in step over processes."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from weightformer.tasks.classification.images import ImageReadError, find_images, pixel_limit, read_image
from weightformer.tasks.classification.sources import (
    SOURCE_CLASSES,
    class_folders,
    load_digits,
    load_fashion_mnist,
    scan_classes,
    split_folders,
)
from weightformer.tasks.classification.transforms import (
    FinishBatch,
    check_statistics,
    eval_framing,
    eval_transform,
    train_framing,
)
from weightformer.training.loader import EpochSampler, Key, ResumableLoader, item_rng

__all__ = ["MEAN_STD", "DataConfig", "ImageData", "eval_transform", "find_images", "read_image"]

MEAN_STD = {"digits": (0.3054, 0.3761), "fashion_mnist": (0.2860, 0.3530)}
"""Mean and standard deviation of the grey training images, in [0, 1]; measured."""

Batch = tuple[Tensor, Tensor]  # images (B, C, S, S), labels (B,)


@dataclass
class DataConfig:
    """Where images come from, how evaluation frames them and how training varies them."""

    source: Literal["folder", "digits", "fashion_mnist"] = "digits"
    """``folder`` (train/<class>/<image> and val/<class>/<image>), or one of two real sets of small grey images."""
    root: str | None = None
    """The folder; for ``fashion_mnist`` optional, where its four files lie."""
    image_size: int = 224
    """Height and width of the model's input, in pixels."""
    batch_size: int = 128
    """Images a batch and process."""
    num_workers: int = 0
    """Processes that prepare batches ahead, for each training process; 0 prepares them in the training process."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Stop at an image that cannot be read, naming it; or skip and count it: training takes the next image of the
    data set in its place, evaluation leaves it out."""
    max_pixels: int = 89_478_485
    """Refuse images with more pixels than this (the default is Pillow's)."""
    crop_pct: float = 0.875
    """Evaluation cuts out this share of each side's length, from the centre; 1 keeps everything."""
    crop_mode: Literal["squash", "center"] = "squash"
    """``squash`` resizes to a square first, whatever the image's shape; ``center`` keeps the shape and cuts more."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bicubic"
    """How images are resized."""
    scale: tuple[float, float] | None = None
    """Random-resized-crop: smallest and largest share of the image's area; without it training frames as evaluation."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Its range of aspect ratios."""
    hflip: float = 0.0
    """Probability of a left-right flip."""
    rand_augment: str = ""
    """RandAugment in timm's notation, e.g. ``rand-m9-mstd0.5-inc1``."""
    erasing: float = 0.0
    """Probability of replacing a random rectangle by noise."""
    pad_crop: int = 0
    """Pad by this many black pixels and cut back to size at a random offset: a light augmentation of small images."""

    def __post_init__(self) -> None:
        if self.source == "folder" and not self.root:
            raise ValueError("data.root is needed for data.source: folder; give the folder that holds train/ and val/")
        if self.source == "digits" and self.root:
            raise ValueError("data.root has no use with data.source: digits; remove it, or choose data.source: folder")
        for name, low in (("image_size", 1), ("batch_size", 1), ("num_workers", 0), ("max_pixels", 1), ("pad_crop", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"data.{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("hflip", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability in [0, 1], got {getattr(self, name)}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"data.crop_pct must be in (0, 1], got {self.crop_pct}")
        if self.scale and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"data.scale must be two rising shares in (0, 1], got {list(self.scale)}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"data.ratio must be two rising positive numbers, got {list(self.ratio)}")
        if self.rand_augment and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            raise ValueError(
                f"data.rand_augment {self.rand_augment!r} is not in timm's notation; write it like rand-m9-mstd0.5-inc1"
            )


_RAND_AUGMENT = re.compile(r"rand(-((m|n|mmax|inc)\d+|(p|mstd)\d+(\.\d+)?))*")


class ImageData:
    """The training and validation images of a configuration, for one process.

    Args:
        config: which images, how many at a time, how varied.
        in_chans: channels of the model's input; files are read to match.
        mean: per channel, of values in [0, 1].
        std: per channel.
        seed: of order and augmentation.
        rank: of this process.
        world_size: number of processes.
        class_names: the classes that a model was trained on, in the order of its outputs; labels follow it. By
            default those of the source: for folders, names in the order of ``sorted()``.

    Raises:
        FileNotFoundError: missing folders or files.
        ValueError: splits, or ``class_names``, with differing classes (the differences are listed); mean or std of
            another length than ``in_chans``; settings that do not go together.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        in_chans: int,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if config.source != "folder" and in_chans not in (1, 3):
            raise ValueError(
                f"data.source {config.source} has grey images: model.in_chans must be 1 or 3, not {in_chans}"
            )
        self.config, self.in_chans, self.seed = config, in_chans, seed
        self.mean, self.std = check_statistics(in_chans, mean, std)
        self.rank, self.world_size = rank, world_size
        self._folders = split_folders(config.root or "") if config.source == "folder" else {}
        self.class_names = self._check_classes(list(class_names) if class_names is not None else None)
        self._train_framing = v2.Compose(train_framing(config, in_chans, self.mean))

    @property
    def num_train(self) -> int:
        """Training images, over all processes."""
        return len(self._train)

    @property
    def num_val(self) -> int:
        """Validation images, over all processes."""
        return len(self._val)

    @property
    def skipped(self) -> list[str]:
        """Images that this process could not read so far (``on_bad_image: skip``)."""
        loaded = [vars(self)[name] for name in ("_train", "_val") if name in vars(self)]
        return [path for images in loaded if isinstance(images, _Files) for path in images.skipped]

    def train_loader(self) -> ResumableLoader:
        """Shuffled, augmented batches: as many on every rank.

        The last, smaller batch of an epoch is left out, unless it is the only one.
        """
        sampler = self._sampler(self.num_train, shuffle=True)
        return self._loader(self._train, sampler, drop_last=len(sampler) >= self.config.batch_size)

    def val_loader(self) -> ResumableLoader:
        """Every validation image once, in order.

        Ranks may differ by one image, or have none; with ``on_bad_image: skip`` a batch may be smaller or empty.
        """
        return self._loader(self._val, self._sampler(self.num_val, shuffle=False), drop_last=False)

    def _sampler(self, num_items: int, shuffle: bool) -> EpochSampler:
        return EpochSampler(
            num_items,
            seed=self.seed,
            shuffle=shuffle,
            rank=self.rank,
            world_size=self.world_size,
            drop_uneven=shuffle,
        )

    def _loader(self, images: Dataset[Any], sampler: EpochSampler, drop_last: bool) -> ResumableLoader:
        return ResumableLoader(
            images,
            sampler,
            self.config.batch_size,
            drop_last=drop_last,
            num_workers=self.config.num_workers,
            persistent_workers=self.config.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=_as_is,
        )

    @cached_property
    def _train(self) -> _Files | _Arrays:
        return self._open(train=True)

    @cached_property
    def _val(self) -> _Files | _Arrays:
        return self._open(train=False)

    def _open(self, *, train: bool) -> _Files | _Arrays:
        config = self.config
        framing = self._train_framing if train else v2.Compose(eval_framing(config))

        def finish(num_items: int) -> FinishBatch:
            return FinishBatch(config if train else None, self.mean, self.std, seed=self.seed, num_items=num_items)

        if config.source != "folder":
            images, labels = (
                load_digits(train=train) if config.source == "digits" else load_fashion_mnist(config.root, train=train)
            )
            images = images.expand(-1, self.in_chans, -1, -1)
            return _Arrays(
                images,
                labels,
                framing,
                finish(len(labels)),
                seed=self.seed,
                one_by_one=train and bool(config.scale or config.rand_augment),
            )
        split = "train" if train else "val"
        if split not in self._folders:
            raise FileNotFoundError(f"data.root {config.root} holds no {split}/ folder")
        paths, labels = scan_classes(self._folders[split], self.class_names, allow_empty=not train)
        return _Files(paths, labels, framing, finish(len(labels)), config, self.in_chans, seed=self.seed, train=train)

    def _check_classes(self, given: list[str] | None) -> list[str]:
        """One list of class names for every split and for the model; an error that lists what differs."""
        found = {str(folder): class_folders(folder) for folder in self._folders.values()}
        found = found or {f"data.source {self.config.source}": SOURCE_CLASSES[self.config.source]}
        where, names = ("the model", given) if given is not None else next(iter(found.items()))
        for place, other in found.items():
            missing = [name for name in names if name not in other]
            unknown = [name for name in other if name not in names]
            if missing or unknown:
                raise ValueError(
                    f"the classes of {place} are not those of {where}"
                    + (f"; missing: {', '.join(missing)}" if missing else "")
                    + (f"; unknown: {', '.join(unknown)}" if unknown else "")
                )
        return names


def _as_is(batch: Batch) -> Batch:
    return batch


class _Arrays(Dataset[Batch]):
    """Images in memory, (N, C, h, w) uint8, framed a batch at a time where nothing random needs the single image."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        framing: Callable[[Any], Any],
        finish: FinishBatch,
        *,
        seed: int,
        one_by_one: bool,
    ) -> None:
        self.images, self.labels, self.framing, self.finish = images, labels, framing, finish
        self.seed, self.one_by_one = seed, one_by_one

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        chosen = [index for _, index in keys]
        images = self.images[chosen]
        if self.one_by_one:
            images = torch.stack([self._frame(image, key) for image, key in zip(images, keys, strict=True)])
        else:
            images = self.framing(images)
        return self.finish(images, keys), self.labels[chosen]

    def _frame(self, image: Tensor, key: Key) -> Tensor:
        with item_rng(self.seed, *key):
            return tv.pil_to_tensor(self.framing(tv.to_pil_image(image)))


class _Files(Dataset[Batch]):
    """Images in files, each read when asked for."""

    def __init__(
        self,
        paths: Sequence[str],
        labels: Tensor,
        framing: Callable[[Any], Any],
        finish: FinishBatch,
        config: DataConfig,
        in_chans: int,
        *,
        seed: int,
        train: bool,
    ) -> None:
        # One array: a list of millions of strings would be copied into every worker, reference count by count.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.labels, self.framing, self.finish = labels, framing, finish
        self.config, self.in_chans, self.seed, self.train = config, in_chans, seed, train
        self.bad = torch.zeros(len(paths), dtype=torch.bool).share_memory_()  # workers report through it

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def skipped(self) -> list[str]:
        """Paths that could not be read so far, by any worker of this process."""
        return [os.fsdecode(path) for path in self.paths[self.bad.numpy()]]

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        found = [(key, at, image) for key in keys for at, image in self._load(key)]
        size = self.config.image_size
        images = torch.stack([image for *_, image in found]) if found else torch.empty(0, self.in_chans, size, size)
        return self.finish(images, [key for key, *_ in found]), self.labels[[at for _, at, _ in found]]

    def _load(self, key: Key) -> list[tuple[int, Tensor]]:
        """The framed image of a key with its place in the data set; none if evaluation has to skip it."""
        epoch, index = key
        # A substitute depends on the key alone, so that ranks stay in step and a resumed run sees the same images.
        for offset in range(len(self) if self.train else 1):
            at = (index + offset) % len(self)
            if self.bad[at]:
                continue
            try:
                with pixel_limit(self.config.max_pixels), item_rng(self.seed, epoch, index):
                    image = read_image(os.fsdecode(self.paths[at]), self.in_chans, self.config.max_pixels)
                    image = self.framing(image)
            except ImageReadError as error:
                if self.config.on_bad_image == "error":
                    raise ImageReadError(f"{error} (data.on_bad_image: skip passes over such images)") from error
                warnings.warn(f"skipped: {error}", stacklevel=2)
                self.bad[at] = True
                continue
            return [(at, image if isinstance(image, Tensor) else tv.pil_to_tensor(image))]
        if self.train:
            raise ImageReadError(f"none of the {len(self)} training images can be read")
        return []
