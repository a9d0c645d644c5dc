from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import weightformer
from parity import assert_close, relative_error
from weightformer import ops
from weightformer.layers import (
    CONV_PREDICTORS,
    LINEAR_PREDICTORS,
    DepthwiseConv2d,
    DynamicDepthwiseConv2d,
    DynamicLinear,
)
from weightformer.models import WeightFormerDenoiser, create_denoiser
from weightformer.models.checkpoint import load_weights, save_weights
from weightformer.models.denoiser import DENOISERS, DenoiserBlock, sincos_positions

Golden = dict[str, Tensor]


def inputs(batch: int = 2, height: int = 8, width: int = 8, channels: int = 4, **kwargs: Any) -> tuple[Tensor, ...]:
    """Latents, time steps and classes of a micro model, the same for the same size."""
    generator = torch.Generator().manual_seed(batch + height + 3 * width)
    latents = torch.randn(batch, channels, height, width, generator=generator, **kwargs)
    return latents, torch.arange(batch) * 97 + 3, torch.arange(batch) % 10


def lively(**kwargs: Any) -> WeightFormerDenoiser:
    """A micro model without the zeros of its initialisation, and with predicted weights as large as the static ones."""
    model = create_denoiser("denoiser_micro", **kwargs).eval()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if isinstance(module, DynamicLinear):
            for name, std in (("proj.weight", 0.125), ("w1", 1.0), ("w2", 1.0)):
                if (parameter := dict(module.named_parameters()).get(name)) is not None:
                    nn.init.normal_(parameter, std=std)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-4)], ids=["64", "32"])
@pytest.mark.parametrize("implementation", ["reference", "eager", "auto"])
def test_equals_the_released_model(
    denoiser: nn.Module, golden_denoiser: Golden, dtype: torch.dtype, tolerance: float, implementation: str
) -> None:
    golden = golden_denoiser
    with torch.no_grad(), ops.implementation(implementation):
        out = denoiser.to(dtype)(golden["input"].to(dtype), golden["timestep"], golden["class_labels"]).sample
    assert out.dtype == dtype
    assert_close(out, golden["output"], tolerance)
    assert (out - golden["output"]).abs().max() <= tolerance * golden["output"].abs().max()


@pytest.mark.parametrize("name", DENOISERS)
def test_named_sizes(name: str) -> None:
    with torch.device("meta"):
        model = create_denoiser(name)
    count = sum(p.numel() for p in model.parameters())
    if name.startswith("denoiser_s"):
        assert 37.55e6 < count < 37.85e6
    elif name.startswith("denoiser_b"):
        assert 149e6 < count < 150e6
    if name != "denoiser_micro":
        assert [i for i, block in enumerate(model.blocks) if block.dynamic] == [1, 4, 7, 10, 13]
        assert len(model.blocks) == 15
        assert name.endswith(f"_{model.config.patch_size}")
        assert (model.config.in_channels, model.config.out_channels, model.config.sample_size) == (4, 8, 32)


def test_arguments_go_before_the_named_size() -> None:
    model = create_denoiser(
        "denoiser_micro", hidden_size=32, patch_size=4, in_channels=1, num_classes=3, sample_size=28
    )
    assert model(*inputs(2, 28, 28, 1)).sample.shape == (2, 2, 28, 28)
    assert model.label_embed.weight.shape == (4, 32)
    with pytest.raises(ValueError, match=r"no denoiser 'denoiser_xl_2'; choose one of .*denoiser_s_2"):
        create_denoiser("denoiser_xl_2")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_block_is_its_formula(dynamic: bool) -> None:
    block, x, condition = DenoiserBlock(8, dynamic=dynamic), torch.randn(3, 4, 5, 8), torch.randn(3, 8)
    shift1, scale1, gate1, shift2, scale2, gate2 = (
        (block.modulation.weight @ condition[..., None] + block.modulation.bias[:, None])[..., 0]
        .view(3, 6, 1, 1, 8)
        .unbind(1)
    )
    y = F.layer_norm(x, (8,), eps=1e-6)
    y = y + gate1 * block.conv(y * (1 + scale1) + shift1)
    z = F.layer_norm(y, (8,), eps=1e-6) * (1 + scale2) + shift2
    y = y + gate2 * block.fc2(F.gelu(block.fc1(z), approximate="tanh"))
    torch.testing.assert_close(block(x, condition), y, rtol=1e-5, atol=1e-5)
    kinds = (DynamicDepthwiseConv2d, DynamicLinear) if dynamic else (DepthwiseConv2d, nn.Linear)
    assert (type(block.conv), type(block.fc1)) == kinds
    assert not list(block.norm1.parameters()) + list(block.norm2.parameters())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("part", ["fc1", "act", "fc2"])
