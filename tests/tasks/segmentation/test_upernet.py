"""UperNet on every kind of backbone: sizes, gradients, norms, alignment with the image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightformer.tasks.segmentation.module import pixel_loss
from weightformer.tasks.segmentation.upernet import FCNHead, PyramidNeck, UperHead, UperNet, build_norm
from weightformer.training.backbone import FeatureMap, build_backbone
from weightformer.training.config import ModelConfig

SMALL = {"embed_dim": 16, "depth": 4}
DEIT = {"patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, "img_size": 28}
KINDS = [
    ("weightformer_micro", SMALL),
    ("weightformer_micro", {**SMALL, "patch_size": 16}),
    ("deit_tiny_patch16_224", DEIT),
    ("convnext_atto", {}),
    ("pvt_v2_b0", {}),
]


def build(name: str = "weightformer_micro", kwargs: dict[str, Any] = SMALL, **options: Any) -> UperNet:
    backbone, maps = build_backbone(ModelConfig(name=name, kwargs=kwargs))
    return UperNet(backbone, maps, 5, **{"channels": 16, "aux_channels": 16, "norm": "group", **options})


@pytest.mark.parametrize(("name", "kwargs"), KINDS, ids=["micro", "patch 16", "DeiT", "ConvNeXt", "PVT v2"])
@pytest.mark.parametrize("size", [(64, 64), (97, 131), (33, 32)])
def test_any_backbone_and_size_and_every_parameter_has_a_gradient(
    name: str, kwargs: dict[str, Any], size: tuple[int, int]
) -> None:
    model = build(name, kwargs)
    outputs = model(torch.rand(1, 3, *size), auxiliary=True)
    assert [tuple(x.shape) for x in outputs] == [(1, 5, *size)] * 2
    sum(pixel_loss(x, torch.randint(5, (1, *size))) for x in outputs).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_pyramid_of_an_isotropic_backbone() -> None:
    """Strides 4, 8, 16 and 32 of stride 16, with an odd grid's last row and column."""
    model = build(kwargs={**SMALL, "patch_size": 16})
    maps = model.pyramid(torch.rand(1, 3, 15 * 16, 9 * 16))
    assert [tuple(x.shape[2:]) for x in maps] == [(60, 36), (30, 18), (15, 9), (8, 5)]


@pytest.mark.parametrize(
    ("stride", "exponents"),
    [(4, [0, -1, -2, -3]), (8, [1, 0, -1, -2]), (14, [2, 1, 0, -1]), (16, [2, 1, 0, -1]), (32, [3, 2, 1, 0])],
)
def test_scales_by_stride(stride: int, exponents: list[int]) -> None:
    neck = PyramidNeck(16, stride, 4, build_norm("group"))
    assert neck.scale_exponents == exponents
    maps = neck([torch.rand(1, 16, 9, 11)] * 4)
    for x, exponent in zip(maps, exponents, strict=True):
        assert list(x.shape[2:]) == (torch.tensor([9.0, 11.0]) * 2.0**exponent).ceil().long().tolist()


def test_the_last_row_and_column_are_seen() -> None:
    model = build().eval()
    image = torch.rand(1, 3, 37, 41)
    before = model(image)
    image[..., -1, :] = 0
    image[..., -1] = 0
    assert (model(image) - before)[..., -3:, -3:].abs().max() > 1e-4


class Echo(nn.Module):
    """A backbone whose map is the image's red channel at stride 4."""

    def forward_intermediates(self, images: Tensor, **_: Any) -> list[Tensor]:
        return [images[:, :1, ::4, ::4].expand(-1, 16, -1, -1)]


class Straight(nn.Module):
    def forward(self, maps: list[Tensor]) -> Tensor:
        return maps[0]


