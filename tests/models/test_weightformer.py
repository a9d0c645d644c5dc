"""The backbone: golden tensors, timm's contract over the registry, sizes, precision, capture."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.data import resolve_data_config
from timm.models import create_feature_extractor
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity import assert_close
from weightformer import ops
from weightformer.bench.memory import tensor_bytes
from weightformer.layers import (
    CONV_PREDICTORS,
    LINEAR_PREDICTORS,
    Block,
    DynamicDepthwiseConv2d,
    DynamicLinear,
)
from weightformer.models import WeightFormer
from weightformer.models.checkpoint import load_weights

NAMES = ["weightformer_base", "weightformer_micro", "weightformer_small", "weightformer_tiny"]
IMPLEMENTATIONS = ["auto", "reference", "eager"]
Build = Callable[..., WeightFormer]
Images = Callable[..., Tensor]


def from_golden(path: Path) -> tuple[WeightFormer, dict[str, Tensor]]:
    """The small model of a golden file, with its weights, and the file's tensors."""
    with safe_open(path, "pt") as file:
        config = {key: int(value) for key, value in file.metadata().items() if key != "img_size"}
    tensors = load_file(path)
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    return load_weights(WeightFormer(**config), weights).eval(), tensors


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# Numbers of the released code


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_golden(golden: Path, name: str, dtype: torch.dtype, tolerance: float) -> None:
    model, stored = from_golden(golden)
    model, x = model.to(dtype), stored["input"].to(dtype)
    with torch.no_grad(), ops.implementation(name):
        tokens, blocks = model.forward_intermediates(x, output_fmt="NHWC")
        found = {f"block.{i}": block.flatten(1, 2) for i, block in enumerate(blocks)}
        found |= {"pooled": model.forward_head(tokens, pre_logits=True), "logits": model(x)}
    assert found.keys() == {key for key in stored if not key.startswith("weights.")} - {"input"}
    for key, value in found.items():
        assert_close(value, stored[key], tolerance, key)
        largest = (value - stored[key]).abs().max() / stored[key].abs().max()
        assert largest <= tolerance, f"{key}: largest error {largest:.1e}"


@pytest.mark.parametrize("fault", ["scale", "norm", "order", "pool"])
def test_golden_sees_a_planted_fault(golden: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stored = from_golden(golden)
    if fault == "scale":  # tokens counted after pooling
        monkeypatch.setattr(DynamicLinear, "scale", lambda self, num_tokens: 4 * self.in_features**-0.5 / num_tokens)
    elif fault == "norm":  # the norm no longer replaces the stream

        def forward(self: Block, x: torch.Tensor, **_: bool) -> torch.Tensor:
            x = x + self.conv(self.norm1(x))
            return x + self.fc2(self.act(self.fc1(self.norm2(x))))

        monkeypatch.setattr(Block, "forward", forward)
    elif fault == "order":  # rows and columns of the regions exchanged
        monkeypatch.setattr(ops, "region_mean", lambda x, size, f=ops.region_mean: f(x, size).transpose(1, 2))
    else:
        monkeypatch.setattr(ops, "pool_2x2", lambda x: x[:, ::2, ::2])
    with torch.no_grad():
        error = (model(stored["input"]) - stored["logits"]).abs().max() / stored["logits"].abs().max()
    assert error > 1e-4


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("weightformer_tiny", 7_074_184), ("weightformer_small", 27_492_136), ("weightformer_base", 27_492_136)],
)
def test_parameter_count(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in timm.create_model(name, device="meta").parameters()) == parameters


def test_which_blocks_are_dynamic() -> None:
    def dynamic(**kwargs: int) -> list[int]:
        model = WeightFormer(embed_dim=8, device="meta", **kwargs)
        return [i for i, block in enumerate(model.blocks) if block.dynamic]

    assert dynamic() == [1, 4, 7, 10, 13, 16]
    assert dynamic(dynamic_every=0) == []
    assert dynamic(depth=4, dynamic_every=1) == [0, 1, 2, 3]
    assert dynamic(depth=6, dynamic_every=2) == [1, 3, 5]
    assert dynamic(depth=9, dynamic_every=4) == [1, 5]
    assert dynamic(depth=13, dynamic_every=6) == [1, 7]


# The registry


def test_registry() -> None:
    assert timm.list_models("weightformer_*") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_configuration(name: str) -> None:
    model = timm.create_model(name, device="meta")
    side = {"weightformer_micro": 32, "weightformer_base": 448}.get(name, 224)
    config = resolve_data_config(model=model)
    assert config["input_size"] == (3, side, side)
    assert config["mean"] == (0.485, 0.456, 0.406)
    assert config["std"] == (0.229, 0.224, 0.225)
    assert (config["interpolation"], config["crop_pct"], config["crop_mode"]) == ("bicubic", 0.875, "squash")
    assert resolve_data_config({"img_size": 96}, model=model)["input_size"] == (3, 96, 96)

    cfg = model.pretrained_cfg
    assert cfg["fixed_input_size"] is False
    for key in ("first_conv", "classifier"):
        assert f"{cfg[key]}.weight" in model.state_dict()
    assert cfg["num_classes"] == model.num_classes == model.get_classifier().out_features
    assert model.num_features == model.head_hidden_size == model.feature_info[-1]["num_chs"]


