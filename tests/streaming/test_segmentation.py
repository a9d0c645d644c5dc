"""An UperNet over a streamed image equals the one over the whole image, pixel by pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightformer.streaming import RegionError, stream
from weightformer.streaming.sources import ArraySource

pytest.importorskip("lightning")
from weightformer.tasks.segmentation.upernet import UperNet
from weightformer.training.backbone import build_backbone
from weightformer.training.config import ModelConfig


def build(patch_size: int = 4, indices: list[int] | None = None, norm: str = "batch", num_classes: int = 5) -> UperNet:
    """A float64 UperNet whose every part, statistics included, matters."""
    kwargs: dict[str, Any] = {"embed_dim": 16, "depth": 5, "patch_size": patch_size}
    backbone, maps = build_backbone(ModelConfig("weightformer_micro", kwargs=kwargs), indices)
    model = UperNet(backbone, maps, num_classes, channels=16, aux_channels=0, norm=norm).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 1.0 if any(part in name for part in ("fc1.proj", "w1", "w2", "conv.proj")) else 0.3
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator))
                module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model


def logits_of(model: UperNet, image: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(image).permute(0, 2, 3, 1)


def relative(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small image has many windows, with margins on all sides."""
    monkeypatch.setattr("weightformer.streaming.segmentation._CORE", 2)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("patch_size", [4, 8, 16])
@pytest.mark.parametrize("indices", [None, [1, 4], [2]], ids=str)
def test_every_pixel_equals_the_untiled_model(patch_size: int, indices: list[int] | None) -> None:
    """Pyramids from 2 cells a token to 8 tokens a cell, odd grids, sides that are no multiple of anything."""
    model = build(patch_size, indices)
    for height, width, strip_rows in ((24 * patch_size, 31 * patch_size, 5), (97, 203, 16), (16, 16, 1)):
        image = torch.randn(1, 3, height, width, dtype=torch.float64)
        expected = logits_of(model, image)
        got = stream(model, image, output="logits", strip_rows=strip_rows, progress=False)
        assert relative(got, expected) < 1e-10, (height, width)
        labels = stream(model, image, output="segmentation", strip_rows=strip_rows, progress=False)
        assert labels.dtype == torch.uint8
        assert (labels == expected.argmax(-1)).all()


@pytest.mark.usefixtures("small_windows")
def test_the_margin_is_what_a_pixel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of it, windows show: the test above would see a margin too narrow."""
    model = build(4)
    image = torch.randn(1, 3, 500, 300, dtype=torch.float64)
    expected = logits_of(model, image)
    assert relative(stream(model, image, output="logits", progress=False), expected) < 1e-10
    monkeypatch.setattr("weightformer.streaming.segmentation._MARGIN", 2)
    assert relative(stream(model, image, output="logits", progress=False), expected) > 1e-6


def test_whole_windows_in_float32() -> None:
    model = build(4).float()
    image = torch.randn(1, 3, 300, 650)
    assert relative(stream(model, image, output="logits", progress=False), logits_of(model, image)) < 1e-4


@pytest.mark.usefixtures("small_windows")
def test_labels_go_to_files_and_a_stopped_run_resumes(tmp_path: Path) -> None:
    model = build(4)
    image = torch.randn(1, 3, 203, 97, dtype=torch.float64)
    expected = stream(model, image, output="segmentation", progress=False, memory=0)[0]
    kwargs: dict[str, Any] = {"output": "segmentation", "workspace": tmp_path / "w", "strip_rows": 3}

    def stop(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(model, image, progress=stop, **kwargs)
    seen: list[float] = []
    path = stream(model, image, out=tmp_path / "labels.npy", progress=seen.append, **kwargs)
    assert seen[0] > 0.05
    assert seen[-1] == 1
    assert seen == sorted(seen)
    assert (np.load(path) == expected.numpy()).all()
    assert list((tmp_path / "w").iterdir()) == []
    zarr = pytest.importorskip("zarr")
    path = stream(model, image, output="segmentation", out=tmp_path / "labels.zarr", progress=False)
    assert (zarr.open(str(path), mode="r")[:] == expected.numpy()).all()


def test_the_mode_of_the_model_is_left_alone_and_errors_pass() -> None:
    model = build(4).train()
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = stream(build(4), image, output="segmentation", progress=False)
    assert (stream(model, image, output="segmentation", progress=False) == expected).all()
    assert model.training

    class Torn(ArraySource):
        def _read(self, top: int, bottom: int, left: int, right: int) -> Tensor:
            raise EOFError("the file is truncated")

    with pytest.raises(RegionError, match="truncated"):
        stream(model, Torn(image), output="segmentation", progress=False)
    assert model.training


def test_more_than_256_classes() -> None:
    model = build(4, num_classes=300)
    image = torch.randn(1, 3, 20, 33, dtype=torch.float64)
    labels = stream(model, image, output="segmentation", progress=False)
    assert labels.dtype == torch.int16
    assert (labels == logits_of(model, image).argmax(-1)).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"output": "pooled"}, "'segmentation' or 'logits', got 'pooled'"),
        ({"output": "segmentation", "group": object()}, "by one process"),
        ({"output": "segmentation", "strip_rows": 0}, "strip_rows"),
    ],
)
def test_what_does_not_fit(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(build(4), torch.randn(3, 20, 20).double(), progress=False, **kwargs)


def test_group_norm_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="norm: group takes its statistics over the whole map"):
        stream(build(4, norm="group"), torch.randn(3, 20, 20).double(), output="segmentation", progress=False)
