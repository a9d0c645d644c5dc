from __future__ import annotations

import pytest
import torch
from torch import nn

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