@pytest.mark.parametrize("size", [(64, 64), (61, 75)])
def test_logits_lie_where_the_image_does(size: tuple[int, int]) -> None:
    """A ramp comes back as the same ramp, not stretched by what the sides were padded with."""
    model = UperNet(Echo(), [FeatureMap(0, 16, 4)], 5, channels=16, aux_channels=0, norm="group")
    model.decode_head = Straight()
    ramp = torch.arange(size[1]).expand(1, 3, *size).float()
    logits = model(ramp)[0, 0]
    inner = slice(4, size[1] - 8)
    expected = ramp[0, 0] - 1.5  # a cell holds its first pixel and stands for its middle
    torch.testing.assert_close(logits[:, inner], expected[:, inner], rtol=0, atol=1e-3)


def test_one_image_alone_or_in_a_batch() -> None:
    model = build(norm="batch").eval()
    images = torch.rand(3, 3, 45, 64)
    together = model(images)
    for i in range(3):
        torch.testing.assert_close(model(images[i : i + 1]), together[i : i + 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "sync_batch", "group"])
def test_norms_in_training(norm: str) -> None:
    model = build(norm=norm)
    kinds = {"batch": nn.BatchNorm2d, "sync_batch": nn.SyncBatchNorm, "group": nn.GroupNorm}
    heads = [*model.neck.modules(), *model.decode_head.modules(), *model.aux_head.modules()]
    norms = [m for m in heads if isinstance(m, tuple(kinds.values()))]
    assert norms
    assert all(isinstance(m, kinds[norm]) for m in norms)
    assert model(torch.rand(2, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize(("norm", "where"), [("batch", "a process"), ("sync_batch", "in all")])
def test_one_image_a_process_needs_another_norm_than_batch(norm: str, where: str) -> None:
    model, image = build(norm=norm), torch.rand(1, 3, 32, 32)
    with pytest.raises(ValueError, match=rf"one image {where}; use data\.batch_size 2 or more, or head\.norm: group"):
        model(image)
    model.eval()(image)


def test_options_take_effect() -> None:
    assert build().decode_head.classifier.in_channels == 16
    assert build(channels=32).decode_head.classifier.in_channels == 32
    assert build(aux_channels=32).aux_head.classifier.in_channels == 32
    assert build(dropout=0.3).decode_head.dropout.p == build(dropout=0.3).aux_head.dropout.p == 0.3
    without = build(aux_channels=0)
    assert without.aux_head is None
    with pytest.raises(ValueError, match="without an auxiliary head"):
        without(torch.rand(1, 3, 32, 32), auxiliary=True)
    model = build()
    model.set_grad_checkpointing()
    assert model.backbone.grad_checkpointing


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="unknown norm 'layer'; choose one of batch, sync_batch, group"):
        build(norm="layer")
    with pytest.raises(ValueError, match="multiples of 16, got 24"):
        build(channels=24)
    maps = [FeatureMap(0, 16, 4), FeatureMap(1, 16, 16)]
    with pytest.raises(ValueError, match=r"equal or double each time, got \[4, 16\]"):
        UperNet(nn.Identity(), maps, 5)


def test_heads_by_hand_count() -> None:
    """Parameters of the paper's settings: 192 channels, 150 classes, an auxiliary head of 256."""
    norm = build_norm("sync_batch")
    head, aux = UperHead([192] * 4, 192, 150, norm), FCNHead(192, 256, 150, norm)

    def conv(i: int, o: int, k: int) -> int:
        return i * o * k * k + 2 * o

    pooled = 4 * conv(192, 192, 1) + conv(5 * 192, 192, 3)
    pyramid = 3 * conv(192, 192, 1) + 3 * conv(192, 192, 3) + conv(4 * 192, 192, 3)
    assert sum(p.numel() for p in head.parameters()) == pooled + pyramid + 192 * 150 + 150
    assert sum(p.numel() for p in aux.parameters()) == conv(192, 256, 3) + 256 * 150 + 150


def test_layer_decay_and_exemptions_reach_the_backbone() -> None:
    model = build("deit_tiny_patch16_224", DEIT)
    assert model.no_weight_decay() >= {"backbone.pos_embed", "backbone.cls_token"}
    assert set(model.group_matcher()) == {"stem", "blocks"}
