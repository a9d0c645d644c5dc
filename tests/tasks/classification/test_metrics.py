"""Counts by hand, independent of how the images are split."""

from __future__ import annotations

import pytest
import torch

from weightformer.tasks.classification.metrics import ClassificationMetrics


def test_counts_by_hand() -> None:
    logits = torch.tensor([[3.0, 2, 1, 0, -1, -2], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]])
    target = torch.tensor([0, 0, 1])  # first; last of six; second
    metrics = ClassificationMetrics()
    metrics.update(logits, target)
    result = metrics.compute()
    assert result["top1"] == pytest.approx(1 / 3)
    assert result["top5"] == pytest.approx(2 / 3)
    assert result["images"] == 3
    by_hand = -sum((row - row.exp().sum().log())[t] for row, t in zip(logits.double(), target, strict=True)) / 3
    assert result["loss"] == pytest.approx(by_hand.item())


def test_the_split_into_batches_does_not_matter() -> None:
    logits, target = torch.randn(23, 10), torch.randint(10, (23,))
    results = []
    for size in (1, 4, 23):
        metrics = ClassificationMetrics()
        for start in range(0, 23, size):
            metrics.update(logits[start : start + size], target[start : start + size])
        results.append({k: float(v) for k, v in metrics.compute().items()})
    assert results[0] == pytest.approx(results[2], rel=1e-12)
    assert results[1] == pytest.approx(results[2], rel=1e-12)


def test_fewer_classes_than_five() -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    assert metrics.compute()["top5"] == 1
