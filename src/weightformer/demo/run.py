"""Train, evaluate, predict and measure; write everything into one folder, and a page that tells it."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from weightformer.analysis.machine import machine, now
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.demo import scaling
from weightformer.demo.weights import neighbour_agreement, predicted_weights, principal_plane
from weightformer.training.log import read_log

__all__ = ["run"]


def run(output: str | Path = "report", *, options: Sequence[str] = (), sides: Sequence[int] = scaling.SIDES) -> Path:
    """Run the demonstration on the handwritten digits; a folder that holds an unfinished one is continued.

    The folder then holds ``report.html``, which needs nothing beside it, the numbers in it as ``report.json``, the
    test images as PNG files, what was predicted for them and the training run.

    Args:
        output: the folder.
        options: on top of the recipe ``digits``, as on the command line (``["--trainer.epochs", "2"]``).
        sides: of the images for which time and memory are measured, in pixels.

    Returns:
        The path of ``report.html``.

    Raises:
        ImportError: the extra ``train`` is not installed.
        RuntimeError: the measurement failed; no report is written.
    """
    try:
        from weightformer.demo import figures
        from weightformer.demo.report import render
        from weightformer.tasks import classification
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("weightformer"):
            raise
        raise ImportError(f"{error.name} is not installed; run: pip install 'weightformer[train]'") from error

    output = Path(output)
    config = parse_config(classification.Config, read_yaml(recipe_path("digits")), options, where="recipe digits")
    config = dataclasses.replace(config, output=str(output / "training"))
    weights = output / "training" / "checkpoints" / "last.ckpt"

    _say(f"1/5 training {config.model.name} on 1,437 handwritten digits, {config.trainer.epochs} epochs")
    training = _train(config)
    _say("2/5 evaluating on the 360 test images")
    evaluation = classification.evaluate(config, weights)
    _say(f"    {evaluation['top1']:.2%} of {evaluation['images']} images correct")
    _say("3/5 predicting the test images from PNG files")
    files, arrays, labels = _write_images(output / "images")
    names = [str(digit) for digit in range(10)]
    classification.predict(config, weights, names, files, top_k=3, save=output / "predictions.csv")
    predictions = _read_predictions(output / "predictions.csv", labels)
    _say("4/5 looking at the weights that the model predicts for them")
    predicted = _predicted_weights(config, weights, files)
    _say("5/5 measuring time and memory beside an attention twin, one CPU thread")
    measurements = _measure(sides)

    kernel = list(predicted)[-2]  # a dynamic block's convolution comes before its linear layer
    points, share = principal_plane(predicted[kernel])
    rows = [i for name in names[:2] for i in [j for j, label in enumerate(labels) if label == name][:2]]
    data: dict[str, Any] = {
        "output": str(output),
        "model": config.model.name,
        "training": training,
        "evaluation": evaluation,
        "predictions": predictions,
        "confusion": _confusion(predictions, names),
        "neighbours": {name: neighbour_agreement(value, labels) for name, value in predicted.items()},
        "neighbours_of_pixels": neighbour_agreement(torch.from_numpy(np.stack(arrays)), labels),
        "weight_shapes": {name: list(value.shape[1:]) for name, value in predicted.items()},
        "shown_kernel": kernel,
        "parameters": {name: _parameters(model) for name, model in scaling.build(32).items()},
        "measurements": measurements,
        "slopes": _slopes(measurements),
        "machine": _machine(),
    }
    pictures = {
        "training": figures.training_curve(**{key: training[key] for key in ("losses", "accuracies")}),
        "growth": figures.growth(measurements, data["slopes"]),
        "kernels": figures.kernels([arrays[i] for i in rows], [labels[i] for i in rows], predicted[kernel][rows]),
        "plane": figures.classes_plane(points, labels, names, share),
    }
    thumbnails = {str(file): figures.embedded_png(array) for file, array in zip(files, arrays, strict=True)}
    (output / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = output / "report.html"
    page.write_text(render(data, pictures, thumbnails), encoding="utf-8")
    return page


def _say(line: str) -> None:
    print(line, flush=True)


def _train(config: Any) -> dict[str, Any]:
    """Train, or continue what stands in the folder; how long it took and the curves are read from the run's log."""
    from weightformer.tasks import classification
    from weightformer.training.engine import claim_output

    folder = Path(config.output)
    try:
        claim_output(folder, dataclasses.asdict(config))
    except ValueError:  # an earlier demonstration with other settings
        shutil.rmtree(folder)
    classification.train(config)
    sessions: list[list[float]] = []
    losses, accuracies, steps_per_epoch = {}, {}, 1.0
    for record in read_log(folder / "log.jsonl"):
        if record.get("event") == "start":
            sessions.append([record["time"]])
        if "val/top1" in record:  # a complete run that is started again evaluates once more, after its last epoch
            accuracies[min(record["epoch"] + 1, config.trainer.epochs)] = record["val/top1"]
        if "train/loss_step" in record:
            losses[record["step"] + 1] = record["train/loss_step"]
        if "train/loss_epoch" in record:
            steps_per_epoch = (record["step"] + 1) / (record["epoch"] + 1)
            sessions[-1].append(record["time"])
    return {
        "epochs": config.trainer.epochs,
        "seconds": sum(times[-1] - times[0] for times in sessions),
        "losses": [[step / steps_per_epoch, loss] for step, loss in losses.items()],
        "accuracies": [[epoch, share] for epoch, share in accuracies.items()],
    }


