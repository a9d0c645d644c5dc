"""Multiply-adds of a model, counted on the formula, so that the figure does not depend on which fast form runs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weightformer import ops

__all__ = ["multiply_adds"]


def multiply_adds(model: nn.Module, in_chans: int, height: int, width: int, *inputs: Tensor) -> int:
    """Multiply-adds of one forward pass on one image: matrix products and convolutions, as papers count.

    A copy of the model runs on the meta device in the ``reference`` implementation, so nothing is computed and
    predicted weights are counted in the released order of contraction. FLOPs are twice this.

    Args:
        model: any module that maps images (1, in_chans, height, width), or latents; it is left as it was.
        in_chans: channels of the image.
        height: in pixels.
        width: in pixels.
        *inputs: what else it takes: for a denoiser, time step and class.
    """
    model = copy.deepcopy(model).to("meta").eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), ops.implementation("reference"), counter:
        model(torch.empty(1, in_chans, height, width, device="meta"), *(x.to("meta") for x in inputs))
    return counter.get_total_flops() // 2
