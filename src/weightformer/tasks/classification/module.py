"""The training task: a timm model, cross-entropy and accuracy, as a Lightning module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

import weightformer  # noqa: F401  registers the models
from weightformer.models.checkpoint import load_weights
from weightformer.tasks.classification.config import ClassificationConfig, MixConfig
from weightformer.tasks.classification.metrics import ClassificationMetrics
from weightformer.training.config import ModelConfig
from weightformer.training.module import TaskModule, as_config

__all__ = ["ClassificationModule", "Mix", "build_model"]


def build_model(config: ModelConfig, num_classes: int, image_size: int | tuple[int, int]) -> nn.Module:
    """The timm model that a configuration names, with fine-tuning weights where it asks for them.

    Models of a fixed input size (a ViT with position embeddings, say) are built for ``image_size``.

    Raises:
        ValueError: timm does not know the name, or the constructor refuses an argument.
    """
    if not timm.is_model(config.name):
        near = timm.list_models(f"*{config.name.split('_')[0]}*")[:5]
        raise ValueError(f"timm knows no model {config.name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    kwargs = dict(config.kwargs)
    own = timm.models.get_pretrained_cfg(config.name)
    if own is not None and own.fixed_input_size:
        kwargs.setdefault("img_size", image_size)
    try:
        model: Any = timm.create_model(
            config.name, pretrained=config.pretrained, num_classes=num_classes, in_chans=config.in_chans, **kwargs
        )
    except TypeError as error:
        raise ValueError(f"model.kwargs {config.kwargs} do not fit {config.name}: {error}") from error
    if config.weights:
        load_weights(model, config.weights, strict=False)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    if config.compile:
        model.compile()
    return model


class Mix(nn.Module):
    """MixUp or CutMix on a batch (images, class indices); labels become distributions (B, K).

    Each image is paired with its neighbour in the batch, so a batch of any size, odd ones included, can be mixed.
    """

    def __init__(self, config: MixConfig, num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.mixup = v2.MixUp(alpha=config.mixup, num_classes=num_classes) if config.mixup else None
        self.cutmix = v2.CutMix(alpha=config.cutmix, num_classes=num_classes) if config.cutmix else None

    def forward(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the batch, or return it as it is for the share of batches that are not mixed."""
        if torch.rand(()) >= self.config.prob:
            return images, target
        use_cutmix = self.mixup is None or torch.rand(()) < self.config.switch_prob
        mix = self.cutmix if self.cutmix is not None and use_cutmix else self.mixup
        return (images, target) if mix is None else mix(images, target)


class ClassificationModule(TaskModule):
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
        config: ClassificationConfig | Mapping[str, Any],
        class_names: list[str],
        *,
        total_steps: int = 1,
        steps_per_epoch: int = 1,
        global_batch: int = 1,
    ) -> None:
        config = as_config(ClassificationConfig, config)
        super().__init__(config, total_steps=total_steps, steps_per_epoch=steps_per_epoch, global_batch=global_batch)
        self.save_hyperparameters({"config": dataclasses.asdict(config), "class_names": list(class_names)})
        self.class_names = list(class_names)
        self.model = build_model(config.model, len(class_names), config.data.image_size)
        self.mix = Mix(config.mix, len(class_names))
        self.metrics = ClassificationMetrics()

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to logits (B, K)."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy against (mixed, smoothed) labels."""
        images, target = self.mix(*batch)
        loss = F.cross_entropy(self(images), target, label_smoothing=self.config.mix.smoothing)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(images), prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[-1]["lr"], on_step=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count; nothing is averaged over batches."""
        self.metrics.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        """Log what was counted over all processes."""
        values = self.metrics.compute()
        self.log_dict({f"val/{k}": v.float() for k, v in values.items() if k != "images"}, rank_zero_only=False)
        self.result = {k: int(v) if k == "images" else float(v) for k, v in values.items()}
        self.metrics.reset()
