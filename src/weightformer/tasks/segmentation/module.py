"""The training task: UperNet, cross-entropy over labelled pixels and mIoU, as a Lightning module."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.tasks.segmentation.config import SegmentationConfig
from weightformer.tasks.segmentation.datasets import EvalBatch, TrainBatch
from weightformer.tasks.segmentation.inference import label_map
from weightformer.tasks.segmentation.masks import IGNORE
from weightformer.tasks.segmentation.metrics import SegmentationMetrics
from weightformer.tasks.segmentation.upernet import UperNet
from weightformer.training.backbone import build_backbone
from weightformer.training.module import TaskModule, as_config

__all__ = ["SegmentationModule", "build_model", "pixel_loss"]


def build_model(config: SegmentationConfig, num_classes: int) -> UperNet:
    """UperNet on the backbone that a configuration names, with start weights where it asks for them.

    Raises:
        ValueError: see `build_backbone` and `UperNet`.
    """
    backbone, maps = build_backbone(config.model, config.head.indices)
    model = UperNet(
        backbone,
        maps,
        num_classes,
        channels=config.head.channels,
        aux_channels=config.head.aux_channels if config.head.aux_weight else 0,
        norm=config.head.norm,
        dropout=config.head.dropout,
    )
    if config.model.compile:
        model.compile()
    return model


def pixel_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits (B, K, H, W), averaged over the pixels of ``target`` (B, H, W) that are not 255.

    Zero, with a gradient of zero, where there are none.
    """
    total = F.cross_entropy(logits.float(), target, ignore_index=IGNORE, reduction="sum")
    return total / (target != IGNORE).sum().clamp(min=1)


class SegmentationModule(TaskModule):
    """Trains and evaluates one model.

    Args:
        config: the run's configuration, or its dictionary as a checkpoint stores it.
        class_names: in the order of the labels; stored in every checkpoint.
        total_steps: optimiser steps of the whole run (training only).
        steps_per_epoch: optimiser steps of one epoch (training only).
        global_batch: images a step over all processes (training only).
    """

    def __init__(
        self,
        config: SegmentationConfig | Mapping[str, Any],
        class_names: list[str],
        *,
        total_steps: int = 1,
        steps_per_epoch: int = 1,
        global_batch: int = 1,
    ) -> None:
        config = as_config(SegmentationConfig, config)
        super().__init__(config, total_steps=total_steps, steps_per_epoch=steps_per_epoch, global_batch=global_batch)
        self.save_hyperparameters({"config": dataclasses.asdict(config), "class_names": list(class_names)})
        self.class_names = list(class_names)
        self.model = build_model(config, len(class_names))
        self.metrics = SegmentationMetrics(len(class_names))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to logits (B, K, height, width)."""
        return self.model(images)

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """The decode head's loss, and a share of the auxiliary head's."""
        images, target = batch
        weight = self.config.head.aux_weight
        if weight:
            logits, auxiliary = self.model(images, auxiliary=True)
            loss = pixel_loss(logits, target) + weight * pixel_loss(auxiliary, target)
        else:
            loss = pixel_loss(self.model(images), target)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(images), prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[-1]["lr"], on_step=True)
        return loss

    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Count; images of one size are run together, others alone, since a padded one would have other features."""
        for _, group in itertools.groupby(batch, key=lambda item: (item[0].shape, item[1].shape)):
            images, targets = (torch.stack(items) for items in zip(*group, strict=True))
            labels = label_map(self.model, images, (targets.shape[1], targets.shape[2]), self.config.infer)
            self.metrics.update(labels, targets)

    def on_validation_epoch_end(self) -> None:
        """Log what was counted over all processes."""
        values = self.metrics.compute()
        means = {name: values[name].float() for name in ("miou", "mean_accuracy", "accuracy")}
        self.log_dict({f"val/{name}": value for name, value in means.items()}, rank_zero_only=False)
        shares = (None if math.isnan(share) else share for share in values["iou"].tolist())
        iou = dict(zip(self.class_names, shares, strict=True))
        self.result = {name: float(values[name]) for name in means} | {"images": int(values["images"]), "iou": iou}
        self.metrics.reset()
