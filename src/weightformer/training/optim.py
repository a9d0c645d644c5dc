"""AdamW over timm's parameter groups, under a schedule counted in steps."""

from __future__ import annotations

import math

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from weightformer.training.config import OptimConfig

__all__ = ["build_optimizer", "cosine_lr", "linear_lr"]


def cosine_lr(step: int, *, total: int, warmup: int, peak: float, start: float, floor: float) -> float:
    """The learning rate of one optimiser step: linear warm-up, then a cosine that is counted from step 0.

    Since the cosine does not wait for the warm-up, the rate steps down a little where they meet (released schedule).

    Args:
        step: optimiser steps done.
        total: steps of the whole run.
        warmup: steps of the warm-up.
        peak: the rate that the warm-up aims at.
        start: the rate of step 0.
        floor: the rate at ``total``.
    """
    if step < warmup:
        return start + (peak - start) * step / warmup
    return floor + (peak - floor) * (1 + math.cos(math.pi * min(step / max(total, 1), 1))) / 2


def linear_lr(step: int, *, total: int, warmup: int, peak: float, start: float, floor: float) -> float:
    """The learning rate of one optimiser step: linear warm-up, then a straight line that is counted from step 0.

    The ``poly`` schedule of power 1 that semantic segmentation is trained with. For the arguments, see `cosine_lr`.
    """
    if step < warmup:
        return start + (peak - start) * step / warmup
    return floor + (peak - floor) * (1 - min(step / max(total, 1), 1))


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, global_batch: int, total_steps: int, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The optimiser and its per-step schedule.

    Args:
        model: its ``no_weight_decay`` and ``group_matcher`` are honoured (timm's contract).
        config: rates are for ``config.lr_batch`` images a step.
        global_batch: images a step over all processes and accumulated batches.
        total_steps: optimiser steps of the whole run.
        steps_per_epoch: optimiser steps of one epoch.
    """
    scale = global_batch / config.lr_batch if config.lr_batch else 1.0
    peak, start, floor = (rate * scale for rate in (config.lr, config.warmup_lr, config.min_lr))
    exempt = tuple(getattr(model, "no_weight_decay", tuple)())
    if config.layer_decay < 1:
        groups = param_groups_layer_decay(
            model, config.weight_decay, no_weight_decay_list=exempt, layer_decay=config.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
    for group in groups:
        group["lr"] = peak * group.get("lr_scale", 1.0)  # torch's schedulers ignore lr_scale
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=config.betas, eps=config.eps)
    warmup = round(config.warmup_epochs * steps_per_epoch)
    rate = {"cosine": cosine_lr, "linear": linear_lr}[config.schedule]

    def factor(step: int) -> float:
        return rate(step, total=total_steps, warmup=warmup, peak=peak, start=start, floor=floor) / peak

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
