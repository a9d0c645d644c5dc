"""What the runs of every task do alike: fit, read a checkpoint's configuration, find its normalisation."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import timm
import torch

from weightformer.models.checkpoint import load_weights, read_state_dict
from weightformer.training.config import ModelConfig
from weightformer.training.engine import last_checkpoint
from weightformer.training.loader import ResumableLoader
from weightformer.training.module import TaskModule

__all__ = [
    "data_arguments",
    "fit",
    "inference_device",
    "normalization",
    "read_checkpoint",
    "read_stored",
    "report_skipped",
    "schedule_counts",
    "without_start_weights",
]

Config = TypeVar("Config")


def schedule_counts(config: Any, trainer: L.Trainer, train_loader: ResumableLoader) -> dict[str, int]:
    """The length of a run, as `TaskModule` takes it."""
    steps_per_epoch = math.ceil(len(train_loader) / config.trainer.accumulate)
    return {
        "total_steps": steps_per_epoch * config.trainer.epochs,
        "steps_per_epoch": steps_per_epoch,
        "global_batch": config.data.batch_size * trainer.world_size * config.trainer.accumulate,
    }


def fit(
    trainer: L.Trainer,
    module: TaskModule,
    train_loader: ResumableLoader,
    val_loader: ResumableLoader | None,
    folder: Path,
) -> None:
    """Train, or go on from the run's last checkpoint; ``module.result`` is then of the last weights.

    Args:
        trainer: of `build_trainer`.
        module: what to train.
        train_loader: its batches.
        val_loader: those of evaluation; without any there is no result.
        folder: of the run.
    """
    run = module.config.trainer
    trainer.fit(module, train_loader, val_loader, ckpt_path=last_checkpoint(folder), weights_only=True)
    if run.epochs % run.val_every or not hasattr(module, "result"):
        # The last epoch is between two evaluations, or the run was complete already.
        load_weights(module.model, str(last_checkpoint(folder)))
        if val_loader:
            trainer.validate(module, val_loader, verbose=False)


def data_arguments(config: Any, trainer: L.Trainer) -> dict[str, Any]:
    """What the data of a run on images are told of its model and of this process."""
    mean, std = normalization(config.model)
    return {
        "in_chans": config.model.in_chans,
        "mean": mean,
        "std": std,
        "seed": config.seed,
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
    }


def inference_device(accelerator: str) -> torch.device:
    """Where to run a trained model: this process's GPU if there is one, unless the configuration says ``cpu``."""
    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration (as a mapping) and the class names stored in a training checkpoint.

    Raises:
        ValueError: the file is no training checkpoint of this package.
    """
    config, class_names = read_stored(path, class_names=list)
    return config, [str(name) for name in class_names]


def read_stored(path: str | Path, **kinds: type) -> list[Any]:
    """The configuration (as a mapping) in a training checkpoint, and what is stored beside it under these names.

    Raises:
        ValueError: the file is no training checkpoint of this package, one of a task that stores no such things, or
            what it stores is not of these types.
    """
    content = read_state_dict(path)
    stored = content.get("hyper_parameters")
    if not isinstance(stored, dict) or "config" not in stored:
        raise ValueError(
            f"{path} is no training checkpoint of this package; only `weightformer eval --config` takes others"
        )
    if missing := [name for name in kinds if name not in stored]:
        raise ValueError(f"{path} is a checkpoint of another task: it stores no {' and no '.join(missing)}")
    kinds = {"config": dict, **kinds}
    if damaged := [name for name, kind in kinds.items() if not isinstance(stored[name], kind)]:
        raise ValueError(f"{path} is damaged: what it stores as {' and '.join(damaged)} is not what training writes")
    if (stored["config"].get("trainer") or {}).get("ema_decay") and "averaging_state" not in content:
        warnings.warn(f"{path} holds no averaged (EMA) weights, though it was trained with them", stacklevel=3)
    return [stored[name] for name in kinds]


def normalization(config: ModelConfig) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel: as configured, else the model's own (averaged for grey images).

    Raises:
        ValueError: they are not configured and the model's own do not fit the number of channels.
    """
    own = timm.models.get_pretrained_cfg(config.name) if timm.is_model(config.name) else None
    values = []
    for name in ("mean", "std"):
        value = getattr(config, name) or list(getattr(own, name, ()) or ())
        if len(value) != config.in_chans:
            if getattr(config, name) or config.in_chans != 1 or not value:
                raise ValueError(f"model.{name} has {len(value)} values for {config.in_chans} channels; give one each")
            value = [sum(value) / len(value)]
        values.append(value)
    return values[0], values[1]


def report_skipped(paths: Sequence[str]) -> None:
    """Say how many images ``data.on_bad_image: skip`` passed over, and which."""
    if skipped := sorted(map(str, paths)):
        shown = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        warnings.warn(f"{len(skipped)} image(s) could not be read and were skipped: {shown}", stacklevel=3)


def without_start_weights(config: Config) -> Config:
    """A run's configuration without what its model was first initialised from: it is about to be overwritten."""
    model = dataclasses.replace(config.model, weights=None, pretrained=False)  # type: ignore[attr-defined]
    return dataclasses.replace(config, model=model)  # type: ignore[type-var]