@pytest.mark.parametrize("name", NAMES)
def test_meta(name: str) -> None:
    model = timm.create_model(name, device="meta")
    assert all(p.is_meta for p in model.parameters())
    side = model.pretrained_cfg["input_size"][-1]
    tokens = side // model.patch_embed.patch_size
    x = torch.empty(2, 3, side, side, device="meta")
    assert model(x).shape == (2, model.num_classes)
    assert model.forward_features(x).shape == (2, tokens, tokens, model.num_features)
    features = timm.create_model(name, device="meta", features_only=True)(x)
    assert [f.shape for f in features] == [(2, model.num_features, tokens, tokens)] * 3


def test_pretrained_without_network_names_load_weights(tmp_path: Path) -> None:
    code = """
import timm, weightformer
for name in ("weightformer_tiny", "weightformer_micro"):
    try:
        timm.create_model(name, pretrained=True)
    except RuntimeError as error:
        print(error)
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    messages = run.stdout.strip().split("could not load pretrained weights for ")
    assert len(messages) == 3, run.stdout + run.stderr
    for name, message in zip(("weightformer_tiny", "weightformer_micro"), messages[1:], strict=True):
        assert message.startswith(name)
        assert "weightformer.models.checkpoint.load_weights(model, path)" in message


def test_wrong_arguments_are_not_reported_as_a_failed_download() -> None:
    for pretrained in (False, True):
        with pytest.raises(ValueError, match="dynamic_every must be 0"):
            timm.create_model("weightformer_micro", pretrained=pretrained, dynamic_every=-1)
        with pytest.raises(TypeError, match="dropath"):
            timm.create_model("weightformer_micro", pretrained=pretrained, dropath=0.1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"dynamic_every": -1}, "dynamic_every must be 0"),
        ({"global_pool": "max"}, "global_pool must be 'avg' or '', got 'max'"),
        ({"embed_dim": 66}, "multiples of 4, got 66"),
        ({"linear_predictor": "x"}, "unknown linear_predictor 'x'"),
        ({"conv_predictor": "x"}, "unknown conv_predictor 'x'"),
        ({"pool": 3}, "unknown pool 3"),
    ],
)
def test_arguments_out_of_range(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightFormer(**kwargs)


# Every argument does something


def test_arguments_that_change_the_structure() -> None:
    plain = {k: v.shape for k, v in timm.create_model("weightformer_micro", device="meta").state_dict().items()}
    for argument in ("patch_size", "embed_dim", "depth", "in_chans", "num_classes"):
        other = timm.create_model("weightformer_micro", device="meta", **{argument: 12})
        assert {k: v.shape for k, v in other.state_dict().items()} != plain, argument
    for argument, value in (("mlp_ratio", 2.0), ("dynamic_every", 0)):
        other = timm.create_model("weightformer_micro", device="meta", **{argument: value})
        assert {k: v.shape for k, v in other.state_dict().items()} != plain, argument


def test_arguments_that_change_the_output(images: Images) -> None:
    x = images(4, 3, 16, 16)

    def logits(**kwargs: object) -> Tensor:
        torch.manual_seed(0)
        model = timm.create_model("weightformer_micro", **kwargs).train()
        torch.manual_seed(1)
        return model(x)

    plain = logits()
    assert torch.equal(plain, logits())
    assert not torch.allclose(plain, logits(drop_rate=0.5))
    assert not torch.allclose(plain, logits(drop_path_rate=0.5))
    assert logits(global_pool="").shape == (4, 4, 4, 10)
    torch.testing.assert_close(logits(global_pool="").mean((1, 2)), plain)


def test_drop_path_rises_linearly() -> None:
    model = timm.create_model("weightformer_tiny", drop_path_rate=0.2, device="meta")
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.2 * i / 16 for i in range(17)])


# Features


@pytest.mark.parametrize("indices", [(0, 3, 7), (3,), (-1,), (-8, -1), [2, 5], 1, 3, 8], ids=str)
@pytest.mark.parametrize("feature_cls", ["getter", "fx", "hook"])
def test_features_only(indices: int | list[int], feature_cls: str, images: Images) -> None:
    x = images(2, 3, 24, 20)
    model = timm.create_model("weightformer_micro").eval()
    blocks = list(range(8 - indices, 8)) if isinstance(indices, int) else [i % 8 for i in indices]

    torch.manual_seed(0)  # the same weights again
    kwargs = {} if feature_cls == "getter" else {"feature_cls": feature_cls}
    features = timm.create_model("weightformer_micro", features_only=True, out_indices=indices, **kwargs).eval()
    assert features.feature_info.channels() == [64] * len(blocks)
    assert features.feature_info.reduction() == [4] * len(blocks)
    assert features.feature_info.module_name() == [f"blocks.{i}" for i in blocks]
    found = features(x)
    if feature_cls != "getter":  # timm leaves these two in the model's own layout
        found = [f.permute(0, 3, 1, 2) for f in found]
    _, expected = model.forward_intermediates(x, indices=blocks)
    assert [f.shape for f in found] == [(2, 64, 6, 5)] * len(blocks)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("keeper", ["hook", "pre-hook", "global hook", "fx"])
def test_blocks_do_not_overwrite_tokens_that_are_kept(
    keeper: str, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightformer.layers.block._STRIP_TOKENS", 1)
    monkeypatch.setattr("weightformer.layers.block._STRIP_ROWS", 2)
    model, x, kept = timm.create_model("weightformer_micro").eval(), images(2, 3, 24, 20), []

    def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor | None = None) -> None:
        if isinstance(module, Block):
            kept.append(inputs[0] if output is None else output)

    for block in model.blocks:
        if keeper == "hook":
            block.register_forward_hook(keep)
        elif keeper == "pre-hook":
            block.register_forward_pre_hook(keep)
    with torch.no_grad():
        tokens, expected = model.forward_intermediates(x, output_fmt="NHWC")
        assert len(model.blocks[0]._strips(expected[0])) == 3
        expected, kept[:] = [block.clone() for block in expected], []
        if keeper == "fx":
            nodes = [f"blocks.{i}" for i in range(8)]
            kept = list(create_feature_extractor(model, nodes)(x).values())
        else:
            with contextlib.ExitStack() as stack:
                if keeper == "global hook":
                    stack.callback(nn.modules.module.register_module_forward_hook(keep).remove)
                torch.testing.assert_close(model(x), model.forward_head(tokens))
    if keeper == "pre-hook":  # what enters the first block is not among them
        kept, expected = kept[1:], expected[:-1]
    for actual, wanted in zip(kept, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_large_images_need_no_memory_beside_their_tokens(images: Images) -> None:
    model = timm.create_model("weightformer_micro").eval()
    needed = []
    for size in (512, 1024):
        x = images(1, 3, size, size)
        with torch.inference_mode():
            needed.append(tensor_bytes(lambda x=x: model(x)))
    tokens = 4 * 64 * (1024**2 - 512**2) // 16
    assert needed[1] - needed[0] < 2.1 * tokens  # the patches, twice: in the convolution's layout and in ours


def test_features_of_a_pruned_backbone_all_train(images: Images) -> None:
    model = timm.create_model("weightformer_micro", features_only=True, out_indices=(1, 4))
    sum(f.sum() for f in model(images(2, 3, 16, 16))).backward()
    assert len(model.model.blocks) == 5
    assert all(grad is not None for grad in gradients(model).values())  # so DDP needs no find_unused_parameters


@pytest.mark.parametrize("indices", [9, 0, (8,), (-9,), ()], ids=str)
def test_feature_indices_out_of_range(indices: int | tuple[int, ...], images: Images) -> None:
    model = timm.create_model("weightformer_micro")
    for call in (
        lambda: model.forward_intermediates(images(1, 3, 8, 8), indices),
        lambda: model.prune_intermediate_layers(indices),
    ):
        with pytest.raises(ValueError, match=r"feature indices .* are out of range for 8 blocks"):
            call()
    assert len(model.blocks) == 8


def test_forward_intermediates(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(), images(2, 3, 24, 20)
    streams = [model.embed_norm(model.patch_embed(x))]
    for block in model.blocks:
        streams.append(block(streams[-1]))
    tokens, maps = model.forward_intermediates(x)
    assert torch.equal(tokens, model.forward_features(x))
    assert torch.equal(torch.stack(maps), torch.stack(streams[1:]).permute(0, 1, 4, 2, 3))

    assert torch.equal(model.forward_intermediates(x, 2, intermediates_only=True)[0], maps[6])
    for indices in ([1, -1], (-1, 1)):  # whatever their order, maps come in the order of the blocks
        assert torch.equal(torch.stack(model.forward_intermediates(x, indices)[1]), torch.stack([maps[1], maps[7]]))
    nhwc = model.forward_intermediates(x, [2], output_fmt="NHWC", intermediates_only=True)
    assert torch.equal(nhwc[0], streams[3])
    normed = model.forward_intermediates(x, [2], norm=True, intermediates_only=True, output_fmt="NHWC")
    assert torch.equal(normed[0], model.norm(streams[3]))
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NHWC', got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")


def test_stop_early_runs_no_later_block(images: Images) -> None:
    model, x = timm.create_model("weightformer_micro"), images(2, 3, 8, 8)
    ran = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    _, full = model.forward_intermediates(x, [0, 2])
    assert ran == list(range(8))
    ran.clear()
    tokens, early = model.forward_intermediates(x, [0, 2], stop_early=True)
    assert ran == [0, 1, 2]
    assert all(map(torch.equal, early, full))
    assert torch.equal(tokens.permute(0, 3, 1, 2), early[-1])


def test_prune(images: Images) -> None:
    model, x = timm.create_model("weightformer_micro").eval(), images(2, 3, 8, 8)
    _, before = model.forward_intermediates(x, [-7, 3])
    assert model.prune_intermediate_layers([-7, 3], prune_norm=True) == [1, 3]
    assert len(model.blocks) == 4
    assert isinstance(model.norm, nn.Identity)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert all(map(torch.equal, model.forward_intermediates(x, [1, 3])[1], before))
    assert model(x).shape == (2, 2, 2, 64)

    kept = timm.create_model("weightformer_micro")
    kept.prune_intermediate_layers(8, prune_head=False)
    assert kept(x).shape == (2, 10)


# Head


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reset_classifier(dtype: torch.dtype, images: Images) -> None:
    model, x = timm.create_model("weightformer_micro").to(dtype).eval(), images(2, 3, 8, 8, dtype=dtype)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert pooled.shape == (2, 64)
    model.reset_classifier(0)
    assert (model.num_classes, type(model.get_classifier())) == (0, nn.Identity)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(5)
    assert torch.equal(model(x), model.get_classifier()(pooled))
    assert model.get_classifier().weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not model.get_classifier().bias.any()
    model.reset_classifier(5, "")
    assert model(x).shape == (2, 2, 2, 5)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), model.forward_features(x))
    with pytest.raises(ValueError, match="global_pool must be 'avg' or '', got 'token'"):
        model.reset_classifier(5, "token")
    assert timm.create_model("weightformer_micro", num_classes=0)(x.float()).shape == (2, 64)


# Optimisers


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_every_parameter_is_optimised_once(layer_decay: float | None) -> None:
    model = timm.create_model("weightformer_micro", depth=5)
    optimiser = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=layer_decay)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [(names.pop(id(p)), p, group) for group in optimiser.param_groups for p in group["params"]]
    assert not names, "parameters without a group"
    for name, parameter, group in groups:
        assert group["weight_decay"] == (0 if parameter.ndim == 1 else 0.05), name
    if layer_decay:
        scales = {name: group["lr_scale"] for name, _, group in groups}
        depth = {"head.weight": 6, "norm.weight": 5, "embed_norm.bias": 0, "patch_embed.proj.weight": 0}
        depth |= {f"blocks.{i}.fc2.weight": i + 1 for i in range(5)} | {
            "blocks.1.fc1.w1": 2,
            "blocks.1.conv.proj2.weight": 2,
        }
        assert {name: scales[name] for name in depth} == {name: 0.5 ** (6 - d) for name, d in depth.items()}


def test_no_weight_decay_names_exist() -> None:
    model = timm.create_model("weightformer_micro", device="meta")
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()


@pytest.mark.parametrize("size", [(3, 3, 8, 8), (2, 3, 4, 4), (2, 3, 5, 13)], ids=str)
def test_every_parameter_gets_a_gradient(size: tuple[int, ...], lively_micro: Build, images: Images) -> None:
    model = lively_micro().train()
    logits = model(images(*size))
    (logits * torch.randn_like(logits)).sum().backward()
    for name, grad in gradients(model).items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
        # A grid of one token has no pair to pool, so nothing reaches the linear predictors.
        unused = size[2:] == (4, 4) and any(part in name for part in ("fc1.proj", "fc1.w1", "fc1.w2"))
        assert grad.any() != unused, name


# Sizes


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("in_chans", [1, 2, 3, 4, 13])
def test_batches_and_channels(in_chans: int, batch: int, train: bool, images: Images) -> None:
    model = timm.create_model("weightformer_micro", depth=3, in_chans=in_chans, drop_path_rate=0.1).train(train)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.zero_grad()
        logits = model(images(batch, in_chans, 12, 20).contiguous(memory_format=memory_format))
        assert logits.shape == (batch, 10)
        logits.sum().backward()
        for name, grad in gradients(model).items():
            assert grad is not None, name
            assert grad.isfinite().all(), name
            assert batch or not grad.any(), name


@pytest.mark.parametrize("size", [(230, 221), (97, 131), (225, 225), (16, 17)], ids=str)
def test_no_pixel_is_dropped(size: tuple[int, int], images: Images) -> None:
    model = timm.create_model("weightformer_micro", patch_size=16, depth=2).eval()
    x = images(1, 3, *size)
    logits = model(x)
    tokens = model.forward_features(x)
    assert tokens.shape[1:3] == (-(-size[0] // 16), -(-size[1] // 16))
    bottom, right = x.clone(), x.clone()
    bottom[:, :, -1] += 1
    right[:, :, :, -1] += 1
    for changed in (bottom, right):
        assert (model(changed) - logits).abs().max() > 1e-5
    padded = nn.functional.pad(x, (0, -size[1] % 16, 0, -size[0] % 16))
    assert torch.equal(model(padded), logits)


@pytest.mark.parametrize("size", [(15, 224), (224, 15), (0, 0), (1, 1)], ids=str)
def test_smaller_than_a_patch(size: tuple[int, int]) -> None:
    model = timm.create_model("weightformer_tiny", device="meta")
    with pytest.raises(ValueError, match=rf"an image of {size[0]} x {size[1]} px is smaller than one patch of 16 x 16"):
        model(torch.empty(1, 3, *size, device="meta"))


def test_one_model_takes_every_size(lively_micro: Build, images: Images) -> None:
    model = lively_micro()
    for size in ((4, 4), (4, 64), (64, 4), (12, 8), (24, 24), (56, 40), (96, 96)):
        assert model(images(1, 3, *size)).isfinite().all()


# Symmetries


def test_what_an_image_gives_does_not_depend_on_its_batch(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(), images(3, 3, 28, 20)
    logits = model(x)
    changed = x.clone()
    changed[1] = -changed[1] * 5
    other = model(changed)
    assert torch.equal(other[[0, 2]], logits[[0, 2]])
    assert not torch.allclose(other[1], logits[1])
    torch.testing.assert_close(torch.cat([model(image[None]) for image in x]), logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x[[2, 0, 1]]), logits[[2, 0, 1]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(28, 20), (20, 28), (16, 16)], ids=str)
def test_transposing_image_and_kernels_changes_nothing(
    size: tuple[int, int], lively_micro: Build, images: Images
) -> None:
    model, x = lively_micro().double(), images(2, 3, *size).double()
    logits = model(x)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, DynamicDepthwiseConv2d)):
                module.weight.copy_(module.weight.mT.clone())
    torch.testing.assert_close(model(x.mT), logits)


def test_layout_of_the_image_does_not_matter(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(), images(2, 3, 24, 20)
    logits = model(x)
    strided = torch.stack([x, x], -1).flatten(3)[..., ::2]
    for same in (x.contiguous(memory_format=torch.channels_last), strided, x.mT.contiguous().mT):
        assert not same.is_contiguous()
        torch.testing.assert_close(model(same), logits, rtol=1e-5, atol=1e-6)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), logits, rtol=1e-5, atol=1e-6)


def test_implementations_agree_in_value_and_gradient(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro().double(), images(2, 3, 28, 20).double()
    cotangent = torch.randn(2, 10, dtype=torch.float64)
    found = {}
    for name in IMPLEMENTATIONS:
        model.zero_grad()
        with ops.implementation(name):
            logits = model(x)
            logits.backward(cotangent)
        found[name] = {"logits": logits.detach(), **{k: g.clone() for k, g in gradients(model).items()}}
    for name in IMPLEMENTATIONS[1:]:
        for key, value in found[name].items():
            assert_close(value, found["auto"][key], 1e-10, f"{name} {key}")


# Strategies and ablations

STRATEGIES = [
    *({"linear_predictor": name} for name in LINEAR_PREDICTORS if name != "bilateral"),
    *({"conv_predictor": name} for name in CONV_PREDICTORS if name != "adaptive"),
    {"static_weight": False},
    {"normalize": False},
    {"pool": 1},
    {"pool": "7x7"},
]
each_strategy = pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda strategy: "-".join(map(str, *strategy.items()))
)


def shrunk_sides(strategy: dict[str, object]) -> float:
    """Predicted linear weights of `lively_micro` that are neither normalised nor small would drown the rest."""
    return 0.3 if strategy.get("normalize") is False else 1.0


def lively_strategy(lively_micro: Build, strategy: dict[str, object], **kwargs: object) -> WeightFormer:
    torch.manual_seed(0)
    model = lively_micro(**({"depth": 3} | strategy | kwargs))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, DynamicLinear):
                module.w2.mul_(shrunk_sides(strategy))
    return model


def test_every_strategy_is_another_function(lively_micro: Build, images: Images) -> None:
    x = images(2, 3, 36, 28)
    seen = [lively_strategy(lively_micro, strategy)(x) for strategy in ({}, *STRATEGIES)]
    for i, logits in enumerate(seen):
        assert logits.isfinite().all()
        assert not any(torch.allclose(logits, other, rtol=1e-3, atol=1e-4) for other in seen[:i]), STRATEGIES[i - 1]


@each_strategy
def test_strategies_train_on_any_size(strategy: dict[str, object], lively_micro: Build, images: Images) -> None:
    model = lively_strategy(lively_micro, strategy).train()
    for size in ((3, 28, 20), (2, 5, 13), (1, 9, 44)):
        model.zero_grad()
        logits = model(images(size[0], 3, *size[1:]))
        (logits * torch.randn_like(logits)).sum().backward()
        assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in gradients(model).values())
    empty = model(images(0, 3, 28, 20))
    assert empty.shape == (0, 10)
    empty.sum().backward()


@each_strategy
def test_strategies_keep_images_apart(strategy: dict[str, object], lively_micro: Build, images: Images) -> None:
    model, x = lively_strategy(lively_micro, strategy), images(3, 3, 28, 20)
    changed = x.clone()
    changed[1] = -changed[1] * 5
    assert torch.equal(model(changed)[[0, 2]], model(x)[[0, 2]])
    torch.testing.assert_close(torch.cat([model(image[None]) for image in x]), model(x), rtol=1e-4, atol=1e-5)


@each_strategy
def test_strategies_see_the_whole_image(strategy: dict[str, object], lively_micro: Build, images: Images) -> None:
    """One far corner reaches the other: what a static model of three blocks cannot do."""
    x = images(1, 3, 80, 80)
    changed = x.clone()
    changed[..., :4, :4] *= -3

    def moved(model: WeightFormer) -> float:
        with torch.no_grad():
            return (model.forward_features(changed) - model.forward_features(x))[:, -1, -1].abs().max().item()

    assert moved(lively_strategy(lively_micro, strategy)) > 1e-5
    assert moved(lively_micro(depth=3, dynamic_every=0)) == 0


@each_strategy
def test_strategies_agree_across_implementations(
    strategy: dict[str, object], lively_micro: Build, images: Images
) -> None:
    model, x = lively_strategy(lively_micro, strategy).double(), images(2, 3, 28, 20).double()
    with torch.no_grad():
        fast = model(x)
        with ops.implementation("reference"):
            assert_close(fast, model(x), 1e-10)


@each_strategy
def test_features_of_strategies(strategy: dict[str, object], images: Images) -> None:
    model = timm.create_model("weightformer_micro", features_only=True, out_indices=(0, 2), depth=3, **strategy)
    assert [tuple(f.shape) for f in model(images(2, 3, 24, 20))] == [(2, 64, 6, 5)] * 2


# Between them all strategies and switches: capture takes seconds a model.
COMBINED = [
    {"linear_predictor": "gap", "conv_predictor": "gap", "static_weight": False},
    {"linear_predictor": "linear", "conv_predictor": "amp_dir", "pool": "7x7"},
    {"linear_predictor": "nonlinear", "conv_predictor": "conv"},
    {"linear_predictor": "deep", "pool": 1, "normalize": False},
]
each_combination = pytest.mark.parametrize("strategy", COMBINED, ids=lambda s: "-".join(map(str, s.values())))


@each_combination
def test_strategies_compile_as_one_graph(strategy: dict[str, object], lively_micro: Build, images: Images) -> None:
    torch._dynamo.reset()
    model, x = lively_strategy(lively_micro, strategy, depth=2).double().train(), images(2, 3, 24, 20).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model(x).square().sum().backward()
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    compiled(x).square().sum().backward()
    for name, grad in gradients(model).items():
        assert_close(grad, expected[name], 1e-9, name)


@each_combination
@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
def test_strategies_export_with_free_sizes_and_trace(
    strategy: dict[str, object], lively_micro: Build, images: Images
) -> None:
    model, auto = lively_strategy(lively_micro, strategy, depth=2).double(), torch.export.Dim.AUTO
    example = images(2, 3, 32, 40).double()
    exported = torch.export.export(model, (example,), dynamic_shapes=({0: auto, 2: auto, 3: auto},)).module()
    traced = torch.jit.trace(model, example)
    with torch.no_grad():
        for size in ((2, 32, 40), (1, 32, 32), (5, 64, 48), (2, 30, 21)):
            x = images(size[0], 3, *size[1:]).double()
            assert_close(exported(x), model(x), 1e-10)
        assert_close(traced(-example), model(-example), 1e-7)  # a traced scale is a float32 tensor


@each_combination
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_strategies_stay_finite_in_half_precision(
    dtype: torch.dtype, strategy: dict[str, object], lively_micro: Build, images: Images
) -> None:
    model = lively_strategy(lively_micro, strategy, patch_size=16, depth=2).train()
    with torch.autocast("cpu", dtype=dtype):
        logits = model(images(1, 3, 256, 256) * 50)
    logits.float().square().sum().backward()
    assert logits.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if "static_weight" not in s], ids=str)
def test_weights_of_strategies_do_not_grow_with_the_image(
    strategy: dict[str, object], lively_micro: Build, images: Images
) -> None:
    model = lively_strategy(lively_micro, strategy, patch_size=16, depth=2)
    small, large = (predicted_parts(model, images(1, 3, side, side)) for side in (224, 1024))
    for name in small:
        assert 0.3 < large[name][0] / small[name][0] < 3, name


def test_strategies_start_with_small_predicted_parts(images: Images) -> None:
    """What `init_weights` says of them."""
    for strategy in STRATEGIES[:-4]:
        model = timm.create_model("weightformer_micro", depth=5, **strategy).eval()
        for layer, (ratio, weight) in predicted_parts(model, images(2, 3, 64, 64)).items():
            if layer.endswith("fc1"):
                assert 0 < ratio < 0.1, (strategy, layer, ratio)
            else:
                assert weight.flatten(2).norm(dim=2).mean() < 0.5, (strategy, layer)


# Memory, copies, devices


def test_gradient_checkpointing(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(drop_path_rate=0.1, drop_rate=0.1).train(), images(8, 3, 16, 16)

    def step(enable: bool) -> tuple[Tensor, dict[str, Tensor], int]:
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(x).square().sum()  # x needs no gradient
        saved = kept
        loss.backward()
        return loss.detach(), gradients(model), saved

    loss, grads, saved = step(enable=False)
    grads = {name: grad.clone() for name, grad in grads.items()}
    loss_again, grads_again, saved_again = step(enable=True)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)
    assert saved_again < saved / 3
    with torch.no_grad():
        assert model(x).shape == (8, 10)


def test_copies_and_pickles_are_equal(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(), images(2, 3, 16, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        assert torch.equal(other(x), model(x))
        assert other is not model


def test_float64(lively_micro: Build, images: Images) -> None:
    built = timm.create_model("weightformer_micro", dtype=torch.float64)
    assert {p.dtype for p in built.parameters()} == {torch.float64}
    model, x = lively_micro(), images(2, 3, 16, 16)
    single = model(x)
    double = model.double()(x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


def test_the_eager_model_never_pools_adaptively(images: Images) -> None:
    """`adaptive_avg_pool2d` is missing on MPS for 14 -> 3, and its backward is nondeterministic on a GPU."""
    called = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.add(str(func))
            return func(*args, **(kwargs or {}))

    model, x = timm.create_model("weightformer_micro", depth=2), images(2, 3, 56, 56)
    with Record():
        model(x).sum().backward()
    assert any("bmm" in name for name in called)
    assert not {name for name in called if "adaptive" in name or "float64" in name}
    with Record(), ops.implementation("reference"):
        model(x)
    assert any("adaptive" in name for name in called)  # the recorder does see it where it runs


def test_training_steps_are_deterministic(images: Images) -> None:
    x = images(4, 3, 28, 28)

    def losses() -> list[float]:
        torch.manual_seed(0)
        model = timm.create_model("weightformer_micro", depth=3, drop_path_rate=0.1)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), torch.arange(4))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    torch.use_deterministic_algorithms(True)
    try:
        assert losses() == losses()
    finally:
        torch.use_deterministic_algorithms(False)


# Initialisation


def test_initialisation() -> None:
    model = timm.create_model("weightformer_tiny", depth=2)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert not module.bias.any(), name
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert not module.bias.any(), name
        elif isinstance(module, nn.Conv2d):  # PyTorch's default: uniform within 1 / sqrt(fan in), the bias too
            bound = (module.weight[0].numel()) ** -0.5
            assert module.weight.abs().max().item() == pytest.approx(bound, rel=0.02), name
        elif isinstance(module, (DynamicLinear, DynamicDepthwiseConv2d)):
            for parameter in (module.weight, module.bias):
                assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name


def test_initialisation_reaches_every_parameter() -> None:
    model = timm.create_model("weightformer_micro", device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())


def predicted_parts(model: nn.Module, x: Tensor) -> dict[str, tuple[float, Tensor]]:
    """For each dynamic layer: the norm of the predicted part over that of the static one, and the whole weight."""
    found = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
            weight, static = module.predict(inputs[0]), module.weight.reshape(1, *module.predict(inputs[0]).shape[1:])
            found[name] = ((weight - static).norm().item() / (static.norm().item() * len(weight) ** 0.5), weight)

        return hook

    handles = [
        module.register_forward_hook(record(name))
        for name, module in model.named_modules()
        if isinstance(module, (DynamicLinear, DynamicDepthwiseConv2d))
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def test_generated_weights_at_step_0(images: Images) -> None:
    """What `init_weights` says: linear weights start as their static part, kernels as mostly predicted."""
    for name in ("weightformer_micro", "weightformer_tiny"):
        model = timm.create_model(name).eval()
        for layer, (ratio, _) in predicted_parts(model, images(2, 3, 224, 224)).items():
            assert (ratio < 1e-3) if layer.endswith("fc1") else (1 < ratio < 6), (name, layer, ratio)


def test_lively_models_predict_weights_as_large_as_static_ones(lively_micro: Build, images: Images) -> None:
    assert all(0.3 < ratio < 6 for ratio, _ in predicted_parts(lively_micro(), images(2, 3, 32, 32)).values())


# Precision


@pytest.mark.parametrize("gain", [1.0, 10.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_stays_finite(dtype: torch.dtype, gain: float, lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(patch_size=16, depth=5).train(), images(1, 3, 224, 224) * gain
    with torch.autocast("cpu", dtype=dtype):
        logits = model(x)
    assert logits.dtype == dtype
    logits.float().square().sum().backward()
    assert logits.isfinite().all()
    assert all(grad.isfinite().all() and grad.dtype == torch.float32 for grad in gradients(model).values())
    reference = model(x)
    assert (logits - reference).abs().max() < 0.1 * reference.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_tokens_stay_finite_in_half_precision(dtype: torch.dtype, lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(patch_size=16, depth=2).train(), images(1, 3, 1024, 1024) * 50
    with torch.autocast("cpu", dtype=dtype):
        logits = model(x)
    logits.float().square().sum().backward()
    assert logits.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_predicted_weights_do_not_grow_with_the_image(lively_micro: Build, images: Images) -> None:
    model = lively_micro(patch_size=16)
    small, large = (predicted_parts(model, images(1, 3, side, side)) for side in (224, 1024))
    for name in small:
        assert 0.5 < large[name][0] / small[name][0] < 2, name
        assert 0.5 < large[name][1].abs().max() / small[name][1].abs().max() < 2, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_in_half_precision(dtype: torch.dtype, lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(depth=5), images(2, 3, 24, 20)
    expected = model(x)
    logits = model.to(dtype)(x.to(dtype))
    assert logits.dtype == dtype
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


# Capture: compile, export, trace


def test_compile_makes_few_graphs(lively_micro: Build, images: Images) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = lively_micro(patch_size=16, depth=2), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for batch in (1, 2, 4):
            for size in ((224, 224), (256, 256), (320, 224), (384, 384)):
                x = images(batch, 3, *size)
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        graphs = counter.frame_count
        compiled(x)
    assert counter.frame_count == graphs <= 4


def test_a_compiled_graph_holds_the_fast_mlp_at_inference_alone(lively_micro: Build, images: Images) -> None:
    model, x, calls = lively_micro(depth=2), images(2, 3, 24, 20), []

    def record(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        calls.append(sum("mlp_row_blocks" in str(node.target) for node in graph.graph.nodes))
        return graph

    for learns in (False, True):
        torch._dynamo.reset()
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(torch.compile(model, backend=record, fullgraph=True)(x), model(x))
    assert calls == [2, 0]


def test_the_default_compiler_takes_free_sizes(lively_micro: Build, images: Images) -> None:
    torch._dynamo.reset()
    model = lively_micro(depth=1, dynamic_every=1, embed_dim=8)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for size in ((2, 3, 20, 20), (3, 3, 32, 27)):  # the second makes a graph of free sizes
            x = images(*size)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_compile_trains_as_one_graph(lively_micro: Build, images: Images) -> None:
    torch._dynamo.reset()
    model, x = lively_micro(depth=2).train(), images(2, 3, 24, 20)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model(x).square().sum().backward()
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        compiled(x).square().sum().backward()
        for name, grad in gradients(model).items():
            assert_close(grad, expected[name], 1e-4, name)


@pytest.mark.parametrize("name", ["reference", "eager"])
def test_each_implementation_compiles(name: str, lively_micro: Build, images: Images) -> None:
    torch._dynamo.reset()
    model, x = lively_micro(depth=2), images(2, 3, 24, 20)
    with torch.no_grad(), ops.implementation(name):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_export_with_free_batch_and_sizes(lively_micro: Build, images: Images) -> None:
    model, auto = lively_micro(depth=3), torch.export.Dim.AUTO
    program = torch.export.export(model, (images(2, 3, 32, 40),), dynamic_shapes=({0: auto, 2: auto, 3: auto},))
    exported = program.module()
    with torch.no_grad():
        for size in ((2, 32, 40), (1, 32, 32), (7, 64, 48), (5, 30, 21), (1, 128, 160), (2, 16, 100)):
            x = images(size[0], 3, *size[1:])
            torch.testing.assert_close(exported(x), model(x), rtol=0, atol=1e-4)


def test_export_features(images: Images) -> None:
    model = timm.create_model("weightformer_micro", depth=3, features_only=True, out_indices=(0, 2)).eval()
    x = images(2, 3, 32, 40)
    for actual, expected in zip(torch.export.export(model, (x,)).module()(x), model(x), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
def test_trace_at_one_size(lively_micro: Build, images: Images) -> None:
    model, x = lively_micro(depth=3), images(2, 3, 32, 40)
    traced = torch.jit.trace(model, x)
    other = images(2, 3, 32, 40) * 2 - 1
    torch.testing.assert_close(traced(other), model(other))


# Names others rely on

OUTSIDE = ["patch_embed.proj.weight", "patch_embed.proj.bias", "embed_norm.weight", "embed_norm.bias",
           "norm.weight", "norm.bias", "head.weight", "head.bias"]  # fmt: skip
STATIC = ["conv.weight", "conv.bias", "fc1.weight", "fc1.bias", "norm2.weight", "norm2.bias", "fc2.weight", "fc2.bias"]
DYNAMIC = [*STATIC, "norm1.weight", "norm1.bias", "conv.proj1.weight", "conv.proj1.bias", "conv.proj2.weight",
           "fc1.proj.weight", "fc1.proj.bias", "fc1.w1", "fc1.w2"]  # fmt: skip


def test_state_dict_keys() -> None:
    expected = set(OUTSIDE)
    for i in range(8):
        expected |= {f"blocks.{i}.{name}" for name in (DYNAMIC if i in (1, 4, 7) else STATIC)}
    state = timm.create_model("weightformer_micro", device="meta").state_dict()
    assert state.keys() == expected
    shapes = {
        name.removeprefix("blocks.1."): tuple(v.shape) for name, v in state.items() if name.startswith("blocks.1.")
    }
    assert shapes["fc1.weight"] == (64, 256)  # (in, out): the released layout of a dynamic layer
    assert shapes["fc1.proj.weight"] == (16 + 64, 64)
    assert (shapes["fc1.w1"], shapes["fc1.w2"]) == ((16, 64), (64, 256))
    assert shapes["conv.weight"] == (64, 1, 3, 3)
    assert tuple(state["blocks.0.fc1.weight"].shape) == (256, 64)
