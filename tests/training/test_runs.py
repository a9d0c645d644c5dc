"""Mean and deviation of a model's images."""

from __future__ import annotations

import pytest

from weightformer.training.config import ModelConfig
from weightformer.training.runs import normalization


def test_normalization() -> None:
    assert normalization(ModelConfig(name="weightformer_tiny"))[0] == pytest.approx([0.485, 0.456, 0.406])
    assert normalization(ModelConfig(name="weightformer_tiny", in_chans=1))[0] == pytest.approx([0.449])
    assert normalization(ModelConfig(in_chans=2, mean=[0.1, 0.2], std=[1, 1]))[0] == [0.1, 0.2]
    with pytest.raises(ValueError, match=r"model.mean has 3 values for 13 channels"):
        normalization(ModelConfig(in_chans=13))
