"""Train and evaluate: what the command line calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from weightformer.models.checkpoint import load_weights, save_weights
from weightformer.tasks.segmentation.config import SegmentationConfig
from weightformer.tasks.segmentation.data import SegmentationData
from weightformer.tasks.segmentation.module import SegmentationModule
from weightformer.training.engine import build_trainer, claim_output
from weightformer.training.runs import data_arguments, fit, report_skipped, schedule_counts, without_start_weights

__all__ = ["evaluate", "train"]


def train(config: SegmentationConfig) -> dict[str, Any]:
    """Train as configured; run again on the same output folder, it resumes where the last checkpoint stands.

    Beside the checkpoints it writes ``model.safetensors``, the weights of backbone and heads.

    Returns:
        The last evaluation, see `evaluate`.

    Raises:
        ValueError: the output folder holds another run, or the data do not fit the configuration.
        FloatingPointError: the loss or a gradient is not finite; names the step and the layer.
    """
    folder = claim_output(config.output, dataclasses.asdict(config))
    L.seed_everything(config.seed, verbose=False)
    trainer = build_trainer(config.trainer, folder=folder, clip_norm=config.optim.clip_norm, monitor="val/miou")
    data = SegmentationData(config.data, **data_arguments(config, trainer))
    train_loader, val_loader = data.train_loader(), data.val_loader()
    module = SegmentationModule(config, data.class_names, **schedule_counts(config, trainer, train_loader))
    fit(trainer, module, train_loader, val_loader, folder)
    if trainer.is_global_zero:
        save_weights(module.model, folder / "model.safetensors")
    report_skipped(data.skipped)
    return module.result


def evaluate(
    config: SegmentationConfig, weights: str | Path, class_names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Evaluate weights on the validation images of a configuration.

    Args:
        config: names the model and the images.
        weights: a checkpoint or weight file that fits the model exactly.
        class_names: the classes that the weights were trained for; by default those of the images.

    Returns:
        ``miou``, ``mean_accuracy``, ``accuracy`` over pixels, the count ``images`` and ``iou`` by class name (None for
        a class that occurs nowhere), the same for any number of processes.
    """
    trainer = build_trainer(config.trainer)
    data = SegmentationData(config.data, class_names=class_names, **data_arguments(config, trainer))
    module = SegmentationModule(without_start_weights(config), data.class_names)
    load_weights(module.model, weights)
    trainer.validate(module, data.val_loader(), verbose=False)
    report_skipped(data.skipped)
    return module.result
