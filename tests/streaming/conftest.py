from __future__ import annotations

import pytest
import torch

from weightformer.models import WeightFormer


def lively_model(**kwargs) -> WeightFormer:
    """A small model whose predicted weights matter: with the released initialisation they would hardly show."""
    generator = torch.Generator().manual_seed(0)
    model = WeightFormer(**({"embed_dim": 32, "depth": 5, "patch_size": 4, "num_classes": 7} | kwargs)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="session")
def model() -> WeightFormer:
    return lively_model()


@pytest.fixture(scope="session")
def photograph():
    """A real photograph (427, 640, 3), uint8."""
    datasets = pytest.importorskip("sklearn.datasets")
    return datasets.load_sample_images().images[0]
