"""Where images and labels come from: a folder per class, Fashion-MNIST, or the digits that scikit-learn ships."""

from __future__ import annotations

import gzip
import os
import tempfile
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weightformer.tasks.classification import probe
from weightformer.tasks.classification.images import images_below

__all__ = ["SOURCE_CLASSES", "class_folders", "load_digits", "load_fashion_mnist", "scan_classes", "split_folders"]

SOURCE_CLASSES: dict[str, list[str]] = {
    "digits": [str(digit) for digit in range(10)],
    "fashion_mnist": [
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ],
    "probe": list(probe.CLASSES),
}

_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts it


def split_folders(root: str | os.PathLike[str]) -> dict[str, Path]:
    """The folders of the splits ``train`` and ``val`` (or ``validation``, ``test``) below ``root``, those that exist.

    Raises:
        FileNotFoundError: neither exists.
    """
    root = Path(root)
    found = {}
    for split, names in (("train", ["train"]), ("val", ["val", "validation", "test"])):
        if folder := next((root / name for name in names if (root / name).is_dir()), None):
            found[split] = folder
    if not found:
        raise FileNotFoundError(f"data.root {root} holds no train/ or val/ folder; expected train/<class>/<image>")
    return found


def class_folders(folder: Path) -> list[str]:
    """Class names: the names of the visible folders inside, in the order of ``sorted()``.

    Raises:
        ValueError: there are none.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} holds no class folders; expected {folder.name}/<class>/<image>")
    return names


def scan_classes(folder: Path, class_names: Sequence[str], *, allow_empty: bool) -> tuple[list[str], Tensor]:
    """Paths of all images below the class folders, and their labels (N,).

    Args:
        folder: of one split.
        class_names: label i is the folder ``class_names[i]``.
        allow_empty: only warn of a class without images. Training cannot learn such a class: there it is an error,
            for dropping it silently would change what every label after it means.

    Raises:
        ValueError: a class without images, or no image at all.
    """
    paths: list[str] = []
    counts = []
    for name in class_names:
        images = images_below(folder / name)
        if not images:
            message = f"class folder {folder / name} holds no images"
            if not allow_empty:
                raise ValueError(f"{message}; add some, or remove the folder from every split")
            warnings.warn(message, stacklevel=2)
        paths += images
        counts.append(len(images))
    if not paths:
        raise ValueError(f"no images below {folder}")
    return paths, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def load_digits(*, train: bool) -> tuple[Tensor, Tensor]:
    """The 1,437 training or 360 test digits (N, 1, 8, 8) uint8 and their labels; a fixed split, equal in each class."""
    try:
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install "weightformer[train]"') from error
    digits = datasets.load_digits()
    rows = np.arange(len(digits.target))
    chosen = train_test_split(rows, test_size=360, stratify=digits.target, random_state=0)[0 if train else 1]
    images = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)
    return torch.from_numpy(images)[:, None], torch.from_numpy(digits.target[chosen]).long()


def load_fashion_mnist(root: str | os.PathLike[str] | None, *, train: bool) -> tuple[Tensor, Tensor]:
    """The 60,000 training or 10,000 test images (N, 1, 28, 28) uint8 of Fashion-MNIST and their labels.

    Args:
        root: a folder with the four idx files, or torchvision's root; without one, where Debian's package puts them,
            else torchvision's download.
        train: which split.

    Raises:
        FileNotFoundError: no files there, and none could be downloaded.
        ValueError: a damaged file.
    """
    folder = _fashion_folder(root)
    split = "train" if train else "t10k"
    images = _read_idx(folder, f"{split}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{split}-labels-idx1-ubyte").long()
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() > 9:
        raise ValueError(
            f"{folder} does not hold Fashion-MNIST: its {split} images are {tuple(images.shape)}, labels "
            f"{tuple(labels.shape)} up to {labels.max()}"
        )
    return images[:, None], labels


def _fashion_folder(root: str | os.PathLike[str] | None) -> Path:
    cache = Path(torch.hub.get_dir()) / "datasets"
    raw = Path("FashionMNIST", "raw")
    places = [_DEBIAN_FASHION, cache / raw] if root is None else [Path(root), Path(root) / raw]
    for place in places:
        if any(place.glob("train-images-idx3-ubyte*")):
            return place
    if root is not None:
        raise FileNotFoundError(f"data.root {root} holds no Fashion-MNIST (train-images-idx3-ubyte.gz and three more)")
    _download_fashion(cache)
    return cache / raw


def _download_fashion(cache: Path) -> None:
    """torchvision's download, put in place as a whole so that several processes may try at once."""
    from torchvision.datasets import FashionMNIST

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            FashionMNIST(folder, download=True)
        except (OSError, RuntimeError) as error:
            raise FileNotFoundError(
                "Fashion-MNIST is not on this machine and could not be downloaded; give its folder as data.root, or "
                "apt-get install dataset-fashion-mnist"
            ) from error
        if not (cache / "FashionMNIST").exists():
            os.replace(Path(folder, "FashionMNIST"), cache / "FashionMNIST")


def _read_idx(folder: Path, name: str) -> Tensor:
    """The array of bytes in an idx file, compressed or not."""
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} lacks {name}.gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error
    # Two zero bytes, 8 for unsigned bytes, the number of axes, then their lengths as big-endian 32-bit integers.
    num_axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * num_axes
    shape = np.frombuffer(content[4:start], dtype=">i4").astype(int).tolist() if len(content) >= start else []
    if not shape or len(content) != start + int(np.prod(shape)):
        raise ValueError(f"{path} is damaged (no idx file of bytes, or cut off); fetch it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
