"""What the whole suite shares: a fixed seed, the golden files, and a model whose predicted weights are large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import weightformer  # noqa: F401 - registers the models
from weightformer.layers import DynamicLinear

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=sorted(GOLDEN.glob("classifier_*.safetensors")), ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Path:
    """A file of weights, inputs and outputs of the released code, on a small model."""
    return request.param


@pytest.fixture
def lively_micro() -> Callable[..., nn.Module]:
    """Builds ``weightformer_micro`` (timm arguments allowed) in eval mode with predicted weights as large as static.

    At initialisation the predicted part of a linear weight is tiny, so a test could miss that it is wrong.
    """
    std = {"proj.weight": 0.125, "proj2.weight": 0.125, "w1": 1.0, "w2": 1.0}

    def build(**kwargs: Any) -> nn.Module:
        model = timm.create_model("weightformer_micro", **kwargs).eval()
        for module in model.modules():
            if isinstance(module, DynamicLinear):
                for name, parameter in module.named_parameters():
                    if name in std:
                        nn.init.normal_(parameter, std=std[name])
        return model

    return build


@pytest.fixture
def images() -> Callable[..., Tensor]:
    """Random images (B, C, height, width), the same for the same shape."""

    def make(*shape: int, **kwargs: Any) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), **kwargs)

    return make
