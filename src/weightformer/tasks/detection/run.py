"""Train and evaluate: what the command line calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from weightformer.models.checkpoint import load_weights
from weightformer.tasks.detection.config import DetectionConfig
from weightformer.tasks.detection.data import DetectionData
from weightformer.tasks.detection.metrics import CocoMetrics
from weightformer.tasks.detection.module import DetectionModule
from weightformer.training.engine import build_trainer, claim_output
from weightformer.training.runs import (
    data_arguments,
    fit,
    read_stored,
    report_skipped,
    schedule_counts,
    without_start_weights,
)

__all__ = ["evaluate", "read_checkpoint", "train"]


def train(config: DetectionConfig) -> dict[str, float]:
    """Train as configured; run again on the same output folder, it resumes where the last checkpoint stands.

    Returns:
        The last evaluation's average precisions, see `weightformer.tasks.detection.metrics.coco_metrics`.

    Raises:
        ValueError: the output folder holds another run, or the data do not fit the configuration.
        FloatingPointError: the loss or a gradient is not finite; names the step and the layer.
    """
    folder = claim_output(config.output, dataclasses.asdict(config))
    L.seed_everything(config.seed, verbose=False)
    trainer = build_trainer(config.trainer, folder=folder, clip_norm=config.optim.clip_norm, monitor="val/box_ap")
    data = DetectionData(config.data, **data_arguments(config, trainer))
    train_loader, val_loader = data.train_loader(), data.val_loader()
    module = DetectionModule(
        config, data.categories, CocoMetrics(data.val), **schedule_counts(config, trainer, train_loader)
    )
    fit(trainer, module, train_loader, val_loader, folder)
    report_skipped(data.skipped)
    return module.result


def evaluate(
    config: DetectionConfig, weights: str | Path, categories: Mapping[int, str] | None = None
) -> dict[str, float]:
    """Evaluate weights on the validation images of a configuration.

    Args:
        config: names the model and the images.
        weights: a checkpoint or weight file that fits the model exactly.
        categories: names by COCO id that the weights were trained for; by default those of the training annotations.

    Returns:
        Average precisions, the same for any number of processes.
    """
    trainer = build_trainer(config.trainer)
    data = DetectionData(config.data, categories=categories, **data_arguments(config, trainer))
    module = DetectionModule(without_start_weights(config), data.categories, CocoMetrics(data.val))
    load_weights(module.model, weights)
    trainer.validate(module, data.val_loader(), verbose=False)
    report_skipped(data.skipped)
    return module.result


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any], dict[int, str]]:
    """The configuration (as a mapping) and the categories, names by COCO id, stored in a training checkpoint.

    Raises:
        ValueError: the file is no training checkpoint of this package, or one of another task.
    """
    config, names, numbers = read_stored(path, class_names=list, category_ids=list)
    return config, dict(zip(map(int, numbers), map(str, names), strict=True))
