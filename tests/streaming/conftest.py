from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from weightformer.models import WeightFormer


@pytest.fixture(scope="session")
def lively() -> Callable[..., WeightFormer]:
    """Builds a small model whose predicted weights matter; as initialised, they would hardly show."""

    def build(**kwargs: Any) -> WeightFormer:
        generator = torch.Generator().manual_seed(0)
        model = WeightFormer(**({"embed_dim": 32, "depth": 5, "patch_size": 4, "num_classes": 7} | kwargs)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                std = 1.5 if any(part in name for part in ("fc1.proj", "w1", "w2", "conv.proj", "amplitude")) else 0.3
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        return model

    return build


@pytest.fixture(scope="session")
def model(lively: Callable[..., WeightFormer]) -> WeightFormer:
    return lively()


@pytest.fixture(scope="session")
def photograph() -> np.ndarray:
    """A real photograph (427, 640, 3), uint8."""
    from sklearn.datasets import load_sample_images

    return load_sample_images().images[0]
