"""Classify image files and write what was found."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weightformer.config import Arguments
from weightformer.models.checkpoint import load_weights
from weightformer.tasks.classification.config import ClassificationConfig
from weightformer.tasks.classification.data import eval_transform, find_images, read_image
from weightformer.tasks.classification.module import ClassificationModule
from weightformer.training.runs import normalization, without_start_weights

__all__ = ["PREDICT_ARGUMENTS", "Prediction", "iter_predictions", "predict", "write_predictions"]

# Options of the command line that `predict` takes as keywords.
PREDICT_ARGUMENTS: Arguments = [
    (("--save",), {"metavar": "FILE", "help": "write to this .csv or .json file instead of the terminal"}),
    (("--top_k",), {"type": int, "default": 5, "help": "classes to report for an image"}),
]


@dataclass
class Prediction:
    """What a model says of one image file."""

    path: str
    """The file."""
    classes: list[tuple[str, float]]
    """The likeliest classes and their probabilities, best first; empty if the image could not be read."""
    error: str = ""
    """Why the image could not be read."""


def iter_predictions(
    config: ClassificationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    files: Sequence[str | Path],
    top_k: int = 5,
) -> Iterator[Prediction]:
    """Classify image files, in order; an unreadable one is reported and does not end the work.

    Args:
        config: names the model and how images are prepared.
        weights: a checkpoint or weight file that fits the model exactly.
        class_names: in the order of the model's outputs.
        files: the images.
        top_k: classes reported an image.
    """
    module = ClassificationModule(without_start_weights(config), list(class_names))
    load_weights(module.model, weights)
    device = torch.device("cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu")
    module = module.to(device).eval()
    mean, std = normalization(config.model)
    transform = eval_transform(config.data, config.model.in_chans, mean, std)
    for start in range(0, len(files), config.data.batch_size):
        rows: list[Prediction] = []
        tensors = []
        for file in files[start : start + config.data.batch_size]:
            rows.append(Prediction(str(file), []))
            try:
                tensors.append(transform(read_image(file, config.model.in_chans, config.data.max_pixels)))
            except (OSError, ValueError) as error:
                rows[-1].error = str(error)
        if tensors:
            with torch.inference_mode():
                probabilities = module(torch.stack(tensors).to(device)).float().softmax(1).cpu()
            ranked = iter(zip(*probabilities.topk(min(top_k, len(class_names)), dim=1), strict=True))
            for row in rows:
                if not row.error:
                    values, indices = next(ranked)
                    row.classes = [(class_names[i], float(v)) for i, v in zip(indices.tolist(), values, strict=True)]
        yield from rows


def predict(
    config: ClassificationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    images: Sequence[str | Path],
    *,
    top_k: int = 5,
    save: str | Path | None = None,
) -> int:
    """Classify files and folders of images and write a table, see `iter_predictions` and `write_predictions`.

    Raises:
        FileNotFoundError: a path that does not exist, or folders without any image.

    Returns:
        The number of images that could not be read.
    """
    files = find_images(images)
    return write_predictions(iter_predictions(config, weights, class_names, files, top_k), save, len(files))


def write_predictions(predictions: Iterable[Prediction], path: str | Path | None, total: int | None = None) -> int:
    """Write predictions, row by row as they come, to a ``.csv`` or ``.json`` file; without a path, to the terminal.

    Returns:
        The number of images that could not be read.

    Raises:
        ValueError: a path of another kind.
    """
    kind = Path(path).suffix if path else ""
    if kind not in ("", ".csv", ".json"):
        raise ValueError(f"predictions are written as .csv or .json, not as {str(path)!r}")
    shown = track(predictions, "predicting", total=total, console=Console(stderr=True), transient=True)
    if path is None:
        return _write_table(shown)
    failed = 0
    with open(path, "w", newline="", encoding="utf-8") as file:
        if kind == ".csv":
            writer = csv.writer(file)
            writer.writerow(["path", "rank", "class", "probability", "error"])
        for count, row in enumerate(shown):
            failed += bool(row.error)
            if kind == ".csv":
                writer.writerows(
                    [row.path, rank, name, f"{p:.6f}", ""] for rank, (name, p) in enumerate(row.classes, 1)
                )
                if row.error:
                    writer.writerow([row.path, "", "", "", row.error])
            else:
                classes = [{"class": name, "probability": round(p, 6)} for name, p in row.classes]
                record = {"path": row.path, "classes": classes} | ({"error": row.error} if row.error else {})
                file.write(("[\n" if count == 0 else ",\n") + json.dumps(record))
            file.flush()
        if kind == ".json":
            file.write("\n]\n")
    return failed


def _write_table(predictions: Iterable[Prediction]) -> int:
    table = Table("image", "class", "probability", "next")
    failed = 0
    for row in predictions:
        if row.error:
            failed += 1
            table.add_row(row.path, "[red]unreadable[/red]", "", row.error)
            continue
        (name, p), *others = row.classes
        table.add_row(row.path, name, f"{p:.1%}", ", ".join(f"{n} {q:.1%}" for n, q in others[:2]))
    Console().print(table)
    return failed
