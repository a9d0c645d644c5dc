"""What the whole suite shares: a fixed seed, the golden files, and a model whose predicted weights are large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import weightformer  # which registers the models
from weightformer.layers import DynamicLinear
from weightformer.models.checkpoint import load_weights

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=sorted(GOLDEN.glob("classifier_*.safetensors")), ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Path:
    """A file of weights, inputs and outputs of the released code, on a small model."""
    return request.param


@pytest.fixture(scope="session")
def golden_denoiser() -> dict[str, Tensor]:
    """Weights (``weights.*``), inputs and outputs of the released denoiser on a small model."""
    return load_file(GOLDEN / "dit_patch2.safetensors")


@pytest.fixture
def denoiser(golden_denoiser: dict[str, Tensor]) -> nn.Module:
    """The golden file's denoiser in eval mode: 4 channels, 10 classes, blocks 1 and 4 of 5 dynamic."""
    model = weightformer.models.WeightFormerDenoiser(sample_size=16, hidden_size=48, depth=5, num_classes=10)
    prefix = "weights."
    weights = {k.removeprefix(prefix): v for k, v in golden_denoiser.items() if k.startswith(prefix)}
    return load_weights(model, weights).eval()


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
