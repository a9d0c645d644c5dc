from __future__ import annotations

import re

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from weightformer.analysis.flops import multiply_adds
from weightformer.models import PyramidVisionTransformer

# Parameters in millions and multiply-adds in billions at 224 px, of the paper's repository.
PUBLISHED = [("tiny", 13.2, 1.94), ("small", 24.5, 3.83), ("medium", 44.2, 6.69), ("large", 61.4, 9.85)]


def micro(**kwargs: object) -> nn.Module:
    """Two blocks in the second stage, one in the others."""
    return timm.create_model("pvt_v1_tiny", **({"depths": (1, 2, 1, 1), "num_classes": 10, "img_size": 64} | kwargs))


@pytest.mark.parametrize(("size", "parameters", "macs"), PUBLISHED)
def test_published_sizes(size: str, parameters: float, macs: float) -> None:
    model = timm.create_model(f"pvt_v1_{size}", device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, rel=0.01)
    assert multiply_adds(model, 3, 224, 224) / 1e9 == pytest.approx(macs, rel=0.01)
    config = model.pretrained_cfg
    assert {f"{config['first_conv']}.weight", f"{config['classifier']}.weight"} <= model.state_dict().keys()


# Our names for those of the independent implementation in transformers.
RENAMED = [
    (r"stages\.(\d+)\.patch_embed\.proj", r"pvt.encoder.patch_embeddings.\1.projection"),
    (r"stages\.(\d+)\.norm\b", r"pvt.encoder.patch_embeddings.\1.layer_norm"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.norm(\d)", r"pvt.encoder.block.\1.\2.layer_norm_\3"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attn\.q\b", r"pvt.encoder.block.\1.\2.attention.self.query"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attn\.sr", r"pvt.encoder.block.\1.\2.attention.self.sequence_reduction"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attn\.norm", r"pvt.encoder.block.\1.\2.attention.self.layer_norm"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.attn\.proj", r"pvt.encoder.block.\1.\2.attention.output.dense"),
    (r"stages\.(\d+)\.blocks\.(\d+)\.mlp\.fc(\d)", r"pvt.encoder.block.\1.\2.mlp.dense\3"),
    (r"^norm", "pvt.encoder.layer_norm"),
    (r"^head", "classifier"),
]


def in_their_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for key, value in state.items():
        if match := re.fullmatch(r"stages\.(\d+)\.pos_embed", key):
            value = value.flatten(1, 2)
            if match[1] == "3":  # they give the class token a position, we do not
                value = torch.cat([torch.zeros_like(value[:, :1]), value], 1)
            renamed[f"pvt.encoder.patch_embeddings.{match[1]}.position_embeddings"] = value
        elif key == "cls_token":
            renamed["pvt.encoder.patch_embeddings.3.cls_token"] = value
        elif match := re.fullmatch(r"stages\.(\d+)\.blocks\.(\d+)\.attn\.kv\.(weight|bias)", key):
            for name, half in zip(("key", "value"), value.chunk(2), strict=True):
                renamed[f"pvt.encoder.block.{match[1]}.{match[2]}.attention.self.{name}.{match[3]}"] = half
        else:
            for ours, theirs in RENAMED:
                key = re.sub(ours, theirs, key)
            renamed[key] = value
    return renamed


def test_equals_an_independent_implementation() -> None:
    transformers = pytest.importorskip("transformers", reason="the other implementation")
    model = micro(img_size=224).eval()
    config = transformers.PvtConfig(depths=[1, 2, 1, 1], hidden_sizes=[64, 128, 320, 512], num_labels=10)
    theirs = transformers.PvtForImageClassification(config).eval()
    for parameter in model.parameters():  # the biases and norms too
        nn.init.normal_(parameter, std=0.1)
    theirs.load_state_dict(in_their_names(model.state_dict()))
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, rtol=1e-3, atol=1e-4)


