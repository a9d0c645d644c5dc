"""No timing without equal results: every contender against its twin, outputs and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightformer.bench.contenders import Contender, logits

__all__ = ["TOLERANCE", "Parity", "check", "relative_error"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# The gradient of a whole network passes each rounding many times; single ops are held to the tolerance itself.
_GRADIENT_FACTOR = 10


@dataclass(frozen=True)
class Parity:
    """Relative root-mean-square errors against the twin, or `None` where a contender has no twin."""

    output: float | None
    gradient: float | None
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether both stay within the tolerance (ten times it, for gradients of the whole network)."""
        if self.output is None:
            return True
        gradient = self.gradient or 0.0
        return self.output <= self.tolerance and gradient <= _GRADIENT_FACTOR * self.tolerance


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; infinite where ``actual`` is not finite."""
    actual, expected = actual.double(), expected.double()
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def check(contender: Contender, size: int, device: torch.device, dtype: torch.dtype, *, training: bool) -> Parity:
    """Run a contender and its twin on two images; with ``training``, compare every parameter's gradient too."""
    if contender.twin is None:
        return Parity(None, None, TOLERANCE[dtype])
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    actual, expected = (_outputs(c, size, images, training) for c in (contender, contender.twin))
    gradient = None
    if training:
        gradient = max(relative_error(actual[1][name], expected[1][name]) for name in expected[1])
    return Parity(relative_error(actual[0], expected[0]), gradient, TOLERANCE[dtype])


def _outputs(contender: Contender, size: int, images: Tensor, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = contender.load(size, images.device, images.dtype)
    with contender.active():
        if not training:
            with torch.inference_mode():
                return logits(model, images), {}
        output = logits(model, images)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
        output.backward(cotangent)
    return output.detach(), _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("_orig_mod."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
