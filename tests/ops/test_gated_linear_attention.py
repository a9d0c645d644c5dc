from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parity import TOLERANCE, assert_close, assert_parity
from weightformer import ops
from weightformer.ops.gated_linear_attention import eager, reference

# (B, H, N, K, V): one token, less and more than a chunk of 16, exactly two, a number that leaves a rest.
SIZES = [(2, 1, 1, 3, 2), (2, 3, 5, 4, 6), (1, 2, 32, 8, 8), (2, 2, 75, 5, 7)]
FORMS = {"reference": reference.gated_linear_attention, "eager": eager.gated_linear_attention}


def make_inputs(size: tuple[int, ...], dtype: torch.dtype = torch.float64, decay: float = 1.0) -> dict[str, Tensor]:
    b, h, n, k, v = size
    inputs = {name: torch.randn(b, h, n, width, dtype=dtype) for name, width in (("q", k), ("k", k), ("v", v))}
    return inputs | {"log_decay": -decay * torch.rand(b, h, n, k, dtype=dtype)}


def by_pairs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """An independent witness: what token j wrote, decayed by every token up to i, read by token i."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for i in range(q.shape[2]):
        for j in range(i + 1):
            kept = log_decay[:, :, j + 1 : i + 1].sum(2).exp()
            out[:, :, i] += (q[:, :, i] * kept * k[:, :, j]).sum(-1, keepdim=True) * v[:, :, j]
    return out * q.shape[-1] ** -0.5


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equals_a_loop_over_pairs(form: Callable[..., Tensor], size: tuple[int, ...]) -> None:
    inputs = make_inputs(size)
    assert_close(form(*inputs.values()), by_pairs(*inputs.values()), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_chunks_equal_the_recurrence(size: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_parity(eager.gated_linear_attention, reference.gated_linear_attention, make_inputs(size), dtype)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0])
def test_weak_and_strong_decays_are_exact_in_float32(decay: float) -> None:
    """Split into ``exp(b_i) exp(-b_j)``, a decay of 30 a token would overflow."""
    inputs = make_inputs((2, 2, 75, 5, 7), decay=decay)
    assert_parity(eager.gated_linear_attention, reference.gated_linear_attention, inputs, torch.float32, 1e-5)


def test_a_decay_that_forgets_everything_leaves_each_token_with_itself() -> None:
    inputs = {name: t.requires_grad_() for name, t in make_inputs((2, 2, 40, 5, 7), torch.float32).items()}
    y = eager.gated_linear_attention(inputs["q"], inputs["k"], inputs["v"], inputs["log_decay"] * 1e5 - 1e3)
    own = (inputs["q"] * inputs["k"]).sum(-1, keepdim=True) * inputs["v"] * 5**-0.5
    torch.testing.assert_close(y, own)
    y.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in inputs.values())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradcheck(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs((1, 2, 18, 2, 3))
    assert torch.autograd.gradcheck(form, [t.requires_grad_() for t in inputs.values()], fast_mode=True)


@pytest.mark.parametrize("name", ["reference", "eager", "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, name: str) -> None:
    def form(*args: Tensor) -> Tensor:
        with ops.implementation(name), torch.autocast("cpu", dtype=dtype):
            y = ops.gated_linear_attention(*(t.to(dtype) for t in args[:3]), args[3])
        assert y.dtype == dtype
        return y

    inputs = make_inputs((2, 2, 200, 8, 8), torch.float32, decay=0.01)
    assert_parity(form, reference.gated_linear_attention, inputs, torch.float32, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_token_sees_a_later_one_or_another_image(form: Callable[..., Tensor]) -> None:
    inputs = make_inputs((3, 2, 40, 4, 4))
    y = form(*inputs.values())
    changed = {name: t.clone() for name, t in inputs.items()}
    for t in changed.values():
        t[1, :, 20:] *= 0.5
    other = form(*changed.values())
    assert torch.equal(other[[0, 2]], y[[0, 2]])
    assert torch.equal(other[1, :, :20], y[1, :, :20])
    assert not torch.allclose(other[1, :, 20:], y[1, :, 20:])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_image(form: Callable[..., Tensor]) -> None:
    inputs = {name: t.requires_grad_() for name, t in make_inputs((0, 2, 20, 4, 3)).items()}
    y = form(*inputs.values())
    assert y.shape == (0, 2, 20, 3)
    y.sum().backward()


def one_token_ahead(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return reference.gated_linear_attention(q, k, v, log_decay.roll(1, 2))


def no_scale(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return reference.gated_linear_attention(q, k, v, log_decay) * q.shape[-1] ** 0.5


def chunks_forgotten(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    parts = zip(*(t.split(16, 2) for t in (q, k, v, log_decay)), strict=True)
    return torch.cat([reference.gated_linear_attention(*part) for part in parts], 2)


@pytest.mark.parametrize("fault", [one_token_ahead, no_scale, chunks_forgotten], ids=lambda f: f.__name__)
def test_a_planted_fault_is_seen(fault: Callable[..., Tensor]) -> None:
    with pytest.raises(AssertionError, match="output"):
        assert_parity(fault, reference.gated_linear_attention, make_inputs(SIZES[3]), torch.float32, 1e-3)