def test_any_size_and_channels() -> None:
    for in_chans, size in ((3, (64, 64)), (1, (96, 40)), (4, (33, 65)), (13, (32, 32))):
        model = micro(in_chans=in_chans)
        assert model(torch.randn(2, in_chans, *size)).shape == (2, 10)
        maps = model.forward_intermediates(torch.randn(1, in_chans, *size), intermediates_only=True)
        for i, m in enumerate(maps):
            stride = 4 * 2**i
            assert m.shape == (1, (64, 128, 320, 512)[i], -(-size[0] // stride), -(-size[1] // stride))
    with pytest.raises(ValueError, match="at least 32 px a side, got 28 x 64 px"):
        micro()(torch.randn(1, 3, 28, 64))


def test_positions_are_interpolated_and_matter() -> None:
    model, x = micro().eval(), torch.randn(1, 3, 64, 64)
    before = model(x)
    nn.init.zeros_(model.stages[2].pos_embed)
    assert not torch.allclose(model(x), before, atol=1e-4)
    assert micro(img_size=(32, 96)).stages[0].pos_embed.shape == (1, 8, 24, 64)


def test_features_only() -> None:
    model = micro(features_only=True, out_indices=(0, 2))
    maps = model(torch.randn(2, 3, 64, 96))
    assert [tuple(m.shape) for m in maps] == [(2, 64, 16, 24), (2, 320, 4, 6)]
    assert (model.feature_info.channels(), model.feature_info.reduction()) == ([64, 320], [4, 16])
    sum(m.sum() for m in maps).backward()
    assert all(p.grad is not None for p in model.parameters())  # so DDP needs no find_unused_parameters
    default = micro(features_only=True)
    assert default.feature_info.reduction() == [4, 8, 16, 32]


def test_forward_intermediates() -> None:
    model, x = micro().eval(), torch.randn(2, 3, 64, 64)
    tokens, maps = model.forward_intermediates(x)
    assert torch.equal(tokens, model.forward_features(x))
    normed = model.forward_intermediates(x, [3], norm=True, intermediates_only=True)[0]
    assert torch.equal(normed.flatten(2).mT, tokens[:, 1:])
    early, taken = model.forward_intermediates(x, (0, -3), stop_early=True)
    assert torch.equal(early, maps[1].flatten(2).mT)
    assert torch.equal(taken[0], maps[0])
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW', got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")
    with pytest.raises(ValueError, match="out of range for 4 stages"):
        model.forward_intermediates(x, (4,))


def test_head() -> None:
    model, x = micro().eval(), torch.randn(2, 3, 64, 64)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(5)
    assert torch.equal(model(x), model.get_classifier()(pooled))
    with pytest.raises(ValueError, match="class token"):
        model.reset_classifier(5, "avg")


def test_checkpointing_and_drop_path() -> None:
    model, x = micro(drop_path_rate=0.5).train(), torch.randn(4, 3, 64, 64)
    losses = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        torch.manual_seed(0)
        loss = model(x).square().sum()
        loss.backward()
        losses.append((loss.item(), model.stages[0].blocks[0].attn.q.weight.grad.clone()))
    assert losses[0][0] == losses[1][0]
    torch.testing.assert_close(losses[0][1], losses[1][1])
    assert model.eval()(x).square().sum().item() != losses[0][0]
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.125, 0.25, 0.375, 0.5])


def test_every_parameter_is_optimised_once_and_by_depth() -> None:
    model = micro()
    optimiser = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {names.pop(id(p)): group for group in optimiser.param_groups for p in group["params"]}
    assert not names
    order = ["stages.0.patch_embed.proj", "stages.1.blocks.0.attn.q", "stages.1.blocks.1.attn.q", "norm", "head"]
    scales = [groups[f"{name}.weight"]["lr_scale"] for name in order]
    assert scales == sorted(set(scales))
    assert groups["stages.3.pos_embed"]["weight_decay"] == groups["cls_token"]["weight_decay"] == 0
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()


def test_initialisation_reaches_every_parameter() -> None:
    model = micro(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
def test_trace_and_compile() -> None:
    model, x = micro(depths=(1, 1, 1, 1)).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(model, x)(-x), model(-x), rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"depths must have 4 numbers, one a stage, got \(2, 2\)"):
        PyramidVisionTransformer(depths=(2, 2))
    with pytest.raises(RuntimeError, match="pretrained"):
        timm.create_model("pvt_v1_tiny", pretrained=True)
