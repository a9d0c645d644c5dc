"""From logits to a label for every pixel: of a whole image, or through a window that slides over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["InferenceConfig", "label_map", "sliding_bands"]

Model = Callable[[Tensor], Tensor]  # images (B, C, h, w) to logits (B, K, h, w)

_CHUNK = 2**26  # logits enlarged at a time: a quarter of a gigabyte


@dataclass
class InferenceConfig:
    """How evaluation and prediction run a model over an image."""

    mode: Literal["whole", "slide"] = "whole"
    """``whole`` sees the image at once; ``slide`` averages the logits of overlapping windows, in memory that does not
    grow with the image's height."""
    window: int = 512
    """Side of a window, in pixels."""
    stride: int = 341
    """Pixels from one window to the next."""

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.window:
            raise ValueError(f"infer.stride must be in 1..{self.window} (infer.window), got {self.stride}")


def label_map(model: Model, images: Tensor, size: tuple[int, int], config: InferenceConfig) -> Tensor:
    """The likeliest class of every pixel.

    Args:
        model: from images to logits.
        images: (B, C, h, w), all of one size.
        size: H, W of the result; where it is not h, w the logits are enlarged or reduced bilinearly.
        config: whole or through a window.

    Returns:
        Labels (B, H, W), uint8.
    """
    bands = sliding_bands(model, images, config) if config.mode == "slide" else iter([model(images)])
    if tuple(images.shape[-2:]) == tuple(size):
        return torch.cat([band.argmax(1).to(torch.uint8) for band in bands], 1)
    return _argmax_resized(torch.cat(list(bands), 2), size)


def sliding_bands(model: Model, images: Tensor, config: InferenceConfig) -> Iterator[Tensor]:
    """Logits of overlapping windows, averaged where they overlap, in bands of rows from the top.

    The last window of a row or column is moved back to lie inside the image. A band is handed out as soon as no
    further window reaches it, so one row of windows is all that is kept.

    Args:
        model: from images to logits.
        images: (B, C, h, w).
        config: the window and its stride.

    Yields:
        Logits (B, K, rows, w); the rows of all bands are those of the image.
    """
    height, width = images.shape[-2:]
    rows, tall = _starts(height, config)
    columns, wide = _starts(width, config)
    total = weight = None
    for top, following in zip(rows, [*rows[1:], height], strict=True):
        for left in columns:
            logits = model(images[..., top : top + tall, left : left + wide]).float()
            if total is None or weight is None:
                total = logits.new_zeros(*logits.shape[:2], tall, width)
                weight = logits.new_zeros(tall, width)
            total[..., left : left + wide] += logits
            weight[:, left : left + wide] += 1
        assert total is not None
        assert weight is not None
        done = min(following - top, tall)
        yield total[..., :done, :] / weight[:done]
        total, weight = (F.pad(x[..., done:, :], (0, 0, 0, done)) for x in (total, weight))


def _starts(length: int, config: InferenceConfig) -> tuple[list[int], int]:
    """Where windows begin along one side, and their length there."""
    window = min(config.window, length)
    return [*range(0, length - window, config.stride), length - window], window


def _argmax_resized(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Labels (B, H, W) of logits (B, K, h, w) resized to H x W, a few classes at a time."""
    batch, num_classes = logits.shape[:2]
    step = max(1, _CHUNK // (batch * size[0] * size[1]))
    best = labels = None
    for first in range(0, num_classes, step):
        chunk = F.interpolate(logits[:, first : first + step].float(), size=size, mode="bilinear")
        value, index = chunk.max(1)
        index = (index + first).to(torch.uint8)
        if best is None or labels is None:
            best, labels = value, index
        else:
            labels = torch.where(value > best, index, labels)
            best = torch.maximum(best, value)
    assert labels is not None
    return labels
