"""Label the pixels of image files; write masks and overlays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from weightformer.config import Arguments
from weightformer.models.checkpoint import load_weights
from weightformer.tasks.classification.images import find_images
from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.segmentation.config import SegmentationConfig
from weightformer.tasks.segmentation.datasets import load_image
from weightformer.tasks.segmentation.inference import label_map
from weightformer.tasks.segmentation.masks import to_file_values
from weightformer.tasks.segmentation.module import SegmentationModule
from weightformer.tasks.segmentation.overlay import draw_overlay, palette, share_text
from weightformer.tasks.segmentation.transforms import resize, scaled_size
from weightformer.training.runs import inference_device, normalization, without_start_weights

__all__ = ["PREDICT_ARGUMENTS", "Prediction", "iter_predictions", "predict", "write_prediction"]

PREDICT_ARGUMENTS: Arguments = [
    (("--save",), {"metavar": "FOLDER", "help": "write masks/ and overlays/ below this folder"}),
]


@dataclass
class Prediction:
    """What a model says of one image file."""

    path: str
    """The file."""
    image: Tensor | None = None
    """The image (C, H, W), uint8 for 1 and 3 channels; None if it could not be read."""
    labels: Tensor | None = None
    """The class (H, W) of every pixel, uint8; None if the image could not be read."""
    error: str = ""
    """Why the image could not be read."""


def iter_predictions(
    config: SegmentationConfig, weights: str | Path, class_names: Sequence[str], files: Sequence[str | Path]
) -> Iterator[Prediction]:
    """Label image files, in order; an unreadable one is reported and does not end the work.

    Args:
        config: names the model, how images are scaled and how the model runs over them.
        weights: a checkpoint or weight file that fits the model exactly.
        class_names: in the order of the model's outputs.
        files: the images.
    """
    module = SegmentationModule(without_start_weights(config), list(class_names))
    load_weights(module.model, weights)
    device = inference_device(config.trainer.accelerator)
    model: Any = module.model.to(device).eval()
    normalize = Normalize(config.model.in_chans, *normalization(config.model))

    def logits(window: Tensor) -> Tensor:
        return model(normalize(window).to(device))  # a large image is turned to floats a window at a time

    for file in files:
        try:
            image = load_image(file, config.model.in_chans, config.data.max_pixels)
        except (OSError, ValueError) as error:
            yield Prediction(str(file), error=str(error))
            continue
        height, width = image.shape[-2:]
        size = scaled_size(height, width, config.data.short_side)
        with torch.inference_mode():
            labels = label_map(logits, resize(image, size)[None], (height, width), config.infer)
        yield Prediction(str(file), image, labels[0].cpu())


def predict(
    config: SegmentationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    images: Sequence[str | Path],
    *,
    save: str | Path | None = None,
) -> int:
    """Label files and folders of images; write a mask and an overlay for each, or print the classes found.

    A file that cannot be read is named on the error stream.

    Args:
        config: see `iter_predictions`.
        weights: see `iter_predictions`.
        class_names: see `iter_predictions`.
        images: files, and folders to search for them.
        save: a folder for ``masks/`` and ``overlays/``, written as they come; without one a table is printed.

    Returns:
        The number of images that could not be read.

    Raises:
        FileNotFoundError: a path that does not exist, or folders without any image.
        ValueError: ``save`` names a file.
    """
    if save is not None and (Path(save).is_file() or Path(save).suffix in (".csv", ".json", ".png")):
        raise ValueError(f"masks and overlays are written to a folder, and {str(save)!r} names a file")
    files = find_images(images)
    names = _output_names(files)
    table = Table("image", "size", "classes, by share of pixels")
    console = Console(stderr=True, soft_wrap=True)
    predictions = iter_predictions(config, weights, class_names, files)
    shown = track(predictions, "predicting", total=len(files), console=console, transient=True)
    failed = 0
    for name, prediction in zip(names, shown, strict=True):
        if prediction.labels is None:
            failed += 1
            console.print(prediction.error, markup=False, highlight=False)
        elif save is not None:
            write_prediction(prediction, class_names, Path(save), name, config.data.reduce_zero_label)
        else:
            height, width = prediction.labels.shape
            table.add_row(prediction.path, f"{height} x {width}", _shares(prediction.labels, class_names))
    if save is None:
        Console().print(table)
    return failed


def write_prediction(
    prediction: Prediction, class_names: Sequence[str], folder: Path, name: Path, reduce_zero_label: bool
) -> None:
    """Write ``masks/NAME``, in the values of the data set's own masks, and ``overlays/NAME``.

    The mask is a PNG of 8 bits whose palette is only for the eye: with ``reduce_zero_label``, class c is stored as
    c + 1, else as c.

    Args:
        prediction: of an image that could be read.
        class_names: in the order of the labels.
        folder: where to.
        name: relative to ``masks/`` and ``overlays/``, a ``.png``.
        reduce_zero_label: see above.
    """
    assert prediction.image is not None
    assert prediction.labels is not None
    values = to_file_values(prediction.labels, reduce_zero_label=reduce_zero_label)
    mask = Image.fromarray(values)
    colors = palette(len(class_names))
    mask.putpalette(np.concatenate([np.zeros((int(reduce_zero_label), 3), np.uint8), colors]).tobytes())
    picture = draw_overlay(_displayable(prediction.image), prediction.labels.numpy(), class_names)
    for kind, content in (("masks", mask), ("overlays", picture)):
        path = folder / kind / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.save(path)


def _displayable(image: Tensor) -> Image.Image:
    """An image of any channels (C, H, W) as a PIL image; of other than 1 or 3 the first is shown."""
    if image.dtype != torch.uint8:
        image = (image[:1].clamp(0, 1) * 255).round().to(torch.uint8)
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def _output_names(files: Sequence[Path]) -> list[Path]:
    """A ``.png`` for every file, in folders as below their common one; two that differ in suffix alone keep it."""
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
    relative = [Path(os.path.relpath(os.path.abspath(path), folder)) for path in files]
    stems = [path.with_suffix("") for path in relative]
    return [
        path.with_suffix(".png") if stems.count(stem) == 1 else path.with_name(f"{path.name}.png")
        for path, stem in zip(relative, stems, strict=True)
    ]


def _shares(labels: Tensor, class_names: Sequence[str]) -> str:
    counts = torch.bincount(labels.flatten(), minlength=len(class_names))
    best = [(class_names[i], int(counts[i])) for i in counts.argsort(descending=True).tolist() if counts[i]]
    return ", ".join(f"{name} {share_text(count / labels.numel())}" for name, count in best[:4])
