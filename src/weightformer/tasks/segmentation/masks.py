"""Masks in files: one class number a pixel, as ADE20K writes them; read with their faults named, and written back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightformer.tasks.classification.images import ImageReadError, read_as_stored

__all__ = ["IGNORE", "class_names_file", "is_binary", "read_class_names", "read_values", "to_file_values", "to_labels"]

IGNORE = 255
"""The label of pixels that neither the loss nor the metrics count."""

_ADE20K_NAMES = "objectInfo150.txt"
_NAMES = "classes.txt"


def read_values(path: str | os.PathLike[str], max_pixels: int) -> NDArray[np.int64]:
    """The numbers (H, W) in a mask's file, upright.

    Args:
        path: a PNG of mode L, P (the palette's indices count, its colours do not) or 16-bit grey.
        max_pixels: refuse images with more pixels.

    Raises:
        ImageReadError: damaged, or a colour image.
    """
    image = read_as_stored(path, max_pixels)
    if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        raise ImageReadError(
            f"mask {path} is a colour image (mode {image.mode}); a mask holds one class number a pixel, in 8 or 16 bits"
        )
    return np.asarray(image).astype(np.int64)


def to_labels(
    values: NDArray[np.int64], num_classes: int, *, reduce_zero_label: bool, path: str | os.PathLike[str]
) -> Tensor:
    """The numbers of a file as labels (H, W) uint8: 0..K-1, and 255 for pixels that are not counted.

    Args:
        values: see `read_values`.
        num_classes: K.
        reduce_zero_label: ADE20K's rule: 0 in the file is not counted, and n is class n - 1.
        path: the file, for messages.

    Raises:
        ImageReadError: values that name no class; the message lists them.
    """
    first = int(reduce_zero_label)
    valid = {IGNORE, *range(num_classes + first)}
    wrong = [value for value in np.unique(values).tolist() if value not in valid]
    if wrong:
        shown = ", ".join(map(str, wrong[:10])) + (f", ... ({len(wrong)} values)" if len(wrong) > 10 else "")
        raise ImageReadError(
            f"mask {path} holds {shown}: with {num_classes} classes and data.reduce_zero_label "
            f"{str(reduce_zero_label).lower()}, {first}..{num_classes + first - 1} name a class and {IGNORE}"
            f"{' and 0 are' if first else ' is'} not counted"
        )
    labels = np.where(values == IGNORE, IGNORE, values - first)
    return torch.from_numpy(np.where(labels < 0, IGNORE, labels).astype(np.uint8))


def is_binary(values: NDArray[np.int64]) -> bool:
    """Whether a mask is made of 0 and 255 alone: black and white rather than class numbers, by all appearance."""
    return np.array_equal(np.unique(values), (0, IGNORE))


def to_file_values(labels: Tensor, *, reduce_zero_label: bool) -> NDArray[np.uint8]:
    """Predicted labels (H, W) as they stand in a data set's masks, so that `to_labels` gives them back."""
    return (labels + int(reduce_zero_label)).to(torch.uint8).numpy()


def class_names_file(root: str | os.PathLike[str]) -> Path:
    """The file that names a data set's classes.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in (_NAMES, _ADE20K_NAMES):
        if (path := Path(root, name)).is_file():
            return path
    raise FileNotFoundError(
        f"data.root {root} names no classes: give {_NAMES} with one name a line, in the order of the labels, or "
        f"ADE20K's {_ADE20K_NAMES}"
    )


def read_class_names(path: str | os.PathLike[str]) -> list[str]:
    """The classes, in the order of the labels: one name a line, or ADE20K's table (its last column, first synonym).

    Raises:
        ValueError: no names, names that occur twice, or more than 8 bits can tell apart.
    """
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if lines and lines[0].split("\t")[0] == "Idx":
        names = [line.split("\t")[-1].split(",")[0].strip() for line in lines[1:]]
        names = [name if names.count(name) == 1 else f"{name} {i}" for i, name in enumerate(names, 1)]
    else:
        names = [line.strip() for line in lines]
    if not names or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"{path} must name every class once; " + (f"twice: {', '.join(twice)}" if names else "it is empty")
        )
    if len(names) > IGNORE - 1:
        raise ValueError(f"{path} names {len(names)} classes; masks of 8 bits hold at most {IGNORE - 1}")
    return names