def test_fused_and_plain_blocks_are_one_function(dynamic: bool, part: str) -> None:
    block, seen = DenoiserBlock(8, dynamic=dynamic), []
    x, condition = torch.randn(3, 4, 5, 8), torch.randn(3, 8)
    results = []
    for hooked in (False, True):
        handle = block.get_submodule(part).register_forward_hook(lambda *_: seen.append(part)) if hooked else None
        block.zero_grad()
        tokens, given = x.clone().requires_grad_(), condition.clone().requires_grad_()
        out = block(tokens, given)
        out.square().sum().backward()
        results.append([out.detach(), tokens.grad, given.grad, *(p.grad for p in block.parameters())])
        assert seen == [part] * hooked
        if handle:
            handle.remove()
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


def test_a_part_that_is_run_elsewhere_is_called() -> None:
    """Off-loading replaces ``forward`` of a module whose parameters hold no values until then."""
    block, x, condition = DenoiserBlock(8, dynamic=True), torch.randn(1, 4, 5, 8), torch.randn(1, 8)
    expected = block(x, condition)
    weight, forward = block.fc2.weight, block.fc2.forward
    block.fc2.weight = nn.Parameter(torch.zeros_like(weight))

    def elsewhere(hidden: Tensor) -> Tensor:
        block.fc2.weight = weight
        return forward(hidden)

    block.fc2.forward = elsewhere
    torch.testing.assert_close(block(x, condition), expected)


