"""A model in a few lines: size, cost, and where its weights are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import timm

import weightformer  # noqa: F401  registers the models
from weightformer.analysis.flops import multiply_adds

__all__ = ["describe"]


def describe(name: str, size: Sequence[int] | None = None, *, in_chans: int = 3, **kwargs: Any) -> str:
    """Parameters, multiply-adds and dynamic blocks of a model, as text.

    Args:
        name: a timm model name, ours included.
        size: a side, or height and width, in pixels; by default the model's own.
        in_chans: channels of the image.
        **kwargs: for the model's constructor.

    Raises:
        ValueError: an unknown name, a size that is not one or two numbers, or an argument the model does not take.
    """
    if not timm.is_model(name):
        raise ValueError(f"timm knows no model {name!r}; ours: {', '.join(timm.list_models('weightformer*'))}")
    config = cast(Any, timm.models.get_pretrained_cfg(name))
    height, width = {0: config.input_size[1:], 1: tuple(size or ()) * 2, 2: tuple(size or ())}.get(
        len(size or ()), (0, 0)
    )
    if min(height, width) < 1:
        raise ValueError(f"--size takes a side, or height and width, in pixels; got {size}")
    if config.fixed_input_size:
        kwargs.setdefault("img_size", (height, width))
    try:
        model = timm.create_model(name, in_chans=in_chans, **kwargs)
    except TypeError as error:
        raise ValueError(f"{name} does not take {kwargs}: {error}") from error
    macs = multiply_adds(model, in_chans, height, width)
    dynamic = [i for i, block in enumerate(getattr(model, "blocks", ())) if getattr(block, "dynamic", False)]
    lines = [
        f"{name} at {height} x {width} px, {in_chans} channel(s)",
        f"parameters      {sum(p.numel() for p in model.parameters()):,}",
        f"multiply-adds   {macs / 1e9:.3f} G an image (FLOPs are twice that)",
    ]
    if dynamic:
        depth = len(list(model.get_submodule("blocks").children()))
        lines.append(f"dynamic blocks  {', '.join(map(str, dynamic))} of {depth}")
    return "\n".join(lines)
