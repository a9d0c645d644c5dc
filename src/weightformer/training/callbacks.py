"""Averaged weights, a guard against NaN, and what a run prints."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar, WeightAveraging
from torch import Tensor, nn

__all__ = ["EpochSummary", "ExponentialMovingAverage", "NonFiniteGuard", "ProgressBar", "first_non_finite"]


class ExponentialMovingAverage(WeightAveraging):
    """Averaged weights, used in evaluation and saved as the checkpoint's ``state_dict``.

    Update n uses the decay ``min(decay, (1 + n) / (10 + n))``, so that a short run does not end on its initial weights.
    The raw weights are saved beside them as ``current_model_state``; buffers are copied, not averaged.
    """

    def __init__(self, decay: float) -> None:
        def average(averaged: Any, current: Any, count: Tensor | int) -> None:
            n = int(count)
            torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + n) / (10 + n)))

        super().__init__(multi_avg_fn=average, use_buffers=False)


class NonFiniteGuard(Callback):
    """Stops training at the first loss or gradient that is not finite, naming the step and the layer.

    Nothing is saved after that step, so the last checkpoint is a good one. Under float16 a scaled gradient may
    overflow harmlessly (the scaler skips the step), so there only the loss is watched.
    """

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch at hand, to find the layer if its loss is not finite."""
        self._batch, self._batch_idx = batch, batch_idx

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Check the loss before anything is derived from it."""
        if torch.isfinite(loss):
            return
        where = first_non_finite(pl_module, self._batch) or "the loss itself"
        raise FloatingPointError(
            f"the loss became {loss.item()} at step {trainer.global_step} (epoch {trainer.current_epoch}, batch "
            f"{self._batch_idx}); the first output that is not finite comes from {where}. "
            "Lower optim.lr, or train in bf16-mixed or 32-true"
        )

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the gradients before they are applied."""
        if trainer.precision == "16-mixed":
            return
        grads = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        norms = torch._foreach_norm(list(grads.values()))
        if norms and not torch.isfinite(torch.stack(norms).sum()):
            bad = next(name for name, grad in grads.items() if not torch.isfinite(grad).all())
            raise FloatingPointError(
                f"the gradient of {bad} is not finite at step {trainer.global_step} (epoch {trainer.current_epoch}). "
                "Lower optim.lr or raise its warm-up"
            )


@torch.no_grad()
def first_non_finite(module: L.LightningModule, batch: Any) -> str | None:
    """The name of the first layer whose output is not finite on this batch, by running it again; None if all are."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return hook

    leaves = [(name, m) for name, m in module.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(watch(name)) for name, m in leaves]
    try:
        module.training_step(batch, 0)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


class ProgressBar(TQDMProgressBar):
    """A bar on a terminal; in a log file only the lines of `EpochSummary`."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)
        if not sys.stderr.isatty():
            self.disable()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The metrics, without the logger's version."""
        return {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}


class EpochSummary(Callback):
    """One line an epoch on the first process: loss, metrics and the time it took."""

    def __init__(self) -> None:
        self._start = time.perf_counter()  # a run resumed at the end of an epoch never starts that epoch

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line; the evaluation of this epoch, if any, has run by now."""
        if not trainer.is_global_zero:
            return
        metrics = {k.removesuffix("_epoch"): float(v) for k, v in sorted(trainer.callback_metrics.items())}
        if (trainer.current_epoch + 1) % (trainer.check_val_every_n_epoch or 1):  # then they are of an earlier epoch
            metrics = {name: value for name, value in metrics.items() if not name.startswith("val/")}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if not name.endswith("_step"))
        seconds = time.perf_counter() - self._start
        print(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {shown}  {seconds:.1f} s", flush=True)
