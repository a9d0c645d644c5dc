"""All three denoisers are built, start and learn as they should, and take labels as the data give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weightformer.config import parse_config
from weightformer.tasks.generation import Config
from weightformer.tasks.generation.config import DenoiserConfig
from weightformer.tasks.generation.module import GenerationModule, build_denoiser, create_dit

OURS: dict[str, Any] = {"name": "denoiser_micro", "kwargs": {"hidden_size": 32, "depth": 2}}
TWIN: dict[str, Any] = {"name": "dit", "kwargs": {"hidden_size": 32, "depth": 2, "num_heads": 2}}
DIG: dict[str, Any] = {"name": "dig_micro", "kwargs": {"hidden_size": 32, "depth": 2}}


def build(model: dict[str, Any], **kwargs: Any) -> GenerationModule:
    config = parse_config(Config, {"model": model, "data": {"image_size": 8}} | kwargs)
    return GenerationModule(config, [str(i) for i in range(10)], channels=1, size=[8, 8], total_steps=20)


def batch(count: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, count, 1, 8, 8, generator=generator)
    return clean.clamp(-1, 1), torch.arange(count) % 11, noise, torch.arange(count) * 150


@pytest.fixture(params=[OURS, TWIN, DIG], ids=["weightformer", "dit", "dig"])
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_the_loss_starts_at_that_of_no_prediction(model: dict[str, Any]) -> None:
    """The last layer starts at zero: the squares are those of the noise."""
    module = build(model)
    losses = module._losses(batch())
    torch.testing.assert_close(losses["mse"], batch()[2].square().mean(dim=(1, 2, 3)))


def train_some(module: GenerationModule, steps: int = 20) -> list[float]:
    optimizer, losses = torch.optim.AdamW(module.model.parameters(), 3e-3), []
    for _ in range(steps):
        loss = module._losses(batch())["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_learns_and_no_parameter_is_left_out(model: dict[str, Any]) -> None:
    """One without a gradient would stop distributed training (label dropout 0 included)."""
    module = build(model, data={"image_size": 8, "label_dropout": 0})
    losses = train_some(module)
    assert losses[-1] < 0.8 * losses[0]
    assert not [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def test_labels_reach_every_block_as_they_are(model: dict[str, Any]) -> None:
    """In training too: a denoiser that dropped labels itself would drop other ones each time."""
    module = build(model)
    train_some(module)
    noisy, _, _, step = batch(64)
    labels = torch.full((64,), 3)
    with torch.no_grad():
        training, evaluating, null = (
            module.train(mode)(noisy, step, label)
            for mode, label in ((True, labels), (False, labels), (False, labels * 0 + 10))
        )
    assert torch.equal(training, evaluating)
    assert not torch.allclose(training, null), "the null class is another"


@pytest.mark.parametrize("name", ["grad_checkpointing", "compile"])
def test_options_change_the_cost_and_not_the_result(model: dict[str, Any], name: str) -> None:
    results = []
    for options in ({}, {name: True}):
        torch.manual_seed(0)
        module = build(model | options)
        if name == "compile":
            results.append(getattr(module.model, "_compiled_call_impl", None) is not None)
        else:
            results.append(module.model.gradient_checkpointing)
            module._losses(batch())["loss"].sum().backward()
            results.append([p.grad for p in module.parameters() if p.grad is not None])
    if name == "compile":
        assert results == [False, True]
    else:
        assert (results[0], results[2]) == (False, True)
        for a, b in zip(results[1], results[3], strict=True):
            torch.testing.assert_close(a, b)


def test_dit_is_the_released_one_in_size() -> None:
    model = create_dit(sample_size=32, in_channels=4, num_classes=1000, patch_size=2)
    own = {name: p for name, p in model.named_parameters() if ".emb." not in name}
    shared = {name: p for name, p in model.named_parameters() if name.startswith("transformer_blocks.0.norm1.emb")}
    # Of the paper's 33 M; diffusers gives every block a time and label embedding of its own.
    total = sum(p.numel() for p in (own | shared).values())
    assert total == pytest.approx(33e6, rel=0.02)
    assert model.config.num_attention_heads == 6


@pytest.mark.parametrize(
    ("model", "size", "sentence"),
    [
        ({"name": "denoiser_x_2"}, (8, 8), "no denoiser 'denoiser_x_2'; choose one of denoiser_micro"),
        ({"name": "denoiser_micro", "kwargs": {"dept": 3}}, (8, 8), "do not fit denoiser_micro: .*dept"),
        ({"name": "dit", "kwargs": {"dept": 3}}, (8, 8), "do not fit dit: .*dept"),
        ({"name": "dit", "kwargs": {"hidden_size": 40, "num_heads": 3}}, (8, 8), "no multiple of num_heads 3"),
        ({"name": "dit"}, (8, 12), "squares only"),
    ],
)
def test_wrong_models_are_refused(model: dict[str, Any], size: tuple[int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_denoiser(DenoiserConfig(**model), channels=1, size=size, num_classes=10, label_dropout=0.1)


def test_ours_takes_rectangles() -> None:
    model: Any = build_denoiser(DenoiserConfig(**OURS), channels=1, size=(8, 12), num_classes=10, label_dropout=0.1)
    assert model(torch.zeros(1, 1, 8, 12), torch.zeros(1), torch.zeros(1, dtype=torch.int64)).sample.shape[2:] == (
        8,
        12,
    )
