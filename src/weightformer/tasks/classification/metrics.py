"""Accuracy and loss over a whole set, the same for any number of processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

__all__ = ["ClassificationMetrics"]


class ClassificationMetrics(Metric):
    """Top-1 and top-5 accuracy, mean cross-entropy and the number of images they were taken over.

    Counts are integers and the loss is summed in float64, so the result does not depend on how the images were split
    over processes or batches.
    """

    full_state_update = False
    top1: Tensor
    top5: Tensor
    loss: Tensor
    images: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("top1", "top5", "images"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add one batch: logits (B, K) and class indices (B,)."""
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == target[:, None]
        self.top1 += ranked[:, :1].sum()
        self.top5 += ranked.sum()
        self.loss += F.cross_entropy(logits.double(), target, reduction="sum")
        self.images += len(target)

    def compute(self) -> dict[str, Tensor]:
        """``top1`` and ``top5`` as shares of one, ``loss``, and the count ``images``."""
        images = self.images.double()
        values = {"top1": self.top1 / images, "top5": self.top5 / images, "loss": self.loss / images}
        return {**values, "images": images}
