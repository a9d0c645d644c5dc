"""Find objects in image files; write COCO's result format, and pictures of what was found."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from weightformer.config import Arguments
from weightformer.models.checkpoint import load_weights
from weightformer.tasks.classification.images import find_images
from weightformer.tasks.classification.transforms import Normalize
from weightformer.tasks.detection.config import DetectionConfig
from weightformer.tasks.detection.data import read_pixels
from weightformer.tasks.detection.draw import draw_results
from weightformer.tasks.detection.metrics import coco_results
from weightformer.tasks.detection.module import DetectionModule
from weightformer.tasks.detection.transforms import fitted_size, resize
from weightformer.training.runs import inference_device, normalization, without_start_weights

__all__ = ["PREDICT_ARGUMENTS", "Prediction", "iter_predictions", "predict"]

# Options of the command line that `predict` takes as keywords.
PREDICT_ARGUMENTS: Arguments = [
    (("--save",), {"metavar": "FILE", "help": "write all detections to this .json file, in COCO's result format"}),
    (("--pictures",), {"metavar": "FOLDER", "help": "draw boxes and masks on the images, as PNG files in this folder"}),
    (
        ("--threshold",),
        {"type": float, "default": 0.5, "help": "smallest score that is drawn and listed (default: 0.5)"},
    ),
]


@dataclass
class Prediction:
    """What a detector says of one image file."""

    path: str
    """The file."""
    image_id: int
    """The number in its name, as COCO's files have one, else its place among the files."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """COCO result records, best first; none if the image could not be read."""
    image: Tensor | None = None
    """The image (C, H, W)."""
    error: str = ""
    """Why the image could not be read."""


def iter_predictions(
    config: DetectionConfig, weights: str | Path, categories: Mapping[int, str], files: Sequence[str | Path]
) -> Iterator[Prediction]:
    """Find objects in image files, in order; an unreadable one is reported and does not end the work.

    Args:
        config: names the model and how images are prepared.
        weights: a checkpoint or weight file that fits the model exactly.
        categories: names by COCO id, in the order of the labels.
        files: the images.
    """
    module = DetectionModule(without_start_weights(config), categories)
    load_weights(module.model, weights)
    device = inference_device(config.trainer.accelerator)
    module = module.to(device).eval()
    normalize = Normalize(config.model.in_chans, *normalization(config.model))
    for image_id, file in zip(_image_ids(files), files, strict=True):
        prediction = Prediction(str(file), image_id)
        try:
            image = read_pixels(file, config.model.in_chans, config.data.max_pixels)
        except (OSError, ValueError) as error:
            prediction.error = str(error)
            yield prediction
            continue
        size = image.shape[-2], image.shape[-1]
        scaled = resize(image, fitted_size(size, config.data.image_size))
        with torch.inference_mode():
            (found,) = module([normalize(scaled).to(device)])
        prediction.image, seen = image, (scaled.shape[-2], scaled.shape[-1])
        prediction.results = coco_results(
            found, image_id=image_id, size=size, scaled_size=seen, category_ids=module.category_ids
        )
        yield prediction


def predict(
    config: DetectionConfig,
    weights: str | Path,
    categories: Mapping[int, str],
    images: Sequence[str | Path],
    *,
    save: str | Path | None = None,
    pictures: str | Path | None = None,
    threshold: float = 0.5,
) -> int:
    """Find objects in files and folders of images and write what was found.

    Args:
        config: see `iter_predictions`.
        weights: likewise.
        categories: likewise.
        images: files, and folders to search.
        save: a ``.json`` file for all detections, of any score; written row by row as they come.
        pictures: a folder for the images with boxes and masks drawn on them.
        threshold: smallest score that is drawn, and listed where nothing is saved.

    Returns:
        The number of images that could not be read.

    Raises:
        FileNotFoundError: a path that does not exist, or folders without any image.
        ValueError: ``save`` is no ``.json`` file, or the threshold is no score.
    """
    if save and Path(save).suffix != ".json":
        raise ValueError(f"detections are written as .json (COCO's result format), not as {str(save)!r}")
    if not 0 <= threshold <= 1:
        raise ValueError(f"--threshold is a score in [0, 1], got {threshold}")
    files = find_images(images)
    found = iter_predictions(config, weights, categories, files)
    shown = track(found, "predicting", total=len(files), console=Console(stderr=True), transient=True)
    drawn = _draw(shown, Path(pictures), categories, threshold) if pictures else shown
    if save:
        return _write(drawn, Path(save))
    return _list(drawn, categories, threshold)


def _image_ids(files: Sequence[str | Path]) -> list[int]:
    """The numbers that end the files' names where all have one of their own, else 1, 2, ..."""
    matches = [re.search(r"(\d{1,18})$", Path(file).stem) for file in files]
    numbers = [int(match[1]) for match in matches if match]
    return numbers if len(set(numbers)) == len(files) else list(range(1, len(files) + 1))


def _draw(
    predictions: Iterable[Prediction], folder: Path, categories: Mapping[int, str], threshold: float
) -> Iterator[Prediction]:
    folder.mkdir(parents=True, exist_ok=True)
    names: Counter[str] = Counter()
    for prediction in predictions:
        if prediction.image is not None:
            stem = Path(prediction.path).stem
            names[stem] += 1
            name = f"{stem}_{names[stem]}.png" if names[stem] > 1 else f"{stem}.png"
            results = [r for r in prediction.results if r["score"] >= threshold]
            draw_results(prediction.image, results, categories).save(folder / name)
        yield prediction


def _write(predictions: Iterable[Prediction], path: Path) -> int:
    failed: list[str] = []
    separator = "[\n"
    with path.open("w", encoding="utf-8") as file:
        for prediction in predictions:
            failed += [prediction.error] * bool(prediction.error)
            for record in prediction.results:
                file.write(separator + json.dumps({**record, "file_name": prediction.path}))
                separator = ",\n"
            file.flush()
        file.write("[]\n" if separator == "[\n" else "\n]\n")
    console = Console(stderr=True)
    for error in failed:
        console.print(error, highlight=False, markup=False, soft_wrap=True)
    return len(failed)


def _list(predictions: Iterable[Prediction], categories: Mapping[int, str], threshold: float) -> int:
    table = Table("image", "objects", "best first")
    failed = 0
    for prediction in predictions:
        if prediction.error:
            failed += 1
            table.add_row(prediction.path, "[red]unreadable[/red]", prediction.error)
            continue
        kept = [r for r in prediction.results if r["score"] >= threshold]
        best = ", ".join(f"{categories[r['category_id']]} {r['score']:.0%}" for r in kept[:4])
        table.add_row(prediction.path, str(len(kept)), best + (", ..." if len(kept) > 4 else ""))
    Console().print(table)
    return failed
