"""The pyramid on any backbone: sizes, cost, windows, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightformer.cli import main
from weightformer.tasks.detection.info import describe
from weightformer.tasks.detection.pyramid import PyramidBackbone, SimpleFeaturePyramid
from weightformer.tasks.detection.windows import _run_block
from weightformer.training.config import ModelConfig

VIT = {"embed_dim": 24, "depth": 4, "num_heads": 2, "patch_size": 4, "img_size": 28}
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("weightformer_micro", {"embed_dim": 16, "depth": 2}),
    "ours, patch 16": ("weightformer_tiny", {"embed_dim": 16, "depth": 2}),
    "DeiT": ("deit_tiny_patch16_224", VIT),
    "ConvNeXt": ("convnext_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}),
    "PVT v2": ("pvt_v2_b0", {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 1, 1, 1)}),
}


def build(name: str, window: int = 0, **kwargs: Any) -> PyramidBackbone:
    model = ModelConfig(name=name, kwargs=kwargs)
    return PyramidBackbone(model, channels=8, strides=[4, 8, 16, 32], window=window)


@pytest.mark.parametrize("kind", BACKBONES)
def test_levels_cover_images_of_any_size(kind: str) -> None:
    name, kwargs = BACKBONES[kind]
    trunk = build(name, **kwargs)
    assert trunk.stride == (4 if kwargs.get("patch_size") == 4 or kind == "ours" else 16)
    for height, width in ((64, 96), (50, 71)):
        maps = trunk(torch.randn(2, 3, height, width))
        assert list(maps) == ["0", "1", "2", "3", "pool"]
        padded = [-(-side // trunk.stride) * trunk.stride for side in (height, width)]
        for stride, x in zip((4, 8, 16, 32, 64), maps.values(), strict=True):
            assert x.shape == (2, 8, *(-(-side // stride) for side in padded))
    sum(x.square().sum() for x in maps.values()).backward()
    assert not [n for n, p in trunk.named_parameters() if p.grad is None]


def test_every_pixel_reaches_the_coarsest_level() -> None:
    trunk = build(*("weightformer_micro",), **BACKBONES["ours"][1]).eval()
    image = torch.randn(1, 3, 68, 36)  # 17 x 9 tokens, and 3 x 2 cells of 32 px
    before = trunk(image)["3"]
    image[..., -3:] += 1
    assert not torch.allclose(trunk(image)["3"][..., -1], before[..., -1])


def test_levels_must_be_reachable() -> None:
    with pytest.raises(ValueError, match="stride 6 cannot be made of a map of stride 16"):
        SimpleFeaturePyramid(8, 16, channels=8, strides=[6])
    for stride in (1, 2, 4, 8, 16, 32, 64):
        pyramid = SimpleFeaturePyramid(16, 8, channels=4, strides=[stride])
        assert pyramid(torch.randn(1, 16, 8, 16))["0"].shape == (1, 4, 64 // stride, 128 // stride)


@pytest.mark.parametrize("window", [5, 7])
def test_windows_confine_attention_but_for_four_blocks(window: int) -> None:
    trunk = build("deit_tiny_patch16_224", window=window, **VIT | {"depth": 8})
    images = torch.randn(2, 3, 28, 36)
    sum(x.square().sum() for x in trunk(images).values()).backward()
    assert not [n for n, p in trunk.named_parameters() if p.grad is None]
    trunk.body.set_grad_checkpointing()
    torch.testing.assert_close(trunk(images)["0"], trunk.eval()(images)["0"])
    # Without the global blocks a change stays in its window.
    trunk.body.blocks = trunk.body.blocks[:1]
    x = torch.randn(1, 7, 9, 24)
    changed = x.clone()
    changed[0, 0, 0] = torch.randn(24)
    moved = (_run_block(trunk.body.blocks[0], changed, window) - _run_block(trunk.body.blocks[0], x, window)).abs()
    moved = moved.sum(-1)[0] > 0
    assert moved[:window, :window].all()
    assert moved.sum() == min(window, 7) * window


def test_a_window_of_the_whole_grid_is_global_attention() -> None:
    """Against timm's own forward, class token and all: it is kept there from taking part."""
    plain = build("deit_tiny_patch16_224", **VIT, class_token=False, global_pool="avg").eval()
    trunk = build("deit_tiny_patch16_224", window=8, **VIT, class_token=False, global_pool="avg").eval()
    trunk.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32)
    for key, x in plain(images).items():
        torch.testing.assert_close(trunk(images)[key], x, atol=1e-5, rtol=1e-4)


def test_windows_are_for_vits() -> None:
    with pytest.raises(ValueError, match="not for weightformer_micro"):
        build("weightformer_micro", window=14, embed_dim=16, depth=2)


def test_published_cost_of_backbone_and_pyramid(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper gives 77 G and 106 G (arXiv 2605.01711)."""
    assert main(["info", "weightformer_tiny", "--task", "detection"]) == 0
    assert "77.12 G an image = backbone 23.42 G + pyramid 53.70 G" in capsys.readouterr().out
    text = describe("deit_tiny_patch16_224")
    assert "105.72 G an image = backbone 52.02 G + pyramid 53.70 G, windows of 14" in text
    assert "global attention" in text
    assert "at 512 x 768 px" in describe("weightformer_micro", [512, 768])
    for size in ([0], [1, 2, 3]):
        with pytest.raises(ValueError, match="--size takes"):
            describe("weightformer_micro", size)
