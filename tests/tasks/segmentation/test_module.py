"""The loss over labelled pixels, and the module around it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from weightformer.tasks.segmentation.config import HeadConfig, SegmentationConfig
from weightformer.tasks.segmentation.module import SegmentationModule, build_model, pixel_loss
from weightformer.training.config import ModelConfig

SMALL = {"embed_dim": 16, "depth": 4}


def config(**model: object) -> SegmentationConfig:
    return SegmentationConfig(
        model=ModelConfig(kwargs=SMALL, in_chans=1, **model), head=HeadConfig(channels=16, aux_channels=16)
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_a_crop_without_labels_costs_nothing(batch: int) -> None:
    logits = torch.randn(batch, 3, 4, 5, requires_grad=True)
    loss = pixel_loss(logits, torch.full((batch, 4, 5), 255))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


def test_the_mean_is_over_labelled_pixels_alone() -> None:
    logits, target = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    target[0] = 255
    target[1, 0, :2] = 255
    rows = logits[1].permute(1, 2, 0).double()
    by_hand = [
        -F.log_softmax(row, 0)[t] for row, t in zip(rows.reshape(-1, 3), target[1].flatten(), strict=True) if t != 255
    ]
    assert len(by_hand) == 18
    assert pixel_loss(logits, target).item() == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_the_auxiliary_loss_is_added_with_its_weight(weight: float) -> None:
    settings = config()
    settings.head.aux_weight, settings.head.dropout, settings.head.norm = weight, 0.0, "group"
    module = SegmentationModule(settings, ["a", "b", "c"])
    module.log = lambda *_, **__: None
    module._trainer = type("Trainer", (), {"optimizers": [torch.optim.SGD(module.parameters(), lr=1)]})()
    images, target = torch.randn(2, 1, 32, 32), torch.randint(3, (2, 32, 32))
    loss = module.training_step((images, target), 0)
    loss.backward()
    assert not [name for name, p in module.named_parameters() if p.grad is None]
    expected = pixel_loss(module(images), target)
    if weight:
        expected = expected + weight * pixel_loss(module.model(images, auxiliary=True)[1], target)
    torch.testing.assert_close(loss, expected)


def test_a_stored_configuration_builds_the_same_module() -> None:
    settings = config()
    module = SegmentationModule(dataclasses.asdict(settings), ["a", "b"])
    assert module.config == settings
    with pytest.raises(ValueError, match=r"unknown key 'head.foo'"):
        SegmentationModule({"head": {"foo": 1}}, ["a", "b"])
    with pytest.raises(ValueError, match="not one for task 'classification'"):
        SegmentationConfig(task="classification")


def test_model_options_take_effect() -> None:
    assert build_model(config(grad_checkpointing=True), 2).backbone.grad_checkpointing
    assert build_model(config(compile=True), 2)._compiled_call_impl is not None
    assert build_model(config(), 2)._compiled_call_impl is None
    settings = config()
    settings.head.indices = [1, 3]
    assert build_model(settings, 2).indices == [1, 3]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"channels": 0}, "channels"), ({"dropout": 1.0}, "dropout"), ({"aux_weight": -1}, "aux_weight")],
)
def test_values_out_of_range(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=rf"head\..*{name}"):
        HeadConfig(**options)


def test_batches_of_several_sizes_are_evaluated_by_size() -> None:
    module = SegmentationModule(config(), ["a", "b", "c"]).eval()
    seen = []
    module.model.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    sizes = [(32, 32), (32, 32), (40, 32), (32, 32)]
    batch = [(torch.rand(1, *size), torch.randint(3, (2 * size[0] + 1, size[1])).to(torch.uint8)) for size in sizes]
    module.validation_step(batch, 0)
    assert seen == [(2, 1, 32, 32), (1, 1, 40, 32), (1, 1, 32, 32)]
    assert module.metrics.confusion.sum() == sum(target.numel() for _, target in batch)
    assert module.metrics.images == 4
    module.validation_step([], 1)
