"""Architectures, one readable file each, and the checkpoint layouts they read and write."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightformer.models.convnext_isotropic import ConvNeXtIsotropic
from weightformer.models.pvt import PyramidVisionTransformer
from weightformer.models.weightformer import WeightFormer

if TYPE_CHECKING:
    from weightformer.models.denoiser import WeightFormerDenoiser, create_denoiser
    from weightformer.models.dig import DiG

__all__ = [
    "ConvNeXtIsotropic",
    "DiG",
    "PyramidVisionTransformer",
    "WeightFormer",
    "WeightFormerDenoiser",
    "create_denoiser",
]

# What diffusers is needed for. A saved pipeline names this module, and diffusers then wants the base class here too.
_LAZY = {"DiG": "dig", "ModelMixin": "denoiser", "WeightFormerDenoiser": "denoiser", "create_denoiser": "denoiser"}


def __getattr__(name: str) -> Any:
    """The denoisers' names, imported when asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"weightformer.models.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "diffusers":
            raise
        raise ImportError('the denoiser needs diffusers; run: pip install "weightformer[generation]"') from error
