"""Batches of images and objects from COCO's format, resumable and in step over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as tv

from weightformer.tasks.classification.images import ImageReadError, Readable, read_image
from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.detection.coco import CocoImage, CocoSet, decode_mask
from weightformer.tasks.detection.transforms import TrainTransform, fitted_size, resize
from weightformer.training.loader import Key, ResumableLoader, build_loader, item_rng

__all__ = ["Batch", "DataConfig", "DetectionData", "DetectionDataset", "read_pixels"]

Batch = tuple[list[Tensor], list[dict[str, Any]]]  # images (C, h, w) of any sizes; of each what is known


@dataclass
class DataConfig:
    """Where images and annotations lie, how evaluation scales images and how training varies them."""

    root: str | None = None
    """The folder that the other four are in: COCO 2017's, or one laid out like it."""
    train_images: str = "train2017"
    """Folder of the training images."""
    train_annotations: str = "annotations/instances_train2017.json"
    """Their annotations, in COCO's format."""
    val_images: str = "val2017"
    """Folder of the validation images."""
    val_annotations: str = "annotations/instances_val2017.json"
    """Their annotations."""
    image_size: int = 1024
    """Images are scaled so that their longer side has as many pixels; in training also the side of the crop."""
    jitter: tuple[float, float] = (1.0, 1.0)
    """Large-scale jitter: smallest and largest factor on that size in training; ViTDet's is 0.1 to 2."""
    hflip: float = 0.0
    """Probability of a left-right flip."""
    batch_size: int = 1
    """Images a batch and process."""
    num_workers: int = 0
    """Processes that prepare batches ahead, for each training process; 0 prepares them in the training process."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Stop at an image that cannot be read, naming it; or pass over it and count it: training takes the next one in its
    place, evaluation finds nothing in it."""
    max_pixels: int = 89_478_485
    """Refuse images with more pixels than this (the default is Pillow's)."""

    def __post_init__(self) -> None:
        for name, low in (("image_size", 1), ("batch_size", 1), ("num_workers", 0), ("max_pixels", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"data.{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 < self.jitter[0] <= self.jitter[1]:
            raise ValueError(f"data.jitter must be two rising positive factors, got {list(self.jitter)}")
        if not 0 <= self.hflip <= 1:
            raise ValueError(f"data.hflip is a probability in [0, 1], got {self.hflip}")


class DetectionDataset(Dataset[Any]):
    """The images of a set, a batch at a time.

    What becomes of an image that cannot be read is said in `Readable`; evaluation finds nothing in it.

    Args:
        coco: the set.
        in_chans: C.
        config: how images are scaled.
        normalize: of an image.
        train: augment, and give the objects; crowds are left out of them.
        seed: of the augmentation.
    """

    def __init__(
        self, coco: CocoSet, *, in_chans: int, config: DataConfig, normalize: Normalize, train: bool, seed: int
    ) -> None:
        self.images, self.in_chans, self.config, self.seed = coco.images, in_chans, config, seed
        self.labels = {number: label for label, number in enumerate(coco.categories, 1)}  # 0 is the background
        self.normalize, self.transform = normalize, TrainTransform(config, normalize) if train else None
        self._readable = Readable(len(coco.images), skip=config.on_bad_image == "skip")

    @property
    def skipped(self) -> list[str]:
        """Images passed over so far, by this process or its workers."""
        return [self.images[place].path for place in self._readable.skipped()]

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: Sequence[Key]) -> Batch | Exception:
        """The batch of some (epoch, index) keys; an error is returned for `ResumableLoader` to raise."""
        try:
            items = [item for key in keys if (item := self._load(key))]
        except (ValueError, OSError) as error:
            return error
        return [image for image, _ in items], [known for _, known in items]

    def _load(self, key: Key) -> tuple[Tensor, dict[str, Any]] | None:
        """The finished item of a key; nothing where evaluation has to do without it."""
        return self._readable.load(
            key[1], lambda place: self._prepare(self.images[place], key), train=self.transform is not None
        )

    def _prepare(self, record: CocoImage, key: Key) -> tuple[Tensor, dict[str, Any]]:
        image = read_pixels(record.path, self.in_chans, self.config.max_pixels)
        size = record.height, record.width
        if image.shape[-2:] != size:
            raise ImageReadError(
                f"image {record.id} ({record.path}) has {image.shape[-2]} x {image.shape[-1]} px, its annotations "
                f"are for {size[0]} x {size[1]}; height and width must be those of the image as it is shown (upright)"
            )
        known: dict[str, Any] = {"image_id": record.id, "size": size}
        if self.transform is None:
            return self.normalize(resize(image, fitted_size(size, self.config.image_size))), known
        masks, labels = self._objects(record)
        with item_rng(self.seed, *key):
            image, objects = self.transform(image, masks, labels)
        return image, {**known, **objects}

    def _objects(self, record: CocoImage) -> tuple[Tensor, Tensor]:
        objects = [a for a in record.annotations if not a["iscrowd"]]
        masks = [decode_mask(a["segmentation"], record.height, record.width) for a in objects]
        labels = torch.tensor([self.labels[a["category_id"]] for a in objects], dtype=torch.int64)
        stacked = np.stack(masks) if masks else np.zeros((0, record.height, record.width), np.uint8)
        return torch.from_numpy(stacked), labels


def read_pixels(path: str | Path, in_chans: int, max_pixels: int) -> Tensor:
    """An image file, upright, as a tensor (C, H, W): uint8, or floats in [0, 1] for other than 1 or 3 channels.

    Raises:
        ImageReadError: the content is damaged, no image, too large, or of other channels.
        OSError: the file is missing or cannot be opened.
    """
    image = read_image(path, in_chans, max_pixels)
    return tv.pil_to_tensor(image) if isinstance(image, Image.Image) else image


class DetectionData:
    """The training and validation images of a configuration, as one process sees them.

    Args:
        config: which images, how many at a time, how varied.
        in_chans: channels of the model's input; files are read to match.
        mean: per channel, of values in [0, 1].
        std: per channel.
        seed: of order and augmentation.
        rank: of this process.
        world_size: number of processes.
        categories: names by COCO id that a model was trained on; by default those of the training file.

    Raises:
        FileNotFoundError: missing folders or files.
        ValueError: files with other categories than each other or than ``categories``.
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
        categories: Mapping[int, str] | None = None,
    ) -> None:
        if not config.root:
            raise ValueError("data.root is needed: the folder with the images and annotations (COCO 2017's layout)")
        self.config, self.in_chans, self.seed = config, in_chans, seed
        self.rank, self.world_size = rank, world_size
        self._normalize = Normalize(in_chans, mean, std)
        self._datasets: list[DetectionDataset] = []
        where, self.categories = (
            ("the model", dict(categories)) if categories else (str(self.train.path), self.train.categories)
        )
        if self.val.categories != self.categories:
            differing = sorted(dict(self.val.categories.items() ^ self.categories.items()))[:10]
            raise ValueError(
                f"the categories of {self.val.path} are not those of {where}: they differ in the ids or names of "
                f"{differing}"
            )

    @cached_property
    def train(self) -> CocoSet:
        """The training images and their annotations."""
        return self._open("train")

    @cached_property
    def val(self) -> CocoSet:
        """The validation images and their annotations."""
        return self._open("val")

    @property
    def skipped(self) -> list[str]:
        """Images that this process could not read so far (``on_bad_image: skip``)."""
        return [path for dataset in self._datasets for path in dataset.skipped]

    def train_loader(self) -> ResumableLoader:
        """Shuffled, augmented batches, as many on every rank.

        The last, smaller batch of an epoch is left out, unless it is the only one.
        """
        return self._loader(self.train, train=True)

    def val_loader(self) -> ResumableLoader:
        """Every validation image once, in order; a batch may be smaller than others, or empty."""
        return self._loader(self.val, train=False)

    def _open(self, split: Literal["train", "val"]) -> CocoSet:
        root = Path(self.config.root or "")
        images, annotations = (root / getattr(self.config, f"{split}_{kind}") for kind in ("images", "annotations"))
        if not images.is_dir():
            raise FileNotFoundError(f"no folder {images} (data.root and data.{split}_images)")
        return CocoSet(annotations, images)

    def _loader(self, coco: CocoSet, *, train: bool) -> ResumableLoader:
        dataset = DetectionDataset(
            coco,
            in_chans=self.in_chans,
            config=self.config,
            normalize=self._normalize,
            train=train,
            seed=self.seed,
        )
        self._datasets.append(dataset)
        return build_loader(
            dataset,
            self.config.batch_size,
            train=train,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self.config.num_workers,
        )
