"""Whole images and sliding windows: sizes, averages by a slow loop, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weightformer.tasks.segmentation import inference
from weightformer.tasks.segmentation.inference import InferenceConfig, label_map, sliding_bands

SLIDE = InferenceConfig(mode="slide", window=16, stride=11)


def shifting(x: Tensor) -> Tensor:
    """Logits that depend on where in its window a pixel lies, so that every window counts."""
    rows = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    columns = torch.arange(x.shape[3], dtype=x.dtype)
    return torch.cat([x, x.flip(1).sin() + rows, x.mean((2, 3), keepdim=True) + columns - rows], 1)


def by_hand(x: Tensor, window: int, stride: int) -> Tensor:
    """mmsegmentation's order of operations: a grid of windows, sums and counts over the whole image."""
    height, width = x.shape[2:]
    total, count = torch.zeros(x.shape[0], 3, height, width), torch.zeros(height, width)
    for i in range(max(height - window + stride - 1, 0) // stride + 1):
        for j in range(max(width - window + stride - 1, 0) // stride + 1):
            bottom, right = min(i * stride + window, height), min(j * stride + window, width)
            top, left = max(bottom - window, 0), max(right - window, 0)
            total[:, :, top:bottom, left:right] += shifting(x[:, :, top:bottom, left:right])
            count[top:bottom, left:right] += 1
    return total / count


@pytest.mark.parametrize("size", [(16, 16), (17, 40), (40, 16), (27, 38), (50, 61), (9, 30), (5, 7)])
@pytest.mark.parametrize(("window", "stride"), [(16, 11), (16, 16), (16, 1), (7, 3)])
def test_windows_by_hand(size: tuple[int, int], window: int, stride: int) -> None:
    x = torch.randn(2, 1, *size)
    config = InferenceConfig(mode="slide", window=window, stride=stride)
    bands = list(sliding_bands(shifting, x, config))
    torch.testing.assert_close(torch.cat(bands, 2), by_hand(x, window, stride))
    assert max(band.shape[2] for band in bands) <= window


def test_the_documented_window() -> None:
    seen = []

    def model(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape[2:]))
        return x

    list(sliding_bands(model, torch.zeros(1, 1, 512, 683), InferenceConfig(mode="slide")))
    assert seen == [(512, 512), (512, 512)]


@pytest.mark.parametrize("config", [InferenceConfig(), SLIDE])
@pytest.mark.parametrize("size", [(30, 41), (15, 80), (61, 22)])
def test_labels_have_the_size_asked_for(config: InferenceConfig, size: tuple[int, int]) -> None:
    x = torch.randn(2, 1, 30, 41)
    labels = label_map(shifting, x, size, config)
    assert labels.shape == (2, *size)
    assert labels.dtype == torch.uint8
    logits = shifting(x) if config.mode == "whole" else by_hand(x, 16, 11)
    expected = F.interpolate(logits, size, mode="bilinear").argmax(1)
    assert (labels == expected).float().mean() > 0.999


def test_classes_are_enlarged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 11, 6, 7)
    at_once = label_map(lambda _: logits, torch.zeros(2, 1, 6, 7), (25, 40), InferenceConfig())
    monkeypatch.setattr(inference, "_CHUNK", 3 * 2 * 25 * 40)
    in_parts = label_map(lambda _: logits, torch.zeros(2, 1, 6, 7), (25, 40), InferenceConfig())
    assert torch.equal(at_once, in_parts)
    assert set(at_once.unique().tolist()) == set(range(11))


def test_rows_of_windows_are_handed_out_as_they_are_finished() -> None:
    """On a tall image the bands come while the windows below have not run, so memory does not grow with the height."""
    runs = 0

    def model(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x

    bands = sliding_bands(model, torch.zeros(1, 1, 1000, 16), SLIDE)
    first = next(bands)
    assert runs == 1
    assert first.shape[2] == 11
    assert first.shape[2] + sum(band.shape[2] for band in bands) == 1000


@pytest.mark.parametrize("options", [{"stride": 0}, {"stride": 513}, {"window": 0}, {"window": 100, "stride": 101}])
def test_windows_that_leave_gaps_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"infer\.stride must be in"):
        InferenceConfig(**options)
