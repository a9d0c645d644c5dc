"""Train and evaluate: what the command line calls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from weightformer.models.checkpoint import load_weights, save_weights
from weightformer.tasks.segmentation.config import SegmentationConfig
from weightformer.tasks.segmentation.data import SegmentationData
from weightformer.tasks.segmentation.module import SegmentationModule
from weightformer.training.engine import build_trainer, claim_output, last_checkpoint
from weightformer.training.runs import normalization, report_skipped, without_start_weights

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
    data = _data(config, trainer)
    train_loader, val_loader = data.train_loader(), data.val_loader()
    steps_per_epoch = math.ceil(len(train_loader) / config.trainer.accumulate)
    module = SegmentationModule(
        config,
        data.class_names,
        total_steps=steps_per_epoch * config.trainer.epochs,
        steps_per_epoch=steps_per_epoch,
        global_batch=config.data.batch_size * trainer.world_size * config.trainer.accumulate,
    )
    trainer.fit(module, train_loader, val_loader, ckpt_path=last_checkpoint(folder), weights_only=True)
    if config.trainer.epochs % config.trainer.val_every or not hasattr(module, "result"):
        # The last epoch is between two evaluations, or the run was complete already.
        load_weights(module.model, str(last_checkpoint(folder)))
        trainer.validate(module, val_loader, verbose=False)
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
    data = _data(config, trainer, class_names)
    module = SegmentationModule(without_start_weights(config), data.class_names)
    load_weights(module.model, weights)
    trainer.validate(module, data.val_loader(), verbose=False)
    report_skipped(data.skipped)
    return module.result


def _data(config: SegmentationConfig, trainer: L.Trainer, class_names: Sequence[str] | None = None) -> SegmentationData:
    mean, std = normalization(config.model)
    return SegmentationData(
        config.data,
        in_chans=config.model.in_chans,
        mean=mean,
        std=std,
        seed=config.seed,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        class_names=class_names,
    )