def reference_positions(height: int, width: int, dim: int) -> np.ndarray:
    out = np.zeros((height, width, dim))
    for row in range(height):
        for column in range(width):
            for half, position in enumerate((column, row)):
                for i in range(dim // 4):
                    angle = position / 10000 ** (i / (dim / 4))
                    out[row, column, half * dim // 2 + i] = math.sin(angle)
                    out[row, column, half * dim // 2 + dim // 4 + i] = math.cos(angle)
    return out


def test_positions_count_columns_first_on_any_grid(golden_denoiser: Golden) -> None:
    np.testing.assert_allclose(sincos_positions(3, 7, 12)[0], reference_positions(3, 7, 12), atol=1e-7)
    released = golden_denoiser["weights.pos_embed"]
    torch.testing.assert_close(sincos_positions(8, 8, 48).flatten(1, 2), released, rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [(8, 8), (12, 6), (6, 20), (2, 2), (10, 8), (7, 13), (3, 2)])
@pytest.mark.parametrize("patch_size", [2, 4])
def test_any_height_and_width(size: tuple[int, int], patch_size: int) -> None:
    model = lively(patch_size=patch_size, sample_size=(8, 12))
    if min(size) < patch_size:
        with pytest.raises(ValueError, match="smaller than one patch"):
            model(*inputs(2, *size))
        return
    x, t, y = inputs(2, *size)
    out = model(x, t, y).sample
    assert out.shape == (2, 8, *size)
    x[:, :, -1, -1] += 1  # no pixel is dropped
    assert not torch.equal(model(x, t, y).sample[..., :1, :1], out[..., :1, :1])


def test_rectangular_grids_are_the_transpose_of_each_other() -> None:
    """Columns exchanged for rows everywhere, positions included."""
    model, (x, t, y) = lively(), inputs(2, 12, 6)
    out = model(x, t, y).sample
    for block in model.blocks:
        block.conv.weight.data = block.conv.weight.data.mT.contiguous()
    model.input_embed.proj.weight.data = model.input_embed.proj.weight.data.mT.contiguous()
    weight, bias = model.out_proj.weight.data, model.out_proj.bias.data
    model.out_proj.weight.data = weight.unflatten(0, (2, 2, 8)).transpose(0, 1).flatten(0, 2)
    model.out_proj.bias.data = bias.unflatten(0, (2, 2, 8)).transpose(0, 1).flatten(0, 2)
    positions = model._positions
    model._positions = lambda tokens: positions(tokens.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(model(x.mT, t, y).sample, out.mT, rtol=1e-4, atol=1e-4)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model, (x, t, y) = lively(), inputs(5, 8, 10)
    out = model(x, t, y).sample
    for i in range(5):
        assert relative_error(model(x[i : i + 1], t[i : i + 1], y[i : i + 1]).sample, out[i : i + 1]) < 1e-5
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(model(x[order], t[order], y[order]).sample, out[order])


def test_every_input_matters() -> None:
    model, (x, t, y) = lively(), inputs(2)
    out = model(x, t, y).sample
    for other in ((x + 0.1, t, y), (x, t + 1, y), (x, t, y + 1), (x.flip(-1), t, y), (x.roll(2, -1), t, y)):
        assert relative_error(model(*other).sample, out) > 1e-4


def test_one_time_step_serves_all_and_a_tuple_is_returned() -> None:
    model, (x, _, y) = lively(), inputs(2)
    expected = model(x, torch.tensor([7, 7]), y).sample
    for t in (7, 7.0, torch.tensor(7), torch.tensor([7])):
        assert torch.equal(model(x, t, y, return_dict=False)[0], expected)


@pytest.mark.parametrize("training", [False, True])
def test_an_empty_batch(training: bool) -> None:
    model = lively().train(training)
    out = model(*inputs(0)).sample
    assert out.shape == (0, 8, 8, 8)
    out.sum().backward()


def test_initialisation() -> None:
    model = create_denoiser("denoiser_micro", hidden_size=128)
    assert not model(*inputs(2)).sample.any()
    x, condition = torch.randn(1, 3, 3, 128), torch.randn(1, 128)
    for block in model.blocks:
        torch.testing.assert_close(block(x, condition), block.norm1(x))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and ".fc1." not in name.replace(".proj", "") and ".conv." not in name:
            assert parameter.any() == (".fc1.bias" in name), name
    assert model.label_embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.time_embed.linear_1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    static, dynamic = model.blocks[0], model.blocks[1]
    for linear in (static.fc1, static.fc2, dynamic.fc2, dynamic.fc1.proj):
        assert linear.weight.std().item() == pytest.approx(math.sqrt(2 / sum(linear.weight.shape)), rel=0.05)
        assert not linear.bias.any()
    patches = model.input_embed.proj.weight
    assert patches.abs().max() <= math.sqrt(6 / (128 + 16))
    assert patches.std().item() == pytest.approx(math.sqrt(2 / (128 + 16)), rel=0.1)
    for drawn in (dynamic.fc1.weight, dynamic.fc1.bias, dynamic.fc1.w1, dynamic.fc1.w2, dynamic.conv.weight):
        assert drawn.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_model_built_on_meta_can_be_initialised() -> None:
    with torch.device("meta"):
        model = create_denoiser("denoiser_micro")
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(math.nan)
    model.init_weights()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert torch.equal(model.pos_embed, create_denoiser("denoiser_micro").pos_embed)


def test_learned_sigma_doubles_the_channels() -> None:
    assert lively(in_channels=3)(*inputs(1, channels=3)).sample.shape == (1, 6, 8, 8)
    model = lively(in_channels=3, learn_sigma=False)
    assert model(*inputs(1, channels=3)).sample.shape == (1, 3, 8, 8)
    assert model.config.out_channels == 3
    assert create_denoiser("denoiser_micro", out_channels=8).config.out_channels == 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"out_channels": 4}, "4 channels with learned sigma need out_channels=8, got 4"),
        ({"out_channels": 8, "learn_sigma": False}, "without learned sigma need out_channels=4"),
        ({"dynamic_every": -1}, "dynamic_every must be 0"),
        ({"depth": 0}, "must be at least 1"),
        ({"num_classes": 0}, "must be at least 1"),
        ({"class_dropout_prob": 1.5}, "between 0 and 1"),
        ({"hidden_size": 50}, "multiple"),
        ({"linear_predictor": "x"}, "unknown linear_predictor"),
        ({"conv_predictor": "x"}, "unknown conv_predictor"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_denoiser("denoiser_micro", **arguments)


def test_arguments_reach_their_part() -> None:
    assert not any(block.dynamic for block in create_denoiser("denoiser_micro", dynamic_every=0).blocks)
    assert [block.dynamic for block in create_denoiser("denoiser_micro", dynamic_every=2).blocks] == [
        False,
        True,
    ] * 2 + [False]
    assert create_denoiser("denoiser_micro", mlp_ratio=2.0).blocks[0].fc1.out_features == 128


@pytest.mark.parametrize("labels", [[-1, 0], [0, 11]])
def test_labels_out_of_range_are_refused(labels: list[int]) -> None:
    x, t, _ = inputs(2)
    with pytest.raises(ValueError, match=r"between 0 and 10 \(10 is the null class\)"):
        lively()(x, t, torch.tensor(labels))
    with pytest.raises(ValueError, match="between 0 and 9; this model has no null class"):
        lively(class_dropout_prob=0.0)(x, t, torch.tensor([0, 10]))


def test_label_dropout_draws_once_a_sample_and_in_training_only() -> None:
    model = lively(class_dropout_prob=0.3)
    x, t = torch.randn(1, 4, 8, 8).expand(200, -1, -1, -1), torch.full((200,), 5)
    labels = torch.full((200,), 2)
    plain, null = model(x[:1], t[:1], labels[:1]).sample, model(x[:1], t[:1], torch.tensor([10])).sample
    out = model.train()(x, t, labels).sample
    is_plain, is_null = (torch.isclose(out, kind, atol=1e-5).flatten(1).all(1) for kind in (plain, null))
    assert (is_plain ^ is_null).all()  # a mask drawn anew in each block would give mixtures
    assert 35 < is_null.sum() < 85
    assert torch.allclose(model.eval()(x, t, labels).sample, plain, atol=1e-5)


@pytest.mark.parametrize("class_dropout_prob", [0.0, 0.1])
def test_every_parameter_gets_a_gradient(class_dropout_prob: float) -> None:
    model = create_denoiser("denoiser_micro", class_dropout_prob=class_dropout_prob).train()
    model(*inputs(2)).sample.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert model.label_embed.num_embeddings == (11 if class_dropout_prob else 10)


@pytest.mark.parametrize("linear_predictor", LINEAR_PREDICTORS)
@pytest.mark.parametrize("conv_predictor", CONV_PREDICTORS)
def test_every_predictor_serves_the_denoiser(linear_predictor: str, conv_predictor: str) -> None:
    model = lively(linear_predictor=linear_predictor, conv_predictor=conv_predictor, depth=2)
    x, t, y = inputs(2, 8, 10)
    out = model(x, t, y).sample
    out.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert relative_error(model(x[:1], t[:1], y[:1]).sample, out[:1]) < 1e-5


def test_every_switch_changes_the_output_and_is_saved(tmp_path: Path) -> None:
    seen = []
    for switch in ({}, {"static_weight": False}, {"normalize": False}, {"pool": 1}, {"pool": "7x7"}):
        torch.manual_seed(0)
        model = lively(depth=2, **switch)
        seen.append(model(*inputs(2, 20, 14)).sample)
        assert not any(torch.allclose(seen[-1], other, rtol=1e-3, atol=1e-5) for other in seen[:-1]), switch
        model.save_pretrained(tmp_path)
        assert torch.equal(WeightFormerDenoiser.from_pretrained(tmp_path)(*inputs(2, 20, 14)).sample, seen[-1])


def test_gradient_checkpointing_changes_memory_only() -> None:
    model, (x, t, y) = lively(class_dropout_prob=0.5).train(), inputs(4)
    calls, results = [], []
    model.blocks[2].register_forward_pre_hook(lambda *_: calls.append(0))
    for enable in (False, True):
        (model.enable_gradient_checkpointing if enable else model.disable_gradient_checkpointing)()
        model.zero_grad()
        calls.clear()
        torch.manual_seed(3)
        loss = model(x, t, y).sample.square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        assert len(calls) == 1 + enable
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain)
    with torch.no_grad():
        model(x, t, y)
    assert len(calls) == 3


def test_save_and_load(tmp_path: Path) -> None:
    model, given = lively(sample_size=(8, 12), dynamic_every=2), inputs(2, 8, 12)
    model.save_pretrained(tmp_path)
    for low_memory in (True, False):
        loaded = WeightFormerDenoiser.from_pretrained(tmp_path, low_cpu_mem_usage=low_memory)
        assert torch.equal(loaded(*given).sample, model(*given).sample)
        assert loaded.config.items() >= {"dynamic_every": 2, "out_channels": 8}.items()
        assert not loaded.training
    rebuilt = WeightFormerDenoiser.from_config(model.config)
    assert load_weights(rebuilt, tmp_path / "diffusion_pytorch_model.safetensors")(*given).sample.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """Also on large latents and grids, where a sum over tokens would overflow."""
    model = lively()
    for height, scale in ((8, 1), (64, 50)):
        x, t, y = inputs(2, height, 8)
        expected = model(scale * x, t, y).sample.detach()
        model.zero_grad()
        if autocast:
            with torch.autocast("cpu", dtype):
                out = model(scale * x, t, y).sample
        else:
            out = model.to(dtype)(scale * x.to(dtype), t, y).sample
            assert out.dtype == dtype
        assert relative_error(out, expected) < (5e-2 if dtype == torch.bfloat16 else 1e-2)
        out.float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        model.float()


def test_weights_may_be_stored_in_half_precision() -> None:
    model, given = lively(), inputs(2)
    expected = model(*given).sample
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    assert model.blocks[1].fc2.weight.dtype == torch.bfloat16
    assert 1e-6 < relative_error(model(*given).sample, expected) < 5e-2


def test_compiles_without_a_break_and_with_free_sizes() -> None:
    model = lively(depth=1, dynamic_every=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for size in ((2, 8, 8), (3, 12, 10), (4, 7, 9), (5, 8, 8)):
            given = inputs(*size)
            torch.testing.assert_close(compiled(*given).sample, model(*given).sample, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the training grid and any other


def test_diffusers_compiles_block_by_block() -> None:
    model, given = lively(depth=2), inputs(2)
    expected = model(*given).sample
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(*given).sample, expected, rtol=1e-4, atol=1e-5)


def test_fine_tuning_keeps_what_fits() -> None:
    source = lively()
    other = create_denoiser("denoiser_micro", num_classes=3, sample_size=12)
    with pytest.raises(ValueError, match=r"label_embed.weight: file \(11, 64\), model \(4, 64\)"):
        load_weights(other, source.state_dict())
    with pytest.warns(UserWarning, match="do not match") as caught:
        load_weights(other, source.state_dict(), strict=False)
    assert len(caught) == 1
    assert torch.equal(other.blocks[1].fc1.weight, source.blocks[1].fc1.weight)
    assert torch.equal(other.pos_embed, sincos_positions(6, 6, 64).flatten(1, 2))


def test_released_files_both_ways(golden_denoiser: Golden, denoiser: nn.Module, tmp_path: Path) -> None:
    released = {k.removeprefix("weights."): v for k, v in golden_denoiser.items() if k.startswith("weights.")}
    save_weights(denoiser, tmp_path / "released.safetensors", released=True)
    written = load_weights(WeightFormerDenoiser(**denoiser.config), tmp_path / "released.safetensors").state_dict()
    assert all(torch.equal(written[k], v) for k, v in denoiser.state_dict().items())
    content = load_file(tmp_path / "released.safetensors")
    assert content.keys() == released.keys()
    assert all(torch.equal(content[k], v) for k, v in released.items())


def test_a_released_training_checkpoint_gives_its_averaged_weights(
    golden_denoiser: Golden, denoiser: nn.Module, tmp_path: Path
) -> None:
    released = {k.removeprefix("weights."): v for k, v in golden_denoiser.items() if k.startswith("weights.")}
    raw = {f"module.{k}": torch.zeros_like(v) for k, v in released.items()}
    torch.save({"model": raw, "ema": released, "opt": {"state": {}}}, tmp_path / "0400000.pt")
    model = load_weights(WeightFormerDenoiser(**denoiser.config), tmp_path / "0400000.pt")
    assert all(torch.equal(v, denoiser.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "ema.module.", "model.ema."]
)
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "ema"])
def test_wrappers_and_prefixes(denoiser: nn.Module, prefix: str, wrapper: str | None) -> None:
    content: dict[str, Any] = {prefix + k: v for k, v in denoiser.state_dict().items()}
    model = load_weights(WeightFormerDenoiser(**denoiser.config), {wrapper: content} if wrapper else content)
    assert all(torch.equal(v, denoiser.state_dict()[k]) for k, v in model.state_dict().items())


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_a_weight_file_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    create_denoiser("denoiser_micro").save_pretrained(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"x": Payload(marker)}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(OSError, match="Unable to load weights"):
        WeightFormerDenoiser.from_pretrained(tmp_path)
    assert not marker.exists()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)


def test_a_missing_extra_says_what_to_install() -> None:
    code = """
import sys
sys.modules["diffusers"] = None
import weightformer
try:
    weightformer.models.WeightFormerDenoiser
except ImportError as error:
    print(error)
print(hasattr(weightformer.models, "nothing"))
"""
    result = run(code)
    assert result.stdout.splitlines() == [
        'the denoiser needs diffusers; run: pip install "weightformer[generation]"',
        "False",
    ], result.stderr


def test_the_class_is_found_where_a_saved_pipeline_names_it() -> None:
    assert WeightFormerDenoiser.__module__ == "weightformer.models"
    assert weightformer.models.WeightFormerDenoiser is WeightFormerDenoiser
