"""Batches of images and labels for training and evaluation, from any source, resumable and in step over processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torchvision.transforms import v2

from weightformer.tasks.classification.datasets import ArrayDataset, FileDataset
from weightformer.tasks.classification.images import find_images, read_image
from weightformer.tasks.classification.probe import load_probe
from weightformer.tasks.classification.sources import (
    SOURCE_CLASSES,
    class_folders,
    load_digits,
    load_fashion_mnist,
    scan_classes,
    split_folders,
)
from weightformer.tasks.classification.transforms import (
    BatchAugmentation,
    Normalize,
    eval_framing,
    eval_transform,
    train_framing,
)
from weightformer.training.loader import ResumableLoader, build_loader

__all__ = ["DataConfig", "ImageData", "eval_transform", "find_images", "read_image"]


@dataclass
class DataConfig:
    """Where images come from, how evaluation frames them and how training varies them."""

    source: Literal["folder", "digits", "fashion_mnist", "probe"] = "digits"
    """``folder`` (train/<class>/<image> and val/<class>/<image>), one of two real sets of small grey images, or
    ``probe``, a test of global modelling made of Fashion-MNIST items."""
    root: str | None = None
    """The folder; for ``fashion_mnist`` and ``probe`` optional, where Fashion-MNIST's four files lie."""
    image_size: int | tuple[int, int] = 224
    """Side of the model's input in pixels, or its height and width."""
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
        for name, low in (("batch_size", 1), ("num_workers", 0), ("max_pixels", 1), ("pad_crop", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"data.{name} must be at least {low}, got {getattr(self, name)}")
        if min(self.size) < 1:
            raise ValueError(f"data.image_size must be at least 1, got {self.image_size}")
        if self.crop_mode == "center" and len(set(self.size)) > 1:
            raise ValueError(f"data.crop_mode: center needs one data.image_size, got {self.image_size}; choose squash")
        if self.pad_crop > min(self.size):
            raise ValueError(f"data.pad_crop ({self.pad_crop}) is larger than the image ({self.image_size})")
        for name in ("hflip", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability in [0, 1], got {getattr(self, name)}")
        if not 0.1 <= self.crop_pct <= 1:
            raise ValueError(f"data.crop_pct must be in [0.1, 1], got {self.crop_pct}")
        if self.scale and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"data.scale must be two rising shares in (0, 1], got {list(self.scale)}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"data.ratio must be two rising positive numbers, got {list(self.ratio)}")
        if self.rand_augment and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            raise ValueError(
                f"data.rand_augment {self.rand_augment!r} is not in timm's notation; write it like rand-m9-mstd0.5-inc1"
            )

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the model's input."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size


_RAND_AUGMENT = re.compile(r"rand(-((m|n|mmax|inc)\d+|(p|mstd)\d+(\.\d+)?))*")


class ImageData:
    """The training and validation images of a configuration, as one process sees them.

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
            raise ValueError(f"data.source {config.source} is grey: model.in_chans must be 1 or 3, not {in_chans}")
        self.config, self.in_chans, self.seed = config, in_chans, seed
        self.rank, self.world_size = rank, world_size
        self._normalize = Normalize(in_chans, mean, std)
        self._framing = {
            "train": v2.Compose(train_framing(config, in_chans, mean)),
            "val": v2.Compose(eval_framing(config)),
        }
        self._folders = split_folders(config.root or "") if config.source == "folder" else {}
        self.class_names = self._check_classes(class_names)

    @property
    def num_train(self) -> int:
        """Training images, over all processes."""
        return len(self._train)

    @property
    def num_val(self) -> int:
        """Validation images, over all processes."""
        return len(self._val)

    def dataset(self, split: Literal["train", "val"]) -> ArrayDataset | FileDataset:
        """The images of a split, by (epoch, index): those of ``train`` augmented."""
        return self._train if split == "train" else self._val

    @property
    def skipped(self) -> list[str]:
        """Files that this process could not read so far (``on_bad_image: skip``)."""
        opened = [value for value in vars(self).values() if isinstance(value, FileDataset)]
        return [path for dataset in opened for path in dataset.skipped]

    def train_loader(self) -> ResumableLoader:
        """Shuffled, augmented batches, as many on every rank.

        The last, smaller batch of an epoch is left out, unless it is the only one.
        """
        return self._loader(self._train, train=True)

    def val_loader(self) -> ResumableLoader:
        """Every validation image once, in order.

        A batch may be smaller than others, or empty: on a rank that has run out of images, or where they are skipped.
        """
        return self._loader(self._val, train=False)

    def _loader(self, dataset: ArrayDataset | FileDataset, *, train: bool) -> ResumableLoader:
        return build_loader(
            dataset,
            self.config.batch_size,
            train=train,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self.config.num_workers,
        )

    @cached_property
    def _train(self) -> ArrayDataset | FileDataset:
        return self._open("train")

    @cached_property
    def _val(self) -> ArrayDataset | FileDataset:
        return self._open("val")

    def _open(self, split: Literal["train", "val"]) -> ArrayDataset | FileDataset:
        config, train = self.config, split == "train"
        paths: list[str] = []
        if config.source == "digits":
            images, labels = load_digits(train=train)
        elif config.source == "fashion_mnist":
            images, labels = load_fashion_mnist(config.root, train=train)
        elif config.source == "probe":
            images, labels = load_probe(config.root, train=train)
        elif split in self._folders:
            paths, labels = scan_classes(self._folders[split], self.class_names, allow_empty=not train)
        else:
            raise FileNotFoundError(f"data.root {config.root} holds no {split}/ folder")
        shared: dict[str, Any] = {
            "labels": labels,
            "framing": self._framing[split],
            "normalize": self._normalize,
            "augmentation": BatchAugmentation(config, seed=self.seed, num_items=len(labels)) if train else None,
            "seed": self.seed,
        }
        if config.source == "folder":
            skip_bad = config.on_bad_image == "skip"
            return FileDataset(paths, in_chans=self.in_chans, max_pixels=config.max_pixels, skip_bad=skip_bad, **shared)
        one_by_one = train and bool(config.scale or config.rand_augment)
        return ArrayDataset(images.expand(-1, self.in_chans, -1, -1), one_by_one=one_by_one, **shared)

    def _check_classes(self, given: Sequence[str] | None) -> list[str]:
        """One list of class names for every split and for the model, or an error that says what differs."""
        found = {str(folder): class_folders(folder) for folder in self._folders.values()}
        found = found or {f"data.source {self.config.source}": SOURCE_CLASSES[self.config.source]}
        where, names = ("the model", list(given)) if given is not None else next(iter(found.items()))
        if len(set(names)) != len(names):
            raise ValueError(f"the class names of {where} are not all different: {_some(sorted(names))}")
        for place, others in found.items():
            missing = [name for name in names if name not in set(others)]
            unknown = [name for name in others if name not in set(names)]
            if missing or unknown:
                raise ValueError(
                    f"the classes of {place} are not those of {where}: missing {_some(missing)}; unknown "
                    f"{_some(unknown)}"
                )
            if self.config.source != "folder" and others != names:
                raise ValueError(f"the classes of {place} are in another order than those of {where}: {_some(names)}")
        return names


def _some(names: Sequence[str]) -> str:
    """Names for a message, the first ten."""
    return (", ".join(names[:10]) or "none") + (f", ... ({len(names)} in all)" if len(names) > 10 else "")
