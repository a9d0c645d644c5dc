"""Losses over a whole set, the same for any number of processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanLosses"]


class MeanLosses(Metric):
    """Means of the parts of the hybrid loss, and the number of samples they were taken over.

    They are summed in float64, so the result does not depend on how the samples were split over processes or batches.
    """

    full_state_update = False
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("loss", "mse", "vb"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Mapping[str, Tensor]) -> None:
        """Add one batch: losses (B,) by name."""
        for name, values in losses.items():
            setattr(self, name, getattr(self, name) + values.double().sum())
        self.samples += len(losses["loss"])

    def compute(self) -> dict[str, Tensor]:
        """``loss``, ``mse`` and ``vb`` (0 without learned variance), and the count ``samples``."""
        return {name: getattr(self, name) / self.samples for name in ("loss", "mse", "vb")} | {"samples": self.samples}
