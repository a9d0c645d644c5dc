"""What a checkpoint stores, and the mean and deviation of a model's images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightformer.training.config import ModelConfig
from weightformer.training.runs import normalization, read_stored


def test_normalization() -> None:
    assert normalization(ModelConfig(name="weightformer_tiny"))[0] == pytest.approx([0.485, 0.456, 0.406])
    assert normalization(ModelConfig(name="weightformer_tiny", in_chans=1))[0] == pytest.approx([0.449])
    assert normalization(ModelConfig(in_chans=2, mean=[0.1, 0.2], std=[1, 1]))[0] == [0.1, 0.2]
    with pytest.raises(ValueError, match=r"model.mean has 3 values for 13 channels"):
        normalization(ModelConfig(in_chans=13))


def test_damaged_contents_are_named(tmp_path: Path) -> None:
    stored = {"config": {"seed": 3}, "class_names": "ab", "samples": [1]}
    torch.save({"state_dict": {}, "hyper_parameters": stored}, tmp_path / "file.ckpt")
    assert read_stored(tmp_path / "file.ckpt", samples=list) == [{"seed": 3}, [1]]
    with pytest.raises(ValueError, match=r"file\.ckpt is damaged: what it stores as class_names and samples"):
        read_stored(tmp_path / "file.ckpt", class_names=list, samples=dict)
