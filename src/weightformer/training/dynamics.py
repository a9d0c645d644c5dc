"""What training does to predicted weights: how large they grow, how they differ between images, where gradients go.

The recorded quantities, P being the predicted part of a layer's weight (weight minus its static part) for B images:

- ``ratio``: mean over images of ||P||, over the norm of the static part. Far above 1, the static weight hardly counts.
- ``saturation``: mean column norm of a normalised P (kernel norm for convolutions). The normalisation dW / (||dW|| + 1)
  keeps it below 1; near 1 the layer has lost the size of dW, and gradients through it fade as 1 / ||dW||^2.
- ``variation``: ||P - mean over images|| / ||P||. At 0 every image gets the same weight: an expensive static layer.
- ``rank``: exp(entropy of the shares of variance along the principal axes of P over the images), between 1 and B - 1,
  or 0 where nothing varies. Near 1 images differ along one direction only. No warning is given of it: runs that train
  well pass through 1 too.
- ``largest``: the largest absolute weight (65,504 is the end of float16).
- ``grad``: norm of the gradient of a block's parameters, and of all (before clipping).
"""

from __future__ import annotations

import contextlib
import re
import statistics
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from weightformer.layers import DynamicDepthwiseConv2d, DynamicLinear

__all__ = [
    "DynamicsRecorder",
    "Thresholds",
    "early_warnings",
    "evaluation_mode",
    "gradient_norms",
    "predicted_statistics",
]

_CURES = {
    "ratio": "predicted weights drown the static ones; normalise them, or lower optim.lr",
    "saturation": "the normalisation lost their size, and gradients fade; lower optim.lr or lengthen the warm-up",
    "grad": "the gradient jumped; clip it (optim.clip_norm), lower optim.lr or lengthen the warm-up",
}


@dataclass(frozen=True)
class Thresholds:
    """Beyond these a record is an early warning. docs/experiments.md says on which runs they were chosen."""

    ratio: float = 20.0
    saturation: float = 0.95
    grad: float = 20.0
    """Times the median of the gradient norms recorded before."""


