"""Backbones of every kind: their maps, start weights from files, and layer-wise decay under a larger model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from weightformer.models.checkpoint import save_weights
from weightformer.training.backbone import build_backbone, groups_below
from weightformer.training.config import ModelConfig, OptimConfig
from weightformer.training.optim import build_optimizer

SMALL = {"embed_dim": 16, "depth": 4}
DEIT = {"patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, "img_size": 28}
KINDS = [
    ("weightformer_micro", SMALL, [4, 4, 4, 4]),
    ("deit_tiny_patch16_224", DEIT, [4, 4, 4, 4]),
    ("convnext_atto", {}, [4, 8, 16, 32]),
    ("pvt_v2_b0", {}, [4, 8, 16, 32]),
    ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 2, 1)}, [4, 8, 16, 32]),
    ("resnet10t", {}, [4, 8, 16, 32]),
]


@pytest.mark.parametrize(("name", "kwargs", "strides"), KINDS, ids=[name for name, *_ in KINDS])
def test_maps_are_as_described_and_every_parameter_has_a_gradient(
    name: str, kwargs: dict[str, Any], strides: list[int]
) -> None:
    backbone, maps = build_backbone(ModelConfig(name=name, kwargs=kwargs))
    assert [m.stride for m in maps] == strides
    features = backbone.forward_intermediates(
        torch.rand(2, 3, 96, 160), indices=[m.index for m in maps], intermediates_only=True
    )
    for feature, m in zip(features, maps, strict=True):
        assert feature.shape == (2, m.channels, 96 // m.stride, 160 // m.stride)
    sum(feature.square().sum() for feature in features).backward()
    assert not [name for name, p in backbone.named_parameters() if p.grad is None]


@pytest.mark.parametrize(
    ("depth", "indices"),
    [(24, [5, 11, 17, 23]), (17, [3, 7, 11, 16]), (12, [2, 5, 8, 11]), (5, [0, 1, 2, 4]), (2, [0, 1])],
)
def test_default_maps_end_the_quarters(depth: int, indices: list[int]) -> None:
    config = ModelConfig(kwargs={"embed_dim": 8, "depth": depth})
    assert [m.index for m in build_backbone(config)[1]] == indices


def test_chosen_maps_and_what_is_dropped_above_them() -> None:
    backbone, maps = build_backbone(ModelConfig(kwargs=SMALL), [0, -2])
    assert [m.index for m in maps] == [0, 2]
    assert len(backbone.blocks) == 3
    with pytest.raises(ValueError, match=r"\[4\] are out of range: weightformer_micro has 4 feature maps"):
        build_backbone(ModelConfig(kwargs=SMALL), [4])


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "weightformer_micro"])
@pytest.mark.parametrize("released", [False, True])
def test_weights_of_a_classifier_are_loaded_and_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, released: bool
) -> None:
    kwargs = DEIT if name.startswith("deit") else SMALL
    start = timm.create_model(name, num_classes=7, **kwargs)
    path = tmp_path / "start.safetensors"
    save_weights(start, path, released=released)
    backbone, _ = build_backbone(ModelConfig(name=name, kwargs=kwargs, in_chans=1, weights=str(path)))
    lines = capsys.readouterr().err.splitlines()
    count = len(start.state_dict()) - 2
    assert len(lines) == 1
    assert lines[0].startswith(f"backbone: {count} of {count} tensors from {path}")
    assert "head for 7 classes was dropped" in lines[0]
    assert "3 to 1 channels" in lines[0]
    for key, value in backbone.state_dict().items():
        if key != "patch_embed.proj.weight":
            assert torch.equal(value, start.state_dict()[key]), key


def test_unfit_weights_and_arguments_are_refused(tmp_path: Path) -> None:
    save_weights(timm.create_model("weightformer_micro", embed_dim=32, depth=4), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other.safetensors does not fit the model"):
        build_backbone(ModelConfig(kwargs=SMALL, weights=str(tmp_path / "other.safetensors")))
    with pytest.raises(ValueError, match=r"no model 'weightformer_huge'; near it: weightformer"):
        build_backbone(ModelConfig(name="weightformer_huge"))
    for name in ("weightformer_micro", "deit_tiny_patch16_224"):
        with pytest.raises(ValueError, match=rf"model.kwargs .*wings.* do not fit {name}"):
            build_backbone(ModelConfig(name=name, kwargs={"wings": 2}))


@pytest.mark.parametrize("size", [(28, 28), (41, 60)])
def test_position_embeddings_follow_the_size(size: tuple[int, int]) -> None:
    backbone, maps = build_backbone(ModelConfig(name="deit_tiny_patch16_224", kwargs=DEIT))
    features = backbone.forward_intermediates(
        torch.rand(1, 3, *size), indices=[m.index for m in maps], intermediates_only=True
    )
    assert features[0].shape[-2:] == (-(-size[0] // 4), -(-size[1] // 4))


def test_options_take_effect() -> None:
    assert build_backbone(ModelConfig(kwargs=SMALL, grad_checkpointing=True))[0].grad_checkpointing
    assert not build_backbone(ModelConfig(kwargs=SMALL))[0].grad_checkpointing


class Larger(nn.Module):
    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.backbone, _ = build_backbone(ModelConfig(name=name, kwargs=kwargs))
        self.neck = nn.Linear(2, 2)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return groups_below("backbone", self.backbone, coarse)


@pytest.mark.parametrize(("name", "kwargs", "_"), KINDS, ids=[name for name, *_ in KINDS])
def test_layer_decay_starts_below_the_heads(name: str, kwargs: dict[str, Any], _: list[int]) -> None:
    model = Larger(name, kwargs)
    config = OptimConfig(layer_decay=0.5, lr=1.0, lr_batch=0, warmup_epochs=0)
    optimizer, _ = build_optimizer(model, config, global_batch=1, total_steps=4, steps_per_epoch=1)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    rates = [rate[id(p)] for p in model.backbone.parameters()]
    assert rate[id(model.neck.weight)] == rate[id(model.neck.bias)] == 1.0
    assert max(rates) == 0.5
    assert rates[0] == min(rates) <= 0.125
    assert len(set(rates)) >= 3
