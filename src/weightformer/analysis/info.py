"""A model in a few lines: size, cost, and where its weights are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

import weightformer
from weightformer.analysis.flops import multiply_adds

__all__ = ["describe"]


def describe(name: str, size: Sequence[int] | None = None, *, in_chans: int | None = None, **kwargs: Any) -> str:
    """Parameters, multiply-adds and dynamic blocks of a model, as text.

    Args:
        name: a timm model name, ours included, or a denoiser (``denoiser_s_2``).
        size: a side, or height and width, in pixels (of the latent, for a denoiser); by default the model's own.
        in_chans: channels of the image or latent; by default 3, or the denoiser's own.
        **kwargs: for the model's constructor.

    Raises:
        ValueError: an unknown name, a size that is not one or two numbers, or an argument the model does not take.
    """
    if size and (len(size) > 2 or min(size) < 1):
        raise ValueError(f"--size takes a side, or height and width, in pixels; got {size}")
    wanted = (size[0], size[-1]) if size else None
    build = _denoiser if name.startswith(("denoiser", "dig_")) else _timm_model
    try:
        model, channels, (height, width), inputs = build(name, wanted, in_chans, kwargs)
    except TypeError as error:
        raise ValueError(f"{name} does not take {kwargs}: {error}") from error
    macs = multiply_adds(model, channels, height, width, *inputs)
    dynamic = [i for i, block in enumerate(getattr(model, "blocks", ())) if getattr(block, "dynamic", False)]
    lines = [
        f"{name} at {height} x {width} px, {channels} channel(s)",
        f"parameters      {sum(p.numel() for p in model.parameters()):,}",
        f"multiply-adds   {macs / 1e9:.3f} G an image (FLOPs are twice that)",
    ]
    if dynamic:
        depth = len(list(model.get_submodule("blocks").children()))
        lines.append(f"dynamic blocks  {', '.join(map(str, dynamic))} of {depth}")
    return "\n".join(lines)


_Model = tuple[nn.Module, int, tuple[int, int], tuple[Tensor, ...]]  # and its input: channels, size, what else it takes


def _timm_model(name: str, size: tuple[int, int] | None, in_chans: int | None, kwargs: dict[str, Any]) -> _Model:
    if not timm.is_model(name):
        raise ValueError(
            f"timm knows no model {name!r}; ours: {', '.join(timm.list_models('weightformer*'))}, and denoiser_s_2 "
            "and the like"
        )
    config = cast(Any, timm.models.get_pretrained_cfg(name))
    size = size or config.input_size[1:]
    if config.fixed_input_size:
        kwargs = {"img_size": size} | kwargs
    in_chans = 3 if in_chans is None else in_chans
    return timm.create_model(name, in_chans=in_chans, **kwargs), in_chans, size, ()


def _denoiser(name: str, size: tuple[int, int] | None, in_chans: int | None, kwargs: dict[str, Any]) -> _Model:
    if in_chans is not None:
        kwargs = {"in_channels": in_chans} | kwargs
    with torch.device("meta"):
        model = weightformer.models.create_denoiser(name, **kwargs)
    own = model.config.sample_size
    own = (own, own) if isinstance(own, int) else own
    return model, model.config.in_channels, size or own, (torch.tensor([0]), torch.tensor([0]))
