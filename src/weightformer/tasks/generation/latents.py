"""Latents of images, encoded once by a VAE and read from disk in training: ``weightformer data latents``."""

from __future__ import annotations

import hashlib
import json
import os
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from weightformer.training.loader import Key, derive_seed

__all__ = ["LatentDataset", "LatentFolder", "encode_images", "load_vae", "main"]

_SHARD = 1024  # images a file
_RECORD = "latents.json"


class LatentFolder:
    """What ``weightformer data latents`` wrote, for reading.

    Args:
        path: the folder.
        class_names: the classes that a model was trained on, which must be the folder's.

    Attributes:
        class_names: in the order of the labels.
        shape: channels, height and width of a latent.
        vae: ``name``, ``scaling_factor`` and ``shift_factor`` of the VAE.
        splits: those that are there.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: it is damaged or incomplete, or has other classes.
    """

    def __init__(self, path: str | os.PathLike[str], class_names: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        record = self.path / _RECORD
        if not record.is_file():
            raise FileNotFoundError(f"data.root {path} holds no {_RECORD}; write it with: weightformer data latents")
        try:
            content = json.loads(record.read_text())
            self.class_names = [str(name) for name in content["class_names"]]
            self.shape: list[int] = content["shape"]
            self.vae: dict[str, Any] = content["vae"]
            self._counts: dict[str, int] = content["images"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{record} is damaged ({error!r}); write the latents again") from error
        self.splits = list(self._counts)
        if class_names is not None and list(class_names) != self.class_names:
            raise ValueError(f"the classes of {path} are not those of the model, or in another order")

    def labels(self, split: str) -> Tensor:
        """Of every image (N,); -1 where it could not be read.

        Raises:
            ValueError: latents are missing.
        """
        shards = [self.shard(split, start) for start in range(0, self._counts[split], _SHARD)]
        if missing := [path for path in shards if not path.is_file()]:
            raise ValueError(
                f"{len(missing)} of {len(shards)} files of {self.path / split} are not written yet ({missing[0].name} "
                "first); the same `weightformer data latents` command goes on where it stopped"
            )
        return torch.cat([torch.from_numpy(np.load(_labels(path))) for path in shards])

    def shard(self, split: str, index: int) -> Path:
        """The file that holds an image's latents."""
        return self.path / split / f"{index // _SHARD:05d}.npy"


class LatentDataset(Dataset[Any]):
    """Latents (B, C, h, w), drawn anew from the VAE's posterior in every epoch, and their labels (B,).

    Args:
        folder: where they are.
        split: which ones.
        hflip: probability of taking the flipped image's.
        seed: of flips and draws, which are functions of (seed, epoch, index) alone.
    """

    def __init__(self, folder: LatentFolder, split: Literal["train", "val"], *, hflip: float, seed: int) -> None:
        self.folder, self.split, self.hflip, self.seed = folder, split, hflip, derive_seed(seed, 3)
        labels = folder.labels(split)
        self._places = (labels >= 0).nonzero()[:, 0]
        self.labels = labels[self._places]
        self._scale, self._shift = folder.vae["scaling_factor"], folder.vae["shift_factor"]
        self._open: dict[Path, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # a worker maps the files itself

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """The batch of some (epoch, index) keys."""
        latents = torch.empty(len(keys), *self.folder.shape)
        generator = torch.Generator()
        for i, (epoch, index) in enumerate(keys):
            generator.manual_seed(derive_seed(self.seed, epoch, index))
            flip = int(torch.rand((), generator=generator) < self.hflip)
            mean, std = torch.from_numpy(self._moments(int(self._places[index]))[flip].astype(np.float32))
            drawn = mean + std * torch.randn(mean.shape, generator=generator)
            latents[i] = (drawn - self._shift) * self._scale
        return latents, self.labels[[index for _, index in keys]]

    def _moments(self, place: int) -> np.ndarray:
        """(flipped or not, mean and standard deviation, C, h, w)."""
        path = self.folder.shard(self.split, place)
        if path not in self._open:
            self._open[path] = np.load(path, mmap_mode="r")
        return self._open[path][place % _SHARD]


def load_vae(name: str) -> Any:
    """The AutoencoderKL in a folder, or of a name on the Hub (also one inside a pipeline's ``vae/``).

    Raises:
        ValueError: there is none.
    """
    from diffusers import AutoencoderKL

    try:
        vae = AutoencoderKL.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"no AutoencoderKL at {name!r} ({reason}); give a folder or a name on the Hub") from error
    return vae.eval().requires_grad_(False)


def encode_images(
    output: str | os.PathLike[str],
    *,
    vae: str,
    image_size: int = 256,
    batch_size: int = 16,
    num_workers: int = 0,
    device: str | None = None,
    **source: Any,
) -> None:
    """Encode every image, and its mirror image, and store mean and standard deviation in float16.

    Run again with the same arguments it goes on where it stopped; several processes (torchrun) share the work.

    Args:
        output: the folder to write.
        vae: see `load_vae`.
        image_size: images are resized (short side) and cropped (centre) to this side, in pixels.
        batch_size: images encoded at once; each twice.
        num_workers: processes that read images ahead.
        device: ``cuda``, ``cpu``; by default the GPU if there is one.
        **source: ``source``, ``root``, ``on_bad_image`` and ``max_pixels`` of the task's `DataConfig`.

    Raises:
        FileNotFoundError: no images there.
        ValueError: an image that cannot be read (with ``on_bad_image: skip`` it is left out), or a folder that holds
            the latents of other images.
    """
    from weightformer.tasks.generation.data import DataConfig, GenerationData

    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder = load_vae(vae).to(device)
    data = GenerationData(DataConfig(image_size=image_size, **source), seed=0, channels=encoder.config.in_channels)
    splits = {split: data.real_images(split) for split in ("train", "val") if split == "train" or data.has_val}
    with torch.inference_mode():
        probe = encoder.encode(torch.zeros(1, encoder.config.in_channels, image_size, image_size, device=device))
    record = {
        "vae": {
            "name": vae,
            "scaling_factor": encoder.config.scaling_factor,
            "shift_factor": encoder.config.shift_factor or 0.0,
        },
        "image_size": image_size,
        "shape": list(probe.latent_dist.mean.shape[1:]),
        "class_names": data.class_names,
        "images": {split: len(samples) for split, samples in splits.items()},
        "source": {split: _fingerprint(samples) for split, samples in splits.items()},
    }
    folder = _claim(Path(output), record)
    work = [(split, start) for split, images in splits.items() for start in range(0, len(images), _SHARD)][rank::world]
    left = [(split, start) for split, start in work if not folder.shard(split, start).is_file()]
    for split, start in track(left, f"encoding on {device}", console=Console(stderr=True), disable=rank > 0):
        samples = splits[split]
        places = range(start, min(start + _SHARD, len(samples)))
        loader = DataLoader(_OneByOne(samples, places), batch_size, num_workers=num_workers, collate_fn=list)
        _write_shard(folder.shard(split, start), loader, encoder, samples.labels[places.start : places.stop], record)


def main(argv: Sequence[str]) -> None:
    """``weightformer data latents``: see `encode_images`."""
    parser = ArgumentParser(prog="weightformer data latents", description="Encode images by a VAE, once, to train on.")
    parser.add_argument("output", help="folder to write; the same command goes on where it stopped")
    parser.add_argument(
        "--vae", required=True, help="an AutoencoderKL: a folder, or a name like stabilityai/sd-vae-ft-ema"
    )
    parser.add_argument("--source", default="folder", choices=["folder", "fashion_mnist", "digits"])
    parser.add_argument("--root", help="folder of the images: train/<class>/<image>, and val/ if there is one")
    parser.add_argument("--image_size", type=int, default=256, help="side in pixels")
    parser.add_argument("--batch_size", type=int, default=16, help="images encoded at once")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read images ahead")
    parser.add_argument("--on_bad_image", default="error", choices=["error", "skip"])
    parser.add_argument("--max_pixels", type=int, default=89_478_485, help="refuse larger images")
    parser.add_argument("--device", help="cuda or cpu; by default the GPU if there is one")
    args = parser.parse_args(argv)
    encode_images(**vars(args))
    if int(os.environ.get("RANK", "0")) == 0:
        Console().print(_summary(LatentFolder(args.output)), soft_wrap=True, highlight=False)


def _summary(folder: LatentFolder) -> str:
    """What the first file holds, once scaled: a VAE that fits the images makes latents of a deviation near 1."""
    mean, std = np.load(folder.shard("train", 0))[:, 0].astype(np.float32).swapaxes(0, 1)
    drawn = mean + std * np.random.default_rng(0).standard_normal(mean.shape, np.float32)
    scaled = (drawn - folder.vae["shift_factor"]) * folder.vae["scaling_factor"]
    shape = " x ".join(map(str, folder.shape))
    return f"latents of {shape}; of the first images, scaled: mean {scaled.mean():.2f}, deviation {scaled.std():.2f}"


class _OneByOne(Dataset[Any]):
    """Single images (C, S, S) of a dataset of batches; None, or the error, for one that cannot be read."""

    def __init__(self, samples: Any, places: range) -> None:
        self.samples, self.places = samples, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Tensor | Exception | None:
        found = self.samples.__getitems__([(0, self.places[i])])
        if isinstance(found, Exception):
            return found
        return found[0][0] if len(found[0]) else None


@torch.inference_mode()
def _write_shard(
    path: Path, batches: Iterable[list[Tensor | Exception | None]], encoder: Any, labels: Tensor, record: dict[str, Any]
) -> None:
    moments = np.zeros((len(labels), 2, 2, *record["shape"]), np.float16)
    labels, place = labels.clone(), 0
    for batch in batches:
        for item in batch:
            if isinstance(item, Exception):
                raise item
        read = [i for i, item in enumerate(batch, place) if item is not None]
        labels[[i for i, item in enumerate(batch, place) if item is None]] = -1
        place += len(batch)
        if read:
            images = torch.stack([item for item in batch if isinstance(item, Tensor)]).to(encoder.device)
            for flipped, view in enumerate((images, images.flip(-1))):
                drawn = encoder.encode(view).latent_dist
                moments[read, flipped] = torch.stack((drawn.mean, drawn.std), dim=1).cpu().numpy()
    if not np.isfinite(moments).all():
        raise ValueError(f"{path}: latents overflow float16; is this VAE meant for images in [-1, 1]?")
    path.parent.mkdir(exist_ok=True)
    for target, array in ((_labels(path), labels.numpy()), (path, moments)):
        temporary = target.with_name(f".{os.getpid()}.{target.name}")
        with temporary.open("wb") as file:
            np.save(file, array)
        os.replace(temporary, target)


def _claim(folder: Path, record: dict[str, Any]) -> LatentFolder:
    """The folder, with its record written; it may hold an earlier part of the same work, and nothing else."""
    path = folder / _RECORD
    if path.is_file():
        before = json.loads(path.read_text())
        if differing := [key for key in record if before.get(key) != record[key]]:
            raise ValueError(
                f"{folder} holds latents of other images or settings ({', '.join(differing)}); choose another"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{os.getpid()}.json"
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, path)
    return LatentFolder(folder)


def _labels(shard: Path) -> Path:
    return shard.with_suffix(".labels.npy")


def _fingerprint(samples: Any) -> str:
    """Of the order of the images: their paths below the class folders' parent, and their labels."""
    digest = hashlib.blake2b(samples.labels.numpy().tobytes(), digest_size=16)
    for path in getattr(samples, "paths", ()):
        digest.update(b"/".join(path.split(b"/")[-2:]) + b"\0")
    return digest.hexdigest()
