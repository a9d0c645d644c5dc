"""Classify image files and write what was found."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from weightformer.config import Arguments
from weightformer.models.checkpoint import load_weights
from weightformer.tasks.classification.config import ClassificationConfig
from weightformer.tasks.classification.data import eval_transform, find_images, read_image
from weightformer.tasks.classification.module import ClassificationModule
from weightformer.training.runs import inference_device, normalization, without_start_weights

__all__ = [
    "PREDICT_ARGUMENTS",
    "Classifier",
    "Prediction",
    "iter_predictions",
    "load_model",
    "predict",
    "ranked",
    "write_predictions",
]

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
    classes: list[tuple[str, float]] = field(default_factory=list)
    """The likeliest classes and their probabilities, best first; empty if the image could not be read."""
    error: str = ""
    """Why the image could not be read."""
    values: list[float] = field(default_factory=list)
    """Logits or pooled features, where these were asked for instead of classes."""
    saved: str = ""
    """The file that dense features were written to."""


def load_model(config: ClassificationConfig, weights: str | Path, class_names: Sequence[str]) -> nn.Module:
    """The trained model in eval mode, on the GPU if there is one; its ``pretrained_cfg`` has the mean and deviation."""
    module = ClassificationModule(without_start_weights(config), list(class_names))
    model: Any = module.model
    load_weights(model, weights)
    mean, std = normalization(config.model)
    model.pretrained_cfg = {**(model.pretrained_cfg or {}), "mean": tuple(mean), "std": tuple(std)}
    device = inference_device(config.trainer.accelerator)
    return model.to(device).eval()


def ranked(logits: Tensor, class_names: Sequence[str], top_k: int) -> list[list[tuple[str, float]]]:
    """The likeliest classes and their probabilities for each row of logits (B, K), best first."""
    probabilities = logits.float().softmax(1).cpu()
    values, indices = probabilities.topk(min(top_k, len(class_names)), dim=1)
    return [
        [(class_names[i], p) for i, p in zip(row, chances, strict=True)]
        for row, chances in zip(indices.tolist(), values.tolist(), strict=True)
    ]


class Classifier:
    """Classifies lists of image files, each list as one batch, resized as in evaluation.

    Args:
        config: names the model and how images are prepared.
        weights: a checkpoint or weight file that fits the model exactly.
        class_names: in the order of the model's outputs.
        top_k: classes reported an image.
    """

    def __init__(
        self, config: ClassificationConfig, weights: str | Path, class_names: Sequence[str], top_k: int = 5
    ) -> None:
        self._config, self._class_names, self._top_k = config, list(class_names), top_k
        self._model = load_model(config, weights, class_names)
        self._device = next(self._model.parameters()).device
        self._transform = eval_transform(config.data, config.model.in_chans, *normalization(config.model))

    def __call__(self, files: Sequence[str | Path]) -> list[Prediction]:
        """One prediction a file, in order; an unreadable one carries its error."""
        rows = [Prediction(str(file)) for file in files]
        tensors = [tensor for row in rows if (tensor := self._read(row)) is not None]
        if tensors:
            with torch.inference_mode():
                logits = self._model(torch.stack(tensors).to(self._device))
            found = iter(ranked(logits, self._class_names, self._top_k))
            for row in rows:
                row.classes = [] if row.error else next(found)
        return rows

    def _read(self, row: Prediction) -> Tensor | None:
        """The model's input; none, and the reason in the row, if the file is unreadable."""
        try:
            return self._transform(read_image(row.path, self._config.model.in_chans, self._config.data.max_pixels))
        except (OSError, ValueError) as error:
            row.error = str(error)
            return None


def iter_predictions(
    config: ClassificationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    files: Sequence[str | Path],
    top_k: int = 5,
) -> Iterator[Prediction]:
    """Classify image files in batches, in order; see `Classifier`."""
    classify = Classifier(config, weights, class_names, top_k)
    for start in range(0, len(files), config.data.batch_size):
        yield from classify(files[start : start + config.data.batch_size])


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


def write_predictions(
    predictions: Iterable[Prediction],
    path: str | Path | None,
    total: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    progress: bool = True,
) -> int:
    """Write predictions, row by row as they come, to a ``.csv`` or ``.json`` file; without a path, to the terminal.

    Args:
        predictions: of any number of images.
        path: the file; ``None`` for the terminal.
        total: how many will come.
        columns: names of the numbers in `Prediction.values`, where these are to be written and not the classes.
        progress: whether to show a bar on the error stream.

    Returns:
        The number of images that could not be read.

    Raises:
        ValueError: a path of another kind.
    """
    kind = Path(path).suffix if path else ""
    if kind not in ("", ".csv", ".json"):
        raise ValueError(f"predictions are written as .csv or .json, not as {str(path)!r}")
    if progress:
        predictions = track(predictions, "predicting", total=total, console=Console(stderr=True), transient=True)
    if path is None:
        return _write_table(predictions)
    failed = 0
    with open(path, "w", newline="", encoding="utf-8") as file:
        if kind == ".csv":
            writer = csv.writer(file)
            writer.writerow(["path", *(columns or ("rank", "class", "probability")), "error"])
        for count, row in enumerate(predictions):
            failed += bool(row.error)
            if kind == ".csv":
                writer.writerows(_csv_rows(row, columns))
            else:
                file.write(("[\n" if count == 0 else ",\n") + json.dumps(_json_record(row, columns)))
            file.flush()
        if kind == ".json":
            file.write("\n]\n")
    return failed


def _csv_rows(row: Prediction, columns: Sequence[str] | None) -> list[list[object]]:
    if row.error:
        return [[row.path, *[""] * (3 if columns is None else len(columns)), row.error]]
    if columns is not None:
        return [[row.path, *(f"{value:.9g}" for value in row.values), ""]]
    return [[row.path, rank, name, f"{p:.6f}", ""] for rank, (name, p) in enumerate(row.classes, 1)]


def _json_record(row: Prediction, columns: Sequence[str] | None) -> dict[str, object]:
    found: dict[str, object] = {"path": row.path}
    if columns is None:
        found["classes"] = [{"class": name, "probability": round(p, 6)} for name, p in row.classes]
    else:
        found["values"] = row.values
    return found | ({"error": row.error} if row.error else {})


def _write_table(predictions: Iterable[Prediction]) -> int:
    table = Table("image", "class", "probability", "next")
    failed = 0
    for row in predictions:
        if row.error:
            failed += 1
            table.add_row(row.path, "[red]failed[/red]", "", row.error)
            continue
        (name, p), *others = row.classes
        table.add_row(row.path, name, f"{p:.1%}", ", ".join(f"{n} {q:.1%}" for n, q in others[:2]))
    Console().print(table)
    return failed