def _write_images(folder: Path) -> tuple[list[Path], list[np.ndarray], list[str]]:
    """The test images as PNG files, one folder a class: files, grey arrays and class names."""
    from weightformer.tasks.classification.sources import load_digits

    images, targets = load_digits(train=False)
    arrays = [image.numpy()[0] for image in images]
    labels = [str(target) for target in targets.tolist()]
    files = [folder / label / f"{index:03d}.png" for index, label in enumerate(labels)]
    for file, array in zip(files, arrays, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(file)
    return files, arrays, labels


def _read_predictions(path: Path, labels: Sequence[str]) -> list[dict[str, Any]]:
    """What `predict` wrote, one record an image: ``path``, ``label`` and ``classes`` with probabilities, best first."""
    records: dict[str, dict[str, Any]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            record = records.setdefault(row["path"], {"path": row["path"], "classes": []})
            record["classes"].append([row["class"], float(row["probability"])])
    return [{**record, "label": label} for record, label in zip(records.values(), labels, strict=True)]


def _confusion(predictions: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[int]]:
    """Counts of images, by true class (rows) and predicted class (columns)."""
    counts = np.zeros((len(names), len(names)), int)
    for record in predictions:
        counts[names.index(record["label"]), names.index(record["classes"][0][0])] += 1
    return counts.tolist()


def _predicted_weights(config: Any, weights: Path, files: Sequence[Path]) -> dict[str, torch.Tensor]:
    from weightformer.models.checkpoint import load_weights
    from weightformer.tasks.classification.data import eval_transform, read_image
    from weightformer.tasks.classification.module import build_model
    from weightformer.training.runs import normalization

    model = build_model(config.model, 10, config.data.image_size)
    load_weights(model, weights)
    transform = eval_transform(config.data, config.model.in_chans, *normalization(config.model))
    return predicted_weights(
        model, torch.stack([transform(read_image(f, config.model.in_chans, config.data.max_pixels)) for f in files])
    )


def _measure(sides: Sequence[int]) -> list[dict[str, Any]]:
    records = []
    for record in scaling.measure(sides):
        records.append(record)
        times = (f"{name} {result['seconds'] * 1e3:.1f} ms" for name, result in record["models"].items())
        _say(f"    {record['side']} px: {', '.join(times)}")
    return records


def _slopes(measurements: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Exponents of pixels, by quantity and model; only for models measured at two sizes at least."""
    slopes: dict[str, dict[str, float]] = {}
    for quantity in ("seconds", "bytes", "multiply_adds"):
        slopes[quantity] = {}
        for name in measurements[0]["models"]:
            found = [(m["side"] ** 2, m["models"][name][quantity]) for m in measurements if name in m["models"]]
            if len(found) > 1:
                slopes[quantity][name] = scaling.slope(*zip(*found, strict=True))
    return slopes


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _machine() -> dict[str, str]:
    found = {"date": now(), **machine()}
    if hasattr(os, "getloadavg"):
        found["load"] = f"{os.getloadavg()[0]:.1f} (processes that wanted to run, the minute the measurement ended)"
    return found
