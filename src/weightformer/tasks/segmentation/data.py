"""Batches of images and masks in ADE20K's folder layout, resumable and in step over processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from weightformer.tasks.classification.images import images_below
from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.segmentation.datasets import MaskDataset
from weightformer.tasks.segmentation.masks import class_names_file, read_class_names
from weightformer.tasks.segmentation.transforms import TrainTransform
from weightformer.training.loader import ResumableLoader, build_loader

__all__ = ["DataConfig", "SegmentationData", "find_pairs"]


@dataclass
class DataConfig:
    """Where images and masks lie, how training varies them and how evaluation scales them."""

    root: str = "ADEChallengeData2016"
    """Folder with images/{training,validation}, annotations/{training,validation} and the names of the classes."""
    reduce_zero_label: bool = True
    """ADE20K's rule for masks: 0 is not counted, and n is class n - 1. Without it n is class n. 255 never counts."""
    crop_size: int = 512
    """Side of a training image, in pixels."""
    batch_size: int = 16
    """Training images a batch and process."""
    val_batch_size: int = 1
    """Images evaluated at a time; those of one size are run together, so the result does not depend on it."""
    num_workers: int = 0
    """Processes that prepare batches ahead, for each training process; 0 prepares them in the training process."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Stop at an image or mask that cannot be read, naming it; or skip the pair and count it."""
    max_pixels: int = 89_478_485
    """Refuse images with more pixels than this (the default is Pillow's)."""
    short_side: int = 512
    """Images are scaled to this shorter side, the longer at most 4 times it, before the random scale of training and
    before evaluation; 0 leaves them as they are."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Range of the random scale of training images."""
    cat_max_ratio: float = 0.75
    """A training crop is drawn again, up to ten times, while one class has more than this share of it."""
    hflip: float = 0.5
    """Probability of a left-right flip."""
    photometric: bool = True
    """Vary brightness, contrast, saturation and hue of training images."""

    def __post_init__(self) -> None:
        for name, low in (
            ("crop_size", 1), ("batch_size", 1), ("val_batch_size", 1), ("num_workers", 0), ("max_pixels", 1),
            ("short_side", 0),
        ):  # fmt: skip
            if getattr(self, name) < low:
                raise ValueError(f"data.{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"data.scale must be two rising positive factors, got {list(self.scale)}")
        if not 0 < self.cat_max_ratio <= 1:
            raise ValueError(f"data.cat_max_ratio must be in (0, 1], got {self.cat_max_ratio}")
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"data.hflip is a probability in [0, 1], got {self.hflip}")


class SegmentationData:
    """The training and validation images of a configuration, as one process sees them.

    Args:
        config: which images, how many at a time, how varied.
        in_chans: channels of the model's input; files are read to match.
        mean: per channel, of values in [0, 1].
        std: per channel.
        seed: of order and augmentation.
        rank: of this process.
        world_size: number of processes.
        class_names: the classes that a model was trained on, which must be those of the data.

    Raises:
        FileNotFoundError: missing folders or files, or images without masks.
        ValueError: other classes than ``class_names``; settings that do not go together.
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
        if config.photometric and in_chans not in (1, 3):
            raise ValueError(f"data.photometric works on grey or RGB images, not on {in_chans} channels; turn it off")
        self.config, self.in_chans, self.seed = config, in_chans, seed
        self.rank, self.world_size = rank, world_size
        self._normalize = Normalize(in_chans, mean, std)
        names_file = class_names_file(config.root)
        self.class_names = read_class_names(names_file)
        if class_names is not None and list(class_names) != self.class_names:
            raise ValueError(
                f"the classes of {names_file} ({_some(self.class_names)}) are not those of the model "
                f"({_some(class_names)})"
            )

    @property
    def skipped(self) -> list[str]:
        """Images that this process could not read so far (``on_bad_image: skip``)."""
        opened = [value for value in vars(self).values() if isinstance(value, MaskDataset)]
        return [path for dataset in opened for path in dataset.skipped]

    def train_loader(self) -> ResumableLoader:
        """Shuffled, augmented batches, as many on every rank.

        The last, smaller batch of an epoch is left out, unless it is the only one.
        """
        return self._loader(self._train, self.config.batch_size, train=True)

    def val_loader(self) -> ResumableLoader:
        """Every validation image once, in order; a batch is a list, and empty on a rank that has run out of images."""
        return self._loader(self._val, self.config.val_batch_size, train=False)

    def _loader(self, dataset: MaskDataset, batch_size: int, *, train: bool) -> ResumableLoader:
        return build_loader(
            dataset,
            batch_size,
            train=train,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self.config.num_workers,
        )

    @cached_property
    def _train(self) -> MaskDataset:
        return self._open("training", TrainTransform(self.config, self._normalize))

    @cached_property
    def _val(self) -> MaskDataset:
        return self._open("validation", None)

    def _open(self, split: str, transform: TrainTransform | None) -> MaskDataset:
        return MaskDataset(
            find_pairs(self.config.root, split),
            num_classes=len(self.class_names),
            reduce_zero_label=self.config.reduce_zero_label,
            in_chans=self.in_chans,
            short_side=self.config.short_side,
            normalize=self._normalize,
            transform=transform,
            max_pixels=self.config.max_pixels,
            skip_bad=self.config.on_bad_image == "skip",
            seed=self.seed,
        )


def find_pairs(root: str | os.PathLike[str], split: str) -> list[tuple[str, str]]:
    """Images under ``images/split``, at any depth, each with the mask of its name under ``annotations/split``.

    Raises:
        FileNotFoundError: a folder is missing or empty, or images have no mask; some are named.
    """
    folders = {name: Path(root, name, split) for name in ("images", "annotations")}
    for folder in folders.values():
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder}; data.root must hold images/{{training,validation}} and "
                "annotations/{training,validation}"
            )
    images, masks = ({os.path.splitext(os.path.relpath(path, folder))[0]: path for path in images_below(folder)}
                     for folder in folders.values())  # fmt: skip
    if not images:
        raise FileNotFoundError(f"no images under {folders['images']}")
    if lacking := [path for name, path in images.items() if name not in masks]:
        raise FileNotFoundError(
            f"{len(lacking)} of {len(images)} images under {folders['images']} have no mask of their name under "
            f"{folders['annotations']}: {_some(lacking)}"
        )
    if spare := [path for name, path in masks.items() if name not in images]:
        warnings.warn(f"{len(spare)} mask(s) have no image and are left out: {_some(spare)}", stacklevel=2)
    return [(path, masks[name]) for name, path in images.items()]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
