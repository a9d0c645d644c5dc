from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightformer import layers
from weightformer.layers import Block, DepthwiseConv2d, DynamicDepthwiseConv2d, DynamicLinear


def test_static_block_is_two_residual_lines() -> None:
    block, x = Block(8), torch.randn(2, 3, 5, 8)
    y = x + block.conv(x)
    y = y + block.fc2(nn.functional.gelu(block.fc1(block.norm2(y))))
    torch.testing.assert_close(block(x), y)
    assert isinstance(block.norm1, nn.Identity)
    assert isinstance(block.conv, DepthwiseConv2d)
    assert isinstance(block.fc1, nn.Linear)


def test_the_norm_of_a_dynamic_block_replaces_the_stream() -> None:
    block, x = Block(8, dynamic=True), torch.randn(2, 3, 5, 8)
    y = block.norm1(x)
    y = y + block.conv(y)
    y = y + block.fc2(nn.functional.gelu(block.fc1(block.norm2(y))))
    torch.testing.assert_close(block(x), y)
    torch.testing.assert_close(
        block(100 * x + 3), block(x), rtol=1e-3, atol=1e-4
    )  # so its scale and mean are forgotten
    assert isinstance(block.conv, DynamicDepthwiseConv2d)
    assert isinstance(block.fc1, DynamicLinear)


@pytest.mark.parametrize("dynamic", [False, True])
def test_drop_path_drops_the_mlp_of_whole_images_and_never_the_convolution(dynamic: bool) -> None:
    block, x = Block(8, dynamic=dynamic, drop_path=0.5).train(), torch.randn(64, 3, 5, 8)
    y = block.norm1(x)
    y = y + block.conv(y)
    mlp = block.fc2(block.act(block.fc1(block.norm2(y))))
    out = block(x)
    kept = ((out - y).flatten(1).abs().amax(1) > 1e-6)[:, None, None, None]
    assert 10 < kept.sum() < 54
    torch.testing.assert_close(out, y + 2 * mlp * kept)
    torch.testing.assert_close(block.eval()(x), y + mlp)


def test_every_norm_has_the_released_epsilon() -> None:
    norms = [m for m in Block(8, dynamic=True).modules() if isinstance(m, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-6, 1e-6]


def test_gelu_is_the_exact_one() -> None:
    assert Block(8).act.approximate == "none"


def test_arguments_reach_their_part() -> None:
    assert Block(8, mlp_ratio=2.5).fc1.out_features == 20
    for name in ("linear_predictor", "conv_predictor"):
        with pytest.raises(ValueError, match=f"unknown {name} 'x'"):
            Block(8, dynamic=True, **{name: "x"})
    block = Block(8, dynamic=True, static_weight=False, normalize=False, pool="7x7")
    assert (block.conv.weight, block.fc1.weight, block.fc1.pool) == (None, None, "7x7")
    assert not block.conv.normalize
    assert not block.fc1.normalize


BLOCKS = [
    {},
    {"dynamic": True},
    {"dynamic": True, "linear_predictor": "deep", "conv_predictor": "conv"},
    {"dynamic": True, "linear_predictor": "gap", "conv_predictor": "amp_dir", "static_weight": False},
    {"dynamic": True, "linear_predictor": "linear", "conv_predictor": "gap", "pool": 1, "normalize": False},
]


@pytest.mark.parametrize("kwargs", BLOCKS, ids=lambda kwargs: "-".join(map(str, kwargs.values())) or "static")
def test_fused_and_plain_blocks_are_one_function(kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = Block(8, drop_path=0.5, **kwargs).train()
    x = torch.randn(5, 3, 5, 8)
    results = []
    for fuses in (True, False):
        block._fuses = lambda fuses=fuses: fuses
        block.zero_grad()
        torch.manual_seed(1)
        tokens = x.clone().requires_grad_()
        out = block(tokens)
        out.square().sum().backward()
        results.append([out.detach(), tokens.grad, *(p.grad for p in block.parameters())])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.fixture
def narrow_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.block, "_STRIP_TOKENS", 1)
    monkeypatch.setattr(layers.block, "_STRIP_ROWS", 2)


@pytest.mark.usefixtures("narrow_strips")
@pytest.mark.parametrize("height", [1, 2, 4, 7])
@pytest.mark.parametrize("kwargs", BLOCKS, ids=lambda kwargs: "-".join(map(str, kwargs.values())) or "static")
def test_strips_are_the_whole(kwargs: dict[str, Any], height: int) -> None:
    torch.manual_seed(0)
    block, x = Block(8, **kwargs).double().eval(), torch.randn(2, height, 5, 8, dtype=torch.float64)
    expected, before = block(x), x.clone()
    with torch.no_grad():
        strips = len(block._strips(x))
        assert strips == (0 if kwargs.get("linear_predictor") == "gap" else (height + 1) // 2)
        torch.testing.assert_close(block(x), expected)
        torch.testing.assert_close(block(x.transpose(1, 2).contiguous().transpose(1, 2)), expected)
        assert torch.equal(x, before)
        out = block(x, overwrite_x=True)
    torch.testing.assert_close(out, expected)
    assert (out.data_ptr() == x.data_ptr()) == (strips > 0)


@pytest.mark.usefixtures("narrow_strips")
def test_tokens_are_kept_where_a_gradient_is_recorded() -> None:
    block, x = Block(8).eval(), torch.randn(1, 6, 5, 8)
    before = x.clone()
    block(x, overwrite_x=True).sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("part", ["conv", "norm2", "fc1", "act", "fc2"])
def test_hooks_on_parts_still_run(part: str) -> None:
    block, x, seen = Block(8, dynamic=True), torch.randn(1, 3, 5, 8), []
    expected = block(x)
    handle = block.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    torch.testing.assert_close(block(x), expected)
    assert seen == [part]
    handle.remove()
    block(x)
    assert seen == [part]


def test_replaced_and_parametrised_parts_are_respected() -> None:
    block, x = Block(8), torch.randn(1, 3, 5, 8)
    torch.nn.utils.parametrizations.spectral_norm(block.fc2)
    block.eval()
    y = x + block.conv(x)
    torch.testing.assert_close(block(x), y + block.fc2(block.act(block.fc1(block.norm2(y)))))

    class Zero(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(*x.shape[:-1], self.out_features)

    block.fc2 = Zero(32, 8)
    torch.testing.assert_close(block(x), y)
