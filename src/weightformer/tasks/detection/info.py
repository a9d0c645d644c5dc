"""What a detector's backbone and pyramid cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm

from weightformer.analysis.flops import multiply_adds
from weightformer.tasks.detection.config import HeadConfig
from weightformer.tasks.detection.pyramid import PyramidBackbone
from weightformer.training.config import ModelConfig

__all__ = ["describe"]

_WINDOW = 14  # ViTDet's


def describe(name: str, size: Sequence[int] | None = None, *, in_chans: int | None = None, **kwargs: Any) -> str:
    """Multiply-adds of a backbone with its feature pyramid, as text; of a ViT also with ViTDet's windows.

    Args:
        name: a timm model name, ours included.
        size: a side, or height and width, in pixels; by default 1024.
        in_chans: channels of the image; by default 3.
        **kwargs: for the model's constructor.

    Raises:
        ValueError: an unknown name or argument, or a size that is not one or two positive numbers.
    """
    size, in_chans = list(size or [1024]), in_chans or 3
    if len(size) > 2 or min(size) < 1:
        raise ValueError(f"--size takes a side, or height and width, in pixels; got {size}")
    height, width = size[0], size[-1]
    head, model = HeadConfig(), ModelConfig(name=name, kwargs=kwargs, in_chans=in_chans)
    lines = [f"{name} as a detector's backbone at {height} x {width} px, {in_chans} channel(s)"]
    is_vit = timm.models.is_model_in_modules(name, ["vision_transformer", "deit"])
    for window, label in {0: "global attention", _WINDOW: f"windows of {_WINDOW}"}.items() if is_vit else [(0, "")]:
        trunk = PyramidBackbone(model, channels=head.channels, strides=head.strides, window=window)
        rows, columns = (-(-side // trunk.stride) for side in (height, width))
        pyramid = multiply_adds(trunk.pyramid, trunk.channels, rows, columns)
        whole = multiply_adds(trunk, in_chans, height, width)
        lines.append(
            f"multiply-adds   {whole / 1e9:.2f} G an image = backbone {(whole - pyramid) / 1e9:.2f} G + pyramid "
            f"{pyramid / 1e9:.2f} G" + (f", {label}" if label else "")
        )
    lines += [
        f"pyramid         {head.channels} channels, strides {', '.join(map(str, head.strides))}",
        f"parameters      {sum(p.numel() for p in trunk.parameters()):,} (FLOPs are twice the multiply-adds)",
    ]
    return "\n".join(lines)
