"""Parity of two forms of an op: the output and every gradient, under one random cotangent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Relative RMS error allowed against the float64 reference, by the dtype of the form under test.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected values (or the difference's own where those are all zero)."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    size = expected.double().square().mean().sqrt()
    return (difference / size if size > 0 else difference).item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "value") -> None:
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    error = relative_error(actual, expected)
    largest = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance, f"{name}: relative RMS error {error:.1e} > {tolerance:.0e} (largest {largest:.1e})"


def assert_parity(
    form: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Mapping[str, Tensor | float],
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> None:
    """``form`` in ``dtype`` against ``reference`` in float64: the output, and the gradient of every tensor."""
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    expected, cotangent, expected_grads = _run(reference, inputs, torch.float64, None)
    actual, _, actual_grads = _run(form, inputs, dtype, cotangent)
    assert_close(actual, expected, tolerance, "output")
    for name, grad in expected_grads.items():
        assert_close(actual_grads[name], grad, tolerance, f"gradient of {name}")


def _run(
    form: Callable[..., Tensor], inputs: Mapping[str, Tensor | float], dtype: torch.dtype, cotangent: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    # `.to` keeps strides; `detach` alone would share the caller's graph.
    args = {k: v.detach().to(dtype).requires_grad_() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    out = form(*args.values())
    if cotangent is None:
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors = {k: v for k, v in args.items() if isinstance(v, Tensor)}
    grads = torch.autograd.grad(out, list(tensors.values()), cotangent.to(out.dtype))
    return out.detach(), cotangent, dict(zip(tensors, grads, strict=True))
