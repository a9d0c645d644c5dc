from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn

from weightformer.analysis.flops import multiply_adds

# Parameters in millions and multiply-adds in billions at 224 px, as the paper prints them.
PUBLISHED = [("small", 22, 4.3), ("base", 87, 16.9)]


def micro(**kwargs: object) -> nn.Module:
    return timm.create_model(
        "convnext_isotropic_small", **({"embed_dim": 32, "depth": 3, "patch_size": 8, "num_classes": 10} | kwargs)
    )


@pytest.mark.parametrize(("size", "parameters", "macs"), PUBLISHED)
def test_published_sizes(size: str, parameters: int, macs: float) -> None:
    model = timm.create_model(f"convnext_isotropic_{size}", device="meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == parameters
    assert multiply_adds(model, 3, 224, 224) / 1e9 == pytest.approx(macs, rel=0.01)
    config = model.pretrained_cfg
    assert {f"{config['first_conv']}.weight", f"{config['classifier']}.weight"} <= model.state_dict().keys()


def test_is_its_formula() -> None:
    model, x = micro().eval(), torch.randn(2, 3, 40, 24)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    y = F.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=8)
    for block in model.blocks:
        z = F.conv2d(y, block.conv_dw.weight, block.conv_dw.bias, padding=3, groups=32).permute(0, 2, 3, 1)
        z = F.layer_norm(z, (32,), block.norm.weight, block.norm.bias, 1e-6)
        y = y + block.mlp.fc2(F.gelu(block.mlp.fc1(z))).permute(0, 3, 1, 2)
    pooled = F.layer_norm(y.mean((2, 3)), (32,), model.norm.weight, model.norm.bias, 1e-6)
    torch.testing.assert_close(model(x), model.head(pooled), rtol=1e-4, atol=1e-4)
    assert not any("gamma" in name for name, _ in model.named_parameters())  # no layer scale


def test_any_size_and_channels() -> None:
    for in_chans, size in ((3, (64, 64)), (1, (8, 40)), (4, (33, 65))):
        model = micro(in_chans=in_chans)
        x = torch.randn(2, in_chans, *size)
        assert model(x).shape == (2, 10)
        assert model.forward_features(x).shape == (2, 32, -(-size[0] // 8), -(-size[1] // 8))
    assert micro()(torch.randn(0, 3, 64, 64)).shape == (0, 10)


def test_features_only() -> None:
    model = micro(features_only=True, out_indices=(0, 1))
    maps = model(torch.randn(2, 3, 64, 96))
    assert [tuple(m.shape) for m in maps] == [(2, 32, 8, 12)] * 2
    assert (model.feature_info.channels(), model.feature_info.reduction()) == ([32, 32], [8, 8])
    sum(m.sum() for m in maps).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_forward_intermediates() -> None:
    model, x = micro().eval(), torch.randn(2, 3, 40, 24)
    last, maps = model.forward_intermediates(x)
    assert len(maps) == 3
    assert torch.equal(last, model.forward_features(x))
    assert torch.equal(maps[-1], last)
    early, taken = model.forward_intermediates(x, (-2, 0), norm=True, stop_early=True)
    assert torch.equal(early, maps[1])
    assert torch.equal(taken[0].permute(0, 2, 3, 1), model.norm(maps[1].permute(0, 2, 3, 1)))
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW', got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")
    with pytest.raises(ValueError, match="out of range for 3 blocks"):
        model.forward_intermediates(x, (3,))


def test_head() -> None:
    model, x = micro(drop_rate=0.5).eval(), torch.randn(2, 3, 40, 24)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    assert not torch.equal(model.train()(x), pooled)
    model.reset_classifier(5)
    assert torch.equal(model.eval()(x), model.get_classifier()(pooled))
    with pytest.raises(ValueError, match="averages"):
        model.reset_classifier(5, "token")


def test_checkpointing_and_drop_path() -> None:
    model, x = micro(drop_path_rate=0.5).train(), torch.randn(8, 3, 40, 24)
    losses = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        losses.append(model(x).square().sum().item())
    assert losses[0] == losses[1]
    assert model.eval()(x).square().sum().item() != losses[0]
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.25, 0.5])


def test_every_parameter_is_optimised_once_and_by_depth() -> None:
    model = micro()
    optimiser = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {names.pop(id(p)): group for group in optimiser.param_groups for p in group["params"]}
    assert not names
    order = ["patch_embed.proj.weight", *(f"blocks.{i}.conv_dw.weight" for i in range(3)), "head.weight"]
    scales = [groups[name]["lr_scale"] for name in order]
    assert scales == sorted(set(scales))


def test_initialisation() -> None:
    model = micro(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name


def test_no_weights_to_load() -> None:
    with pytest.raises(RuntimeError, match="pretrained"):
        timm.create_model("convnext_isotropic_small", pretrained=True)
