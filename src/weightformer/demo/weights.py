"""Look at the weights that a trained model predicts for some images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightformer.layers import DynamicDepthwiseConv2d, DynamicLinear

__all__ = ["neighbour_agreement", "predicted_weights", "principal_plane"]


@torch.inference_mode()
def predicted_weights(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The weight that every dynamic layer predicts for each image, by the layer's name: (B, ...).

    Args:
        model: any module with dynamic layers.
        images: (B, in_chans, height, width).
    """
    weights: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda layer, inputs, name=name: weights.__setitem__(name, layer.predict(inputs[0]))
        )
        for name, module in model.named_modules()
        if isinstance(module, (DynamicDepthwiseConv2d, DynamicLinear))
    ]
    try:
        model.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
    return weights


def neighbour_agreement(weights: Tensor, labels: Sequence[Any]) -> float:
    """Share of images whose nearest other image, by the distance of predicted weights (B, ...), has the same label."""
    distances = torch.cdist(weights.flatten(1).double(), weights.flatten(1).double())
    nearest = distances.fill_diagonal_(float("inf")).argmin(1).tolist()
    return sum(labels[i] == labels[j] for i, j in enumerate(nearest)) / len(labels)


def principal_plane(weights: Tensor) -> tuple[Tensor, float]:
    """Coordinates (B, 2) of weights (B, ...) in the plane where they vary most, and the share of variance it holds."""
    centred = (weights - weights.mean(0)).flatten(1).double()
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    return u[:, :2] * s[:2], float((s[:2] ** 2).sum() / (s**2).sum())
