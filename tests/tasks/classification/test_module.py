"""Mixing, models of any name, and gradients everywhere."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch

from weightformer.models.checkpoint import save_weights
from weightformer.tasks.classification.config import ClassificationConfig, MixConfig
from weightformer.tasks.classification.module import ClassificationModule, Mix, build_model
from weightformer.training.config import ModelConfig

SMALL = {"embed_dim": 16, "depth": 2}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixing_keeps_distributions_at_any_batch(batch: int, options: dict[str, float]) -> None:
    images, target = torch.rand(batch, 1, 8, 8), torch.arange(batch) % 3
    mix, changed = Mix(MixConfig(**options), num_classes=3), False
    for _ in range(10):  # a CutMix box may be empty
        mixed, soft = mix(images, target)
        assert mixed.shape == images.shape
        torch.testing.assert_close(soft.sum(1), torch.ones(batch))
        changed |= not torch.allclose(mixed, images)
    assert changed == (batch > 1)


def test_mixing_share_and_switch() -> None:
    images, target = torch.arange(4.0)[:, None, None, None].expand(4, 1, 8, 8), torch.arange(4)
    mix = Mix(MixConfig(mixup=1.0, cutmix=1.0, prob=0.5, switch_prob=0.25), num_classes=4)
    kinds = {"none": 0, "mixup": 0, "cutmix": 0}
    for _ in range(400):
        mixed, soft = mix(images, target)
        flat = bool((mixed == mixed[:, :, :1, :1]).all())
        kinds["none" if soft.ndim == 1 else "mixup" if flat else "cutmix"] += 1
    assert kinds["none"] == pytest.approx(200, abs=50)
    assert kinds["cutmix"] == pytest.approx(50, abs=30)  # a few CutMix boxes are empty and look like MixUp
    assert Mix(MixConfig(), num_classes=4)(images, target)[1] is target


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("weightformer_micro", SMALL),
        ("weightformer_micro", {**SMALL, "dynamic_every": 0}),
        ("deit_tiny_patch16_224", {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}),
        ("convnext_atto", {}),
    ],
)
def test_any_timm_model_trains_and_every_parameter_has_a_gradient(name: str, kwargs: dict[str, object]) -> None:
    config = ClassificationConfig(model=ModelConfig(name=name, kwargs=kwargs, in_chans=1))
    config.data.image_size = 32
    module = ClassificationModule(config, ["a", "b", "c"])
    loss = torch.nn.functional.cross_entropy(module(torch.randn(2, 1, 32, 32)), torch.tensor([0, 2]))
    loss.backward()
    assert not [n for n, p in module.named_parameters() if p.grad is None]


def test_unknown_models_and_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"no model 'weightformer_huge'; near it: weightformer"):
        build_model(ModelConfig(name="weightformer_huge"), 2, 32)
    with pytest.raises(ValueError, match=r"model.kwargs .*wings.* do not fit weightformer_micro"):
        build_model(ModelConfig(kwargs={"wings": 2}), 2, 32)


def test_fine_tuning_starts_from_a_file(tmp_path: object) -> None:
    start = timm.create_model("weightformer_micro", num_classes=7, **SMALL)
    save_weights(start, tmp_path / "start.safetensors", released=True)
    config = ModelConfig(kwargs=SMALL, in_chans=1, weights=str(tmp_path / "start.safetensors"))
    with pytest.warns(UserWarning, match="head for 7 classes was dropped.*3 to 1 channels"):
        model = build_model(config, 2, 32)
    torch.testing.assert_close(model.blocks[1].fc1.w1, start.blocks[1].fc1.w1)
    torch.testing.assert_close(model.patch_embed.proj.weight, start.patch_embed.proj.weight.sum(1, keepdim=True))


def test_model_options_take_effect() -> None:
    assert build_model(ModelConfig(kwargs=SMALL, grad_checkpointing=True), 2, 32).grad_checkpointing
    assert build_model(ModelConfig(kwargs=SMALL, compile=True), 2, 32)._compiled_call_impl is not None
    assert build_model(ModelConfig(kwargs=SMALL), 2, 32)._compiled_call_impl is None


def test_a_stored_configuration_builds_the_same_module() -> None:
    config = ClassificationConfig(model=ModelConfig(kwargs=SMALL, in_chans=1))
    module = ClassificationModule(dataclasses.asdict(config), ["a", "b"])
    assert module.config == config
    with pytest.raises(ValueError, match=r"unknown key 'optim.foo'"):
        ClassificationModule({"optim": {"foo": 1}}, ["a", "b"])
