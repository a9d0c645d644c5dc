"""The training task: a detector, its losses and COCO's average precision, as a Lightning module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from weightformer.tasks.detection.config import DetectionConfig
from weightformer.tasks.detection.data import Batch
from weightformer.tasks.detection.detector import Detector
from weightformer.tasks.detection.metrics import CocoMetrics, coco_results
from weightformer.training.module import TaskModule, as_config

__all__ = ["DetectionModule"]


class DetectionModule(TaskModule):
    """Trains and evaluates one detector.

    Args:
        config: the run's configuration, or its dictionary as a checkpoint stores it.
        categories: names by COCO id, in the order of the labels; stored in every checkpoint.
        metrics: what evaluation adds to (training and evaluation only).
        total_steps: optimiser steps of the whole run (training only).
        steps_per_epoch: optimiser steps of one epoch (training only).
        global_batch: images a step over all processes (training only).
    """

    def __init__(
        self,
        config: DetectionConfig | Mapping[str, Any],
        categories: Mapping[int, str],
        metrics: CocoMetrics | None = None,
        *,
        total_steps: int = 1,
        steps_per_epoch: int = 1,
        global_batch: int = 1,
    ) -> None:
        config = as_config(DetectionConfig, config)
        super().__init__(config, total_steps=total_steps, steps_per_epoch=steps_per_epoch, global_batch=global_batch)
        self.category_ids, self.class_names = list(categories), list(categories.values())
        self.save_hyperparameters(
            {
                "config": dataclasses.asdict(config),
                "class_names": self.class_names,
                "category_ids": self.category_ids,
            }
        )
        self.metrics = metrics
        self.model = Detector(config.model, config.head, len(self.class_names))

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Images (C, height, width) of any sizes to detections, see `Detector`."""
        return self.model(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The sum of all losses."""
        losses = self.model(*batch)
        loss = sum(losses.values())
        size = len(batch[0])
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=size, prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in losses.items()}, on_step=True, batch_size=size)
        self.log("lr", self.trainer.optimizers[0].param_groups[-1]["lr"], on_step=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Collect what was found."""
        images, known = batch
        assert self.metrics is not None
        for image, record, found in zip(images, known, self(images), strict=True):
            results = coco_results(
                found,
                image_id=record["image_id"],
                size=record["size"],
                scaled_size=(image.shape[-2], image.shape[-1]),
                category_ids=self.category_ids,
            )
            self.metrics.update(results)

    def on_validation_epoch_end(self) -> None:
        """Evaluate what all processes found."""
        assert self.metrics is not None
        self.result = self.metrics.compute()
        self.log_dict({f"val/{name}": value for name, value in self.result.items()}, rank_zero_only=False)
