"""mIoU by hand, beside torchmetrics, and independent of how the images are split."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torchmetrics.classification import MulticlassJaccardIndex

from weightformer.tasks.segmentation.metrics import SegmentationMetrics


def test_by_hand() -> None:
    metrics = SegmentationMetrics(4)
    target = torch.tensor([[[0, 0, 0, 1], [1, 2, 255, 255]]])
    predicted = torch.tensor([[[0, 0, 1, 1], [1, 0, 3, 2]]], dtype=torch.uint8)
    metrics.update(predicted, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = metrics.compute()
    # class 0: 2 right of 3 + 1; class 1: 2 of 2 + 1; class 2: 0 of 1; class 3: nowhere but under ignored pixels
    assert result["iou"].tolist()[:3] == pytest.approx([2 / 4, 2 / 3, 0])
    assert math.isnan(result["iou"][3])
    assert result["miou"] == pytest.approx((1 / 2 + 2 / 3) / 3)
    assert result["accuracy"] == pytest.approx(4 / 6)
    assert result["mean_accuracy"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert result["images"] == 1


def test_against_torchmetrics_over_the_whole_set() -> None:
    witness, metrics = MulticlassJaccardIndex(7, ignore_index=255, average="none"), SegmentationMetrics(7)
    for _ in range(5):
        target = torch.randint(0, 7, (3, 20, 30))
        target[torch.rand(target.shape) < 0.2] = 255
        predicted = torch.where(torch.rand(target.shape) < 0.6, target.clamp(max=6), torch.randint(0, 7, target.shape))
        witness.update(predicted, target)
        metrics.update(predicted.to(torch.uint8), target.to(torch.uint8))
    torch.testing.assert_close(metrics.compute()["iou"].float(), witness.compute())


def test_the_split_does_not_matter() -> None:
    target, predicted = torch.randint(0, 5, (2, 23, 8, 9))
    results = []
    for size in (1, 4, 23):
        metrics = SegmentationMetrics(5)
        for start in range(0, 23, size):
            metrics.update(predicted[start : start + size], target[start : start + size])
        results.append({name: value.tolist() for name, value in metrics.compute().items()})
    assert results[0] == results[1] == results[2]


def test_nothing_counted() -> None:
    metrics = SegmentationMetrics(3)
    metrics.update(torch.zeros(1, 4, 4), torch.full((1, 4, 4), 255))
    result = metrics.compute()
    assert math.isnan(result["miou"])
    assert result["images"] == 1
