"""Intersection over union and accuracy over a whole set, the same for any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from weightformer.tasks.segmentation.masks import IGNORE

__all__ = ["SegmentationMetrics"]


class SegmentationMetrics(Metric):
    """mIoU from one confusion matrix over all images; pixels labelled 255 are not counted.

    Counts are integers, so the result does not depend on how the images were split over processes or batches. A class
    that neither the masks nor the predictions hold is left out of the means.

    Args:
        num_classes: K.
    """

    full_state_update = False
    confusion: Tensor
    images: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("confusion", torch.zeros(num_classes, num_classes, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add one batch of labels, (B, H, W) each."""
        counted = target != IGNORE
        pairs = target[counted].long() * self.num_classes + predicted[counted].long()
        self.confusion += torch.bincount(pairs, minlength=self.num_classes**2).view_as(self.confusion)
        self.images += len(target)

    def compute(self) -> dict[str, Tensor]:
        """``miou``, ``mean_accuracy`` and ``accuracy`` as shares of one, the count ``images``, and ``iou`` (K,).

        NaN stands for what there was nothing to count for.
        """
        counts = self.confusion.double()
        right, actual, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        iou = right / (actual + predicted - right)
        return {
            "miou": iou.nanmean(),
            "mean_accuracy": (right / actual).nanmean(),
            "accuracy": right.sum() / actual.sum(),
            "images": self.images,
            "iou": iou,
        }
