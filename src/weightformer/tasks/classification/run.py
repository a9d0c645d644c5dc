"""Train, evaluate and predict: what the command line calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import timm.models

from weightformer.models.checkpoint import load_weights
from weightformer.tasks.classification.config import ClassificationConfig
from weightformer.tasks.classification.data import ImageData
from weightformer.tasks.classification.module import ClassificationModule
from weightformer.training.dynamics import DynamicsRecorder
from weightformer.training.engine import build_trainer, claim_output
from weightformer.training.runs import (
    data_arguments,
    fit,
    normalization,
    report_skipped,
    schedule_counts,
    without_start_weights,
)

__all__ = ["evaluate", "train"]


def train(config: ClassificationConfig) -> dict[str, float]:
    """Train as configured; run again on the same output folder, it resumes where the last checkpoint stands.

    Beside the checkpoints it writes ``model/``, a folder that timm and the Hub read.

    Returns:
        The last evaluation's ``top1``, ``top5`` and ``loss``, and its count ``images``.

    Raises:
        ValueError: the output folder holds another run, or the data do not fit the configuration.
        FloatingPointError: the loss or a gradient is not finite; names the step and the layer.
    """
    folder = claim_output(config.output, dataclasses.asdict(config))
    L.seed_everything(config.seed, verbose=False)
    trainer = build_trainer(
        config.trainer,
        folder=folder,
        clip_norm=config.optim.clip_norm,
        monitor="val/top1",
        callbacks=[DynamicsRecorder(config.dynamics_every)] if config.dynamics_every else [],
    )
    data = ImageData(config.data, **data_arguments(config, trainer))
    train_loader, val_loader = data.train_loader(), data.val_loader()
    module = ClassificationModule(config, data.class_names, **schedule_counts(config, trainer, train_loader))
    fit(trainer, module, train_loader, val_loader, folder)
    if trainer.is_global_zero:
        _export(module, folder / "model")
    report_skipped(data.skipped)
    return module.result


def evaluate(
    config: ClassificationConfig, weights: str | Path, class_names: Sequence[str] | None = None
) -> dict[str, float]:
    """Evaluate weights on the validation images of a configuration.

    Args:
        config: names the model and the images.
        weights: a checkpoint or weight file that fits the model exactly.
        class_names: the classes that the weights were trained for; by default those of the images.

    Returns:
        ``top1``, ``top5``, ``loss`` and the count ``images``, the same for any number of processes.
    """
    trainer = build_trainer(config.trainer)
    data = ImageData(config.data, class_names=class_names, **data_arguments(config, trainer))
    module = ClassificationModule(without_start_weights(config), data.class_names)
    load_weights(module.model, weights)
    trainer.validate(module, data.val_loader(), verbose=False)
    report_skipped(data.skipped)
    return module.result


def _export(module: ClassificationModule, folder: Path) -> None:
    """Write the model as timm's folder: ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads it."""
    config, model = module.config, cast(Any, module.model)
    mean, std = normalization(config.model)
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "input_size": (config.model.in_chans, *config.data.size),
        "mean": tuple(mean),
        "std": tuple(std),
        "crop_pct": config.data.crop_pct,
        "crop_mode": config.data.crop_mode,
        "interpolation": config.data.interpolation,
        "num_classes": len(module.class_names),
    }
    timm.models.save_for_hf(
        model,
        str(folder),
        safe_serialization=True,
        model_config={"label_names": module.class_names},
        model_args={**config.model.kwargs, "in_chans": config.model.in_chans},
    )
