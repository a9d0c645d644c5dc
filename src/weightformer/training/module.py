"""What the Lightning modules of all tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from weightformer.config import parse_config
from weightformer.training.engine import seed_step
from weightformer.training.optim import build_optimizer

__all__ = ["TaskModule", "as_config"]

Config = TypeVar("Config")


def as_config(kind: type[Config], config: Config | Mapping[str, Any]) -> Config:
    """A run's configuration, also from the dictionary that a checkpoint stores.

    Raises:
        ValueError: the dictionary does not fit.
    """
    if isinstance(config, kind):
        return config
    return parse_config(kind, cast(Mapping[str, Any], config), where="the checkpoint's configuration")


class TaskModule(L.LightningModule):
    """A model in training: the optimiser under its schedule, and the seed of every step.

    A subclass sets ``model``, and ``result`` at the end of every evaluation.

    Args:
        config: the run's configuration, with ``seed`` and ``optim``.
        total_steps: optimiser steps of the whole run (training only).
        steps_per_epoch: optimiser steps of one epoch (training only).
        global_batch: images a step over all processes (training only).
    """

    model: Any
    result: Any

    def __init__(self, config: Any, *, total_steps: int, steps_per_epoch: int, global_batch: int) -> None:
        super().__init__()
        self.config: Any = config
        self.total_steps, self.steps_per_epoch, self.global_batch = total_steps, steps_per_epoch, global_batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed everything random of this batch by its place in the run."""
        seed_step(self.config.seed, self.current_epoch, batch_idx, self.global_rank)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW under the per-step schedule."""
        optimizer, schedule = build_optimizer(
            self.model,
            self.config.optim,
            global_batch=self.global_batch,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
