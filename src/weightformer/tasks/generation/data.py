"""What a denoiser is trained on: images or cached latents, and everything random that diffusion adds to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from weightformer.tasks.classification.data import DataConfig as ImageConfig
from weightformer.tasks.classification.data import ImageData
from weightformer.tasks.classification.datasets import ArrayDataset, FileDataset
from weightformer.tasks.classification.sources import split_folders
from weightformer.tasks.generation.latents import LatentDataset, LatentFolder
from weightformer.training.loader import Key, ResumableLoader, build_loader, derive_seed

__all__ = ["Batch", "DataConfig", "DiffusionDataset", "GenerationData"]

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # clean (B, C, H, W), labels (B,), noise (B, C, H, W), steps (B,)


@dataclass
class DataConfig:
    """Where images or latents come from, and how they are varied."""

    source: Literal["folder", "latents", "digits", "fashion_mnist"] = "digits"
    """``folder`` (train/<class>/<image>, val/ optional), ``latents`` (what ``weightformer data latents`` wrote), or one
    of two real sets of small grey images."""
    root: str | None = None
    """The folder; for ``fashion_mnist`` optional, where its four files lie."""
    image_size: int = 32
    """Side in pixels that images are resized (short side) and cropped (centre) to; latents have their own size."""
    batch_size: int = 256
    """Samples a batch and process."""
    num_workers: int = 0
    """Processes that prepare batches ahead, for each training process; 0 prepares them in the training process."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Stop at an image that cannot be read, naming it; or skip and count it."""
    max_pixels: int = 89_478_485
    """Refuse images with more pixels than this (the default is Pillow's)."""
    hflip: float = 0.0
    """Probability of a left-right flip; of latents, of the flipped image's own."""
    label_dropout: float = 0.1
    """Share of training samples whose class is replaced by the null class, which guidance needs."""

    def __post_init__(self) -> None:
        for name in ("hflip", "label_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability in [0, 1], got {getattr(self, name)}")
        if self.source == "latents":
            if not self.root:
                raise ValueError("data.root is needed for data.source: latents; give the folder of `data latents`")
            if self.batch_size < 1 or self.num_workers < 0:
                raise ValueError("data.batch_size must be at least 1 and data.num_workers not negative")
        else:
            self.images()

    def images(self) -> ImageConfig:
        """The same in classification's words: resized on the short side, the centre cut out (as for DiT)."""
        shared = ("source", "root", "image_size", "batch_size", "num_workers", "on_bad_image", "max_pixels", "hflip")
        return ImageConfig(**{name: getattr(self, name) for name in shared}, crop_pct=1.0, crop_mode="center")


class GenerationData:
    """The training and validation samples of a configuration, as one process sees them.

    Args:
        config: which samples, how many at a time, how varied.
        seed: of order and of everything random in a sample.
        rank: of this process.
        world_size: number of processes.
        class_names: the classes that a model was trained on, in the order of its labels; by default the source's.
        channels: of the samples; by default 3 for image files, 1 for grey sets.

    Raises:
        FileNotFoundError: missing folders or files.
        ValueError: ``class_names`` that differ from the source's, or settings that do not go together.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        class_names: Sequence[str] | None = None,
        channels: int | None = None,
    ) -> None:
        self.config, self.seed, self.rank, self.world_size = config, seed, rank, world_size
        self.images: ImageData | None = None
        self.latents: LatentFolder | None = None
        if config.source == "latents":
            self.latents = LatentFolder(config.root or "", class_names)
            self.class_names = self.latents.class_names
            self.channels, *self.size = self.latents.shape
            self.has_val = "val" in self.latents.splits
        else:
            self.channels = channels or (3 if config.source == "folder" else 1)
            half = [0.5] * self.channels  # values in [-1, 1]
            self.images = ImageData(
                config.images(), in_chans=self.channels, mean=half, std=half, seed=seed, class_names=class_names
            )
            self.class_names = self.images.class_names
            self.size = [config.image_size] * 2
            self.has_val = config.source != "folder" or "val" in split_folders(config.root or "")

    @property
    def skipped(self) -> list[str]:
        """Files that this process could not read so far (``on_bad_image: skip``)."""
        return self.images.skipped if self.images else []

    @property
    def vae(self) -> dict[str, Any] | None:
        """What the samples are latents of; None for pixels."""
        return self.latents.vae if self.latents else None

    def samples(self, split: Literal["train", "val"]) -> Any:
        """The images or latents of a split, by (epoch, index), without what diffusion adds."""
        if self.images:
            return self.images.dataset(split)
        assert self.latents
        return LatentDataset(self.latents, split, hflip=self.config.hflip if split == "train" else 0.0, seed=self.seed)

    def real_images(self, split: Literal["train", "val"]) -> ArrayDataset | FileDataset:
        """The images of a split as evaluation reads them: neither flipped nor, where one is skipped, replaced."""
        assert self.images
        images = copy.copy(self.images.dataset(split))
        images.augmentation = None
        return images

    def train_loader(self) -> ResumableLoader:
        """Shuffled batches, as many on every rank; the last, smaller one is left out unless it is the only one."""
        return self._loader("train")

    def val_loader(self) -> ResumableLoader | None:
        """Every validation sample once, in order, with the same noise in every epoch; None if there are none."""
        return self._loader("val") if self.has_val else None

    def _loader(self, split: Literal["train", "val"]) -> ResumableLoader:
        train = split == "train"
        samples = self.samples(split)
        dataset = DiffusionDataset(
            samples,
            num_classes=len(self.class_names),
            label_dropout=self.config.label_dropout if train else 0.0,
            seed=derive_seed(self.seed, int(train)),
            every_epoch=train,
        )
        return build_loader(
            dataset,
            self.config.batch_size,
            train=train,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self.config.num_workers,
        )


class DiffusionDataset(Dataset[Any]):
    """Adds to a batch of samples the noise, the time steps and the dropped labels of its training step.

    Each is a function of (seed, epoch, index) alone: neither a restart nor the number of processes changes it.

    Args:
        samples: gives (samples, labels) for a batch of keys.
        num_classes: also the number of the null class.
        label_dropout: share of labels replaced by it.
        num_steps: of the diffusion.
        seed: of everything drawn here.
        every_epoch: draw anew in every epoch, as training does; else the same each time.
    """

    def __init__(
        self,
        samples: Any,
        *,
        num_classes: int,
        label_dropout: float,
        num_steps: int = 1000,
        seed: int,
        every_epoch: bool,
    ) -> None:
        self.samples, self.num_classes, self.label_dropout = samples, num_classes, label_dropout
        self.num_steps, self.seed, self.every_epoch = num_steps, seed, every_epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, keys: Sequence[Key]) -> Batch | Exception:
        """The batch of some (epoch, index) keys of one epoch."""
        found = self.samples.__getitems__(keys)
        if isinstance(found, Exception):
            return found
        clean, labels = found
        noise = torch.empty_like(clean)
        steps, drop = torch.empty_like(labels), torch.empty(len(labels))
        generator = torch.Generator()
        for i, (epoch, index) in zip(range(len(clean)), keys, strict=False):  # evaluation may have left some out
            generator.manual_seed(derive_seed(self.seed, epoch if self.every_epoch else 0, index))
            steps[i] = torch.randint(self.num_steps, (), generator=generator)
            drop[i] = torch.rand((), generator=generator)
            noise[i].normal_(generator=generator)
        return clean, labels.masked_fill(drop < self.label_dropout, self.num_classes), noise, steps
