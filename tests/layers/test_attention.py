from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from parity import assert_close
from weightformer.layers import AttentionMLP, DynamicLinear, attention_mlp

MASKS = ["none", "boolean", "additive", "per head", "causal", "padding"]


def make_mask(kind: str, heads: int, queries: int, keys: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).tril()
    if kind == "padding":  # the last keys of the second image are padding
        mask = torch.ones(2, 1, 1, keys, dtype=torch.bool)
        mask[1, ..., keys // 2 :] = False
        return mask
    if kind == "additive":
        return torch.randn(queries, keys)
    shape = (2, heads, queries, keys) if kind == "per head" else (queries, keys)
    return torch.rand(shape) < 0.5


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("heads", "queries", "keys"), [(1, 5, 5), (3, 17, 17), (2, 3, 11)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_scaled_dot_product_attention(
    dtype: torch.dtype, heads: int, queries: int, keys: int, kind: str
) -> None:
    q, k, v = (torch.randn(2, heads, n, 8, dtype=dtype, requires_grad=True) for n in (queries, keys, keys))
    mask = make_mask(kind, heads, queries, keys)
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    actual = attention_mlp(q, k.mT * 8**-0.5, v, mask)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    cotangent = torch.randn_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(y, (q, k, v), cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5 * tolerance)


def test_a_query_that_may_see_nothing_gives_zero_as_in_torch() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([True, False, True])[:, None].expand(3, 3)
    y = attention_mlp(q, k.mT / 2, v, mask)
    assert not y[:, :, 1].any()
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    y.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("kind", MASKS)
def test_module_equals_timm_with_its_weights(kind: str) -> None:
    theirs = timm.layers.Attention(24, num_heads=3, qkv_bias=True).eval()
    mine = AttentionMLP(24, 3, qkv_bias=True)
    mine.load_state_dict(theirs.state_dict())
    x, mask = torch.randn(2, 10, 24), make_mask(kind, 3, 10, 10)
    torch.testing.assert_close(mine(x, mask), theirs(x, attn_mask=mask), rtol=0, atol=1e-6)


def test_a_whole_vision_transformer_of_predicted_mlps() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=3, img_size=64).eval()
    x = torch.randn(1, 3, 64, 64)
    expected = model(x)
    for block in model.blocks:
        mine = AttentionMLP(192, 3, qkv_bias=True)
        mine.load_state_dict(block.attn.state_dict())
        block.attn.forward = lambda x, attn_mask=None, mine=mine, **_: mine(x, attn_mask)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


def test_predict_returns_the_weights_of_the_mlp() -> None:
    module, x = AttentionMLP(12, 2).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    w1, w2 = module.predict(x)
    assert (w1.shape, w2.shape) == ((2, 2, 6, 7), (2, 2, 7, 6))  # a hidden unit a token
    queries = (x @ module.qkv.weight[:12].T).unflatten(-1, (2, 6)).transpose(1, 2)
    heads = (queries @ w1).softmax(-1) @ w2
    torch.testing.assert_close(module(x), module.proj(heads.transpose(1, 2).flatten(2)))


def test_without_softmax_it_is_the_linear_predictor() -> None:
    """The step from attention to linear cost (docs/idea.md): ``q (K^T V)`` is a linear layer predicted from X^T X."""
    attention, x = AttentionMLP(8, 1).double(), torch.randn(2, 3, 5, 8, dtype=torch.float64)
    layer = DynamicLinear(8, 8, predictor="linear", static_weight=False, normalize=False, pool=1, dtype=torch.float64)
    query, key, value = (weight.T for weight in attention.qkv.weight.chunk(3))  # (in, out)
    with torch.no_grad():
        layer.w1.copy_(key @ query.T)  # (X Wk Wq^T)^T (X Wv): the query projection moves into the weight
        layer.w2.copy_(value)
        layer.bias.zero_()
    tokens = x.flatten(1, 2)
    w1, w2 = attention.predict(tokens)
    without_softmax = (tokens @ query) @ (w1[:, 0] @ w2[:, 0])
    expected = without_softmax / (4 * 15)  # the layer takes a quarter of the mean where attention takes the sum
    assert_close(layer(x).flatten(1, 2), expected, 1e-12)


def test_gradcheck() -> None:
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (2, 4, 5), (2, 5, 3))]
    assert torch.autograd.gradcheck(lambda *args: attention_mlp(*args, torch.ones(3, 5).tril().bool()), inputs)


def test_width_that_the_heads_cannot_share() -> None:
    with pytest.raises(ValueError, match="a width of 10 cannot be shared by 3 heads"):
        AttentionMLP(10, 3)