class DynamicsRecorder(Callback):
    """Records the dynamics every few optimiser steps into the run's log, and warns once a layer and kind.

    Predicted weights are looked at in evaluation mode on the first images of the batch that is about to be trained on;
    no random number is drawn, so a recorded run ends on the same weights as one that is not.

    Args:
        every: optimiser steps between records; the first is of step 0, the initialisation.
        num_images: images to compare.
        thresholds: when to warn.
    """

    def __init__(self, every: int, num_images: int = 16, thresholds: Thresholds | None = None) -> None:
        self.every, self.num_images = every, num_images
        self.thresholds = thresholds or Thresholds()
        self._norms: deque[float] = deque(maxlen=20)
        self._warned: set[tuple[str, str]] = set()
        self._last = -1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at the predicted weights."""
        if self._is_due(trainer) and trainer.global_step != self._last:  # once for batches that share a step
            self._last = trainer.global_step
            with trainer.precision_plugin.forward_context():
                self._record(trainer, predicted_statistics(pl_module, batch[0][: self.num_images]))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Look at the gradients, before they are clipped."""
        if self._is_due(trainer):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            norms = gradient_norms(pl_module, scaler.get_scale() if scaler else 1.0)
            self._record(trainer, norms)
            self._norms.append(norms["all/grad"])

    def _is_due(self, trainer: L.Trainer) -> bool:
        return trainer.is_global_zero and trainer.global_step % self.every == 0

    def _record(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({f"dynamics/{name}": value for name, value in values.items()}, trainer.global_step)
        for layer, kind, sentence in early_warnings(values, self._norms, self.thresholds):
            if (layer, kind) not in self._warned:
                self._warned.add((layer, kind))
                warnings.warn(f"step {trainer.global_step}: {sentence}", stacklevel=2)


def early_warnings(
    values: Mapping[str, float], norms_before: deque[float] | list[float], thresholds: Thresholds
) -> list[tuple[str, str, str]]:
    """Layer, kind and sentence of everything in a record that is beyond its threshold.

    Args:
        values: of `predicted_statistics` or `gradient_norms`.
        norms_before: norms of all gradients in the records before; fewer than five are too few to judge by.
        thresholds: see there.
    """
    found = []
    for name, value in values.items():
        layer, _, kind = name.rpartition("/")
        limit = getattr(thresholds, kind, None)
        if kind == "grad":
            if layer != "all" or len(norms_before) < 5:
                continue
            limit = thresholds.grad * statistics.median(norms_before)
        if limit is not None and value > limit:
            found.append((layer, kind, f"{kind} of {layer} is {value:.3g}, above {limit:.3g}: {_CURES[kind]}"))
    return found


@torch.no_grad()
def predicted_statistics(model: nn.Module, images: Tensor) -> dict[str, float]:
    """``ratio``, ``saturation``, ``variation``, ``rank`` and ``largest`` (see above) of every dynamic layer.

    Args:
        model: any module with dynamic layers that maps images; it is left in the mode it was in.
        images: (B, in_chans, height, width); B at least 2 for ``variation`` and ``rank`` to mean something.

    Returns:
        Values by ``layer/quantity``; ``ratio`` only beside a static part, ``saturation`` only of a normalised one.
    """
    values: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(layer: Any, inputs: tuple[Tensor]) -> None:
            for quantity, value in _statistics(layer, layer.predict(inputs[0])).items():
                values[f"{name}/{quantity}"] = value

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name.removeprefix("model.")))
        for name, module in model.named_modules()
        if isinstance(module, (DynamicDepthwiseConv2d, DynamicLinear))
    ]
    try:
        with evaluation_mode(model):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return values


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; afterwards each of its modules is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _statistics(layer: DynamicDepthwiseConv2d | DynamicLinear, weight: Tensor) -> dict[str, float]:
    """Of one layer and the weights (B, ...) it predicts."""
    linear = isinstance(layer, DynamicLinear)
    static = None if layer.weight is None else layer.weight.float() if linear else layer.weight.squeeze(1).float()
    predicted = weight.float() if static is None else weight.float() - static
    rows = predicted.flatten(1)
    size = rows.norm(dim=1)
    values = {"largest": float(weight.abs().max())}
    if static is not None:
        values["ratio"] = float(size.mean() / static.norm())
    if layer.normalize:
        values["saturation"] = float(predicted.norm(dim=1 if linear else (2, 3)).mean())
    centred = rows - rows.mean(dim=0)
    values["variation"] = float(centred.norm() / rows.norm().clamp_min(1e-30))
    # A smaller variation is rounding; none is greater where weights are not finite.
    values["rank"] = _effective_rank(centred) if values["variation"] > 1e-6 else 0.0
    return values


def _effective_rank(centred: Tensor) -> float:
    """Of rows (B, D) whose mean is zero, not all of them zero."""
    scaled = centred.double() / centred.norm().double()
    spectrum = torch.linalg.eigvalsh(scaled @ scaled.T).clamp_min(0)
    return float(torch.exp(torch.special.entr(spectrum / spectrum.sum()).sum()))


def gradient_norms(model: nn.Module, scale: float = 1.0) -> dict[str, float]:
    """Norm of the gradient of each block's parameters, ``blocks.i/grad``, and of all, ``all/grad``.

    Args:
        model: after a backward pass.
        scale: what a gradient scaler multiplied the gradients with.
    """
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    squares: dict[str, Tensor] = {}
    for (name, _), norm in zip(named, torch._foreach_norm([grad for _, grad in named]), strict=True):
        block = re.search(r"blocks\.\d+", name)
        for key in ["all"] + ([block[0]] if block else []):
            squares[key] = squares.get(key, torch.zeros_like(norm)) + norm**2
    return {f"{key}/grad": float(square.sqrt()) / scale for key, square in squares.items()}
