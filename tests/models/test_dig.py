from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity import assert_close
from weightformer import ops
from weightformer.analysis.flops import multiply_adds
from weightformer.analysis.info import describe
from weightformer.models import DiG, create_denoiser
from weightformer.models.dig import DiGBlock, GatedLinearAttention


def inputs(batch: int = 2, height: int = 8, width: int = 8, **kwargs: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch + height + 3 * width)
    latents = torch.randn(batch, 4, height, width, generator=generator, **kwargs)
    return latents, torch.arange(batch) * 97 + 3, torch.arange(batch) % 10


def lively(**kwargs: Any) -> DiG:
    """A micro model without the zeros and identities of its initialisation."""
    model = create_denoiser("dig_micro", **kwargs).eval()
    for name, parameter in model.named_parameters():
        if not parameter.any() or "conv" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


# What is published


@pytest.mark.parametrize(
    ("name", "parameters", "published"), [("dig_s_2", 33e6, 4.30e9), ("dig_b_2", 130.5e6, 17.07e9)]
)
def test_published_sizes(name: str, parameters: float, published: float) -> None:
    """The published multiply-adds lack what a counter of modules does not see: the MLP's last layer, the recurrence."""
    with torch.device("meta"):
        model = create_denoiser(name)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.02)
    tokens, dim = 256, model.config.hidden_size
    counted = multiply_adds(model, 4, 32, 32, torch.tensor([0]), torch.tensor([0]))
    fused = tokens * sum(block.mlp.fc2.weight.numel() for block in model.blocks)
    recurrence = len(model.blocks) * tokens * 2 * (dim // 2) * (dim // model.config.num_heads)
    assert counted - fused == pytest.approx(published, rel=0.02)
    assert counted - fused - recurrence == pytest.approx(published, rel=0.005)


def test_cost_is_linear_in_tokens() -> None:
    model, rest = create_denoiser("dig_micro"), (torch.tensor([0]), torch.tensor([0]))
    one, two, four = (multiply_adds(model, 4, *size, *rest) for size in ((8, 8), (8, 16), (16, 16)))
    assert four - two == 2 * (two - one)


def test_info_knows_it() -> None:
    assert "dig_s_2 at 32 x 32 px, 4 channel(s)" in describe("dig_s_2")
    with pytest.raises(ValueError, match=r"no denoiser 'dig_x'; choose one of .*dig_s_2, dig_b_2"):
        create_denoiser("dig_x")


# Parts


def test_attention_is_its_formula() -> None:
    layer, x = GatedLinearAttention(16, 2).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, v = (part(x).unflatten(-1, (2, -1)) for part in (layer.query, layer.key, layer.value))
    decay = torch.sigmoid(layer.decay(x)).pow(1 / 16).unflatten(-1, (2, -1))
    state, outputs = torch.zeros(2, 2, 4, 8, dtype=torch.float64), []
    for n in range(5):
        state = decay[:, n, :, :, None] * state + torch.einsum("bhk,bhv->bhkv", k[:, n], v[:, n])
        y = torch.einsum("bhk,bhkv->bhv", q[:, n], state) / 4**0.5
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm.weight
        outputs.append(y.flatten(1))
    gate = layer.gate(x)
    assert_close(layer(x), layer.proj(torch.stack(outputs, 1) * gate * torch.sigmoid(gate)), 1e-12)


@pytest.mark.parametrize("index", range(4))
def test_a_block_is_its_formula_in_its_direction(index: int) -> None:
    """The direction accumulates as in the authors' code: flip after each block, transpose after every second."""
    block, x, c = DiGBlock(16, 2, index).double(), torch.randn(2, 3, 5, 16).double(), torch.randn(2, 16).double()
    grid = x.transpose(1, 2) if index >= 2 else x
    grid = grid.flip(1, 2) if index % 2 else grid
    shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(c).unflatten(-1, (6, 16))[:, :, None].unbind(1)
    tokens = grid.flatten(1, 2)
    y = tokens + gate1 * block.attn(F.layer_norm(tokens, (16,), eps=1e-6) * (1 + scale1) + shift1)
    a, b = block.mlp.fc1(F.layer_norm(y, (16,), eps=1e-6) * (1 + scale2) + shift2).chunk(2, -1)
    y = y + gate2 * block.mlp.fc2(F.silu(a) * b)
    y = block.conv(y.view(grid.shape))
    y = y.flip(1, 2) if index % 2 else y
    y = y.transpose(1, 2) if index >= 2 else y
    assert_close(block(x, c), y, 1e-12)


def test_a_token_reaches_all_others_after_two_blocks_of_opposite_direction() -> None:
    model, (x, t, y) = lively(depth=2), inputs(1, 16, 16)
    for block in model.blocks:
        nn.init.dirac_(block.conv.weight, groups=64)  # so that only attention mixes
    changed = x.clone()
    changed[:, :, 7, 9] += 3
    moved = (model(changed, t, y).sample - model(x, t, y).sample).abs().amax(1)[0]
    assert (moved > 1e-7).all()


# The model


@pytest.mark.parametrize("size", [(8, 8), (6, 10), (7, 3), (2, 2)], ids=str)
def test_any_height_and_width(size: tuple[int, int]) -> None:
    model = lively()
    out = model(*inputs(2, *size)).sample
    assert out.shape == (2, 8, *size)
    assert out.isfinite().all()


def test_implementations_agree() -> None:
    model, (x, t, y) = lively().double(), inputs(2, 10, 14, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x, t, y).sample
        with ops.implementation("reference"):
            assert_close(model(x, t, y).sample, expected, 1e-10)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model, (x, t, y) = lively(), inputs(3)
    out = model(x, t, y).sample
    changed = x.clone()
    changed[1] *= -3
    assert torch.equal(model(changed, t, y).sample[[0, 2]], out[[0, 2]])
    single = torch.cat([model(x[i : i + 1], t[i : i + 1], y[i : i + 1]).sample for i in range(3)])
    torch.testing.assert_close(single, out, rtol=1e-4, atol=1e-5)
    assert model(*(part[:0] for part in (x, t, y))).sample.shape == (0, 8, 8, 8)


def test_initialisation() -> None:
    model = create_denoiser("dig_micro")
    assert not model(*inputs()).sample.any()
    x, condition = torch.randn(1, 3, 4, 64), torch.randn(1, 64)
    for block in model.blocks:
        assert torch.equal(block(x, condition), x)  # no branch, and the identity for a convolution
        bound = 2**-2.5 * (6 / 128) ** 0.5
        assert block.attn.gate.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert not block.attn.decay[1].bias.any()


def test_every_parameter_gets_a_gradient_with_and_without_checkpointing() -> None:
    model, (x, t, y) = lively(class_dropout_prob=0.0).train(), inputs(4)
    found = []
    for checkpointing in (False, True):
        (model.enable_gradient_checkpointing if checkpointing else model.disable_gradient_checkpointing)()
        model.zero_grad()
        model(x, t, y).sample.square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert grad.any(), name
        assert_close(found[1][name], grad, 1e-6, name)


def test_save_and_load(tmp_path: Path) -> None:
    model = lively()
    model.save_pretrained(tmp_path)
    loaded = DiG.from_pretrained(tmp_path)
    assert dict(loaded.config)["num_heads"] == 2
    assert torch.equal(loaded(*inputs()).sample, model(*inputs()).sample)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    model, (x, t, y) = lively(), inputs()
    expected = model(x, t, y).sample
    with torch.autocast("cpu", dtype=dtype):
        narrow = model(x, t, y).sample
    assert (narrow - expected).abs().max() < 0.1 * expected.abs().max()
    assert model.to(dtype)(x.to(dtype), t, y).sample.dtype == dtype


def test_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    model, (x, t, y) = lively(depth=2), inputs()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, t, y).sample, model(x, t, y).sample, rtol=1e-5, atol=1e-5)


def test_every_argument_does_something() -> None:
    plain = {k: v.shape for k, v in create_denoiser("dig_micro").state_dict().items()}
    for argument in ("patch_size", "in_channels", "hidden_size", "depth", "num_classes", "num_heads"):
        other = create_denoiser("dig_micro", **{argument: 8})
        assert {k: v.shape for k, v in other.state_dict().items()} != plain, argument
    assert create_denoiser("dig_micro", learn_sigma=False).config.out_channels == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"num_heads": 5}, r"5 heads cannot share queries of 64 / 2 channels"), ({"depth": 0}, "depth and num_classes")],
)
def test_arguments_out_of_range(arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_denoiser("dig_micro", **arguments)
