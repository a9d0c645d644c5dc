"""Shapes and gradients of the C++ ops, registered by `weightformer.ops.native.build`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weightformer.ops.mlp.eager import backward_blocks

__all__ = ["register"]

_ops = torch.ops.weightformer_native


def _fake_depthwise(x: Tensor, kernel: Tensor, bias: Tensor | None, residual: bool) -> Tensor:
    return x.new_empty(x.shape)


def _fake_depthwise_kernel_grad(x: Tensor, grad: Tensor, size: int) -> Tensor:
    return x.new_empty(x.shape[0], size * size, x.shape[3]).mT.unflatten(2, (size, size))


def _fake_depthwise_norm(
    x: Tensor, kernel: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, ...]:
    statistics = (*x.shape[:3], 1)
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(statistics), x.new_empty(statistics)


def _fake_mlp(
    x: Tensor | None, y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, approximate: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    groups, tokens, _ = y.shape
    return y.new_empty(y.shape), y.new_empty(groups if keep else 0, tokens, w1.shape[2])


def _convolution_backward(
    grad: Tensor, x: Tensor, kernel: Tensor, residual: bool, wants: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, kernel and bias: convolving with the mirrored kernel is the transpose of convolving."""
    wants_x, wants_kernel, wants_bias = wants
    grad_x = _ops.depthwise(grad, kernel.flip(-2, -1), None, residual) if wants_x else None
    grad_kernel = None
    if wants_kernel:
        grad_kernel = _ops.depthwise_kernel_grad(x, grad, kernel.shape[-1])
        grad_kernel = grad_kernel.sum(0) if kernel.ndim == 3 else grad_kernel
    return grad_x, grad_kernel, grad.sum((0, 1, 2)) if wants_bias else None


def _setup_depthwise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, kernel, _, ctx.residual = inputs
    ctx.save_for_backward(x, kernel)


def _depthwise_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, kernel = ctx.saved_tensors
    return (*_convolution_backward(grad, x, kernel, ctx.residual, ctx.needs_input_grad[:3]), None)


def _setup_depthwise_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, kernel, _, weight, shift, _ = inputs
    z, _, mean, rstd = output
    ctx.save_for_backward(x, kernel, weight, shift, z, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(True)


def _depthwise_norm_backward(ctx: Any, grad_z: Tensor, grad_normed: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, kernel, weight, shift, z, mean, rstd = ctx.saved_tensors
    wants = ctx.needs_input_grad
    through_norm, grad_weight, grad_shift = torch.ops.aten.native_layer_norm_backward(
        grad_normed.contiguous(), z, z.shape[-1:], mean, rstd, weight, shift, [True, wants[3], wants[4]]
    )
    grad = grad_z + through_norm
    return *_convolution_backward(grad, x, kernel, True, wants[:3]), grad_weight, grad_shift, None


def _setup_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, y, w1, _, w2, _, ctx.approximate, keep = inputs
    if not keep:
        raise RuntimeError("the native mlp needs keep=True to be differentiated")
    ctx.save_for_backward(y, w1, w2, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(True)


def _mlp_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    y, w1, w2, hidden = ctx.saved_tensors
    form = "tanh" if ctx.approximate else "none"
    return *backward_blocks(grad, y, w1, w2, hidden, form, ctx.needs_input_grad[:6]), None, None


def register() -> None:
    """Tell torch the shapes and gradients of the ops, once they are loaded."""
    fakes: dict[str, Callable[..., Any]] = {
        "depthwise": _fake_depthwise,
        "depthwise_kernel_grad": _fake_depthwise_kernel_grad,
        "depthwise_norm": _fake_depthwise_norm,
        "mlp": _fake_mlp,
    }
    gradients: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "depthwise": (_depthwise_backward, _setup_depthwise),
        "depthwise_norm": (_depthwise_norm_backward, _setup_depthwise_norm),
        "mlp": (_mlp_backward, _setup_mlp),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"weightformer_native::{name}", fake)
    for name, (backward, setup) in gradients.items():
        torch.library.register_autograd(f"weightformer_native::{name}", backward, setup_context=setup)
