"""Train and evaluate: what the command line calls."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any, cast

import lightning as L

from weightformer.models.checkpoint import load_weights, read_state_dict
from weightformer.tasks.generation.config import GenerationConfig
from weightformer.tasks.generation.data import GenerationData
from weightformer.tasks.generation.module import GenerationModule
from weightformer.training.engine import build_trainer, claim_output, last_checkpoint

__all__ = ["read_checkpoint", "train"]


def train(config: GenerationConfig) -> dict[str, float]:
    """Train as configured; run again on the same output folder, it resumes where the last checkpoint stands.

    Beside the checkpoints it writes ``model/``, the averaged denoiser as diffusers reads it.

    Returns:
        The last evaluation's ``loss``, ``mse`` and ``vb``, and its count ``samples``; without validation samples, the
        training loss.

    Raises:
        ValueError: the output folder holds another run, or the data do not fit the configuration.
        FloatingPointError: the loss or a gradient is not finite; names the step and the layer.
    """
    folder = claim_output(config.output, dataclasses.asdict(config))
    L.seed_everything(config.seed, verbose=False)
    trainer = build_trainer(config.trainer, folder=folder, clip_norm=config.optim.clip_norm)
    data = GenerationData(config.data, seed=config.seed, rank=trainer.global_rank, world_size=trainer.world_size)
    train_loader, val_loader = data.train_loader(), data.val_loader()
    steps_per_epoch = math.ceil(len(train_loader) / config.trainer.accumulate)
    module = GenerationModule(
        config,
        data.class_names,
        channels=data.channels,
        size=data.size,
        vae=data.vae,
        total_steps=steps_per_epoch * config.trainer.epochs,
        steps_per_epoch=steps_per_epoch,
        global_batch=config.data.batch_size * trainer.world_size * config.trainer.accumulate,
    )
    trainer.fit(module, train_loader, val_loader, ckpt_path=last_checkpoint(folder), weights_only=True)
    if val_loader and (config.trainer.epochs % config.trainer.val_every or not hasattr(module, "result")):
        # The last epoch is between two evaluations, or the run was complete already.
        load_weights(module.model, str(last_checkpoint(folder)))
        trainer.validate(module, val_loader, verbose=False)
    if trainer.is_global_zero:
        cast(Any, module.model).save_pretrained(folder / "model")
    if skipped := sorted(data.skipped):
        shown = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        warnings.warn(f"{len(skipped)} image(s) could not be read and were skipped: {shown}", stacklevel=2)
    return getattr(module, "result", {"train_loss": float(trainer.callback_metrics["train/loss"])})


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration (as a mapping) and the class names stored in a training checkpoint.

    Raises:
        ValueError: the file is no training checkpoint of this package.
    """
    content = read_state_dict(path)
    stored = content.get("hyper_parameters")
    if not isinstance(stored, dict) or not {"config", "class_names", "samples"} <= stored.keys():
        raise ValueError(f"{path} is no training checkpoint of a generator of this package")
    config, class_names = stored["config"], stored["class_names"]
    if not isinstance(config, dict) or not isinstance(class_names, list):
        raise ValueError(f"{path}: its configuration or class names are damaged")
    if (config.get("trainer") or {}).get("ema_decay") and "averaging_state" not in content:
        warnings.warn(f"{path} holds no averaged (EMA) weights, though it was trained with them", stacklevel=2)
    return config, [str(name) for name in class_names]
